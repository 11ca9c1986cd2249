"""What is printed for fifty mistakes, as tests/golden/mistakes.txt holds it: what came, where, and what to do."""

from __future__ import annotations

import re

import pytest

from lora_tune.base.errors import EXIT_INPUT, EXIT_SETUP
from tests.mistakes import GOLDEN, MISTAKES, Mistake, answer, text

LISTS = re.compile(r"(known are|the benchmarks are|its settings:|known studies:|commands:) [^\n]*")
"""What further kinds, settings and commands make longer."""


def without_lists(shown: str) -> str:
    return LISTS.sub(r"\1 ...", shown)


def test_the_list_is_long_and_each_answer_is_the_one_that_was_judged() -> None:
    assert len({mistake.what for mistake in MISTAKES}) >= 40
    golden = GOLDEN.read_text(encoding="utf-8")
    assert without_lists(text()) == without_lists(golden), "judge it, then: python -m tests.mistakes"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.what)
def test_an_answer_is_a_sentence_and_an_exit_code_never_a_traceback(mistake: Mistake) -> None:
    code, said = answer(mistake)
    assert "Traceback" not in said
    assert code in (EXIT_INPUT, EXIT_SETUP), said
    if mistake.old and mistake.words.startswith("sweep"):
        assert said.startswith("lora_tune: mine.toml: "), "the file, then the key"
