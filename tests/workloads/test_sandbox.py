"""Configs are programs: whatever they do when they are sourced ends soon, and in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError
from lora_tune.workloads import sandbox
from lora_tune.workloads.sandbox import source_files


def config(folder: Path, text: str, name: str = "config_x.sh") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_what_a_config_exports_comes_back_as_it_is(tmp_path: Path) -> None:
    found = source_files([config(tmp_path, "export A=1 B=$'two\\nlines'\nunexported=3\necho said >&2\n")])
    assert found.values == {"A": "1", "B": "two\nlines"}
    assert found.said == ("said",)


def test_nothing_of_this_shell_reaches_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAX_STEPS", "1")
    monkeypatch.setenv("BASH_ENV", str(config(tmp_path, "export SMUGGLED=1\n", "env.sh")))
    assert source_files([config(tmp_path, "export SEEN=${MAX_STEPS:-none}\n")]).values == {"SEEN": "none"}


def test_a_users_shell_goes_on_after_a_failure_and_a_strict_one_does_not(tmp_path: Path) -> None:
    file = config(tmp_path, "source ./nowhere.sh\nexport A=1\n")
    found = source_files([file])
    assert found.values == {"A": "1"}
    assert "nowhere.sh: No such file or directory" in found.said[0]
    with pytest.raises(SetupError, match=r"cannot be sourced: .*nowhere\.sh"):
        source_files([file], strict=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('source "${BASH_SOURCE[0]}"\n', "does it source itself"),
        ("while :; do :; done\n", "does not end"),
        ("sleep 60 & wait\n", "does not end"),
        ("yes\n", "bash was ended by signal"),
        ("exit 0\n", "it ends the shell"),
        ("echo no data here; exit 3\n", "no data here"),
        ("if then\n", "syntax error"),
    ],
    ids=["itself", "loop", "waits", "flood", "exit 0", "exit 3", "no bash"],
)
def test_what_never_comes_back_is_ended_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    if words == "does not end":
        monkeypatch.setattr(sandbox, "SECONDS", 1.0)
    with pytest.raises(SetupError, match=words):
        source_files([config(tmp_path, text)], strict="if then" in text)
