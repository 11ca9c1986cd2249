"""Exported values arrive in a shell exactly as they were, whatever they hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.workloads.base import Value
from lora_tune.workloads.config_file import render, value_text

HOSTILE = (
    "$(touch hacked)",
    "`id`",
    "a b",
    "'",
    '"',
    "\\",
    "a\nb",
    "; rm -rf x",
    "*",
    "~",
    "#",
    "!",
    "é☃",
    "-n",
    "",
    "\t",
)


def sourced(text: str, folder: Path) -> dict[str, str]:
    """The environment after sourcing ``text`` in a clean bash under ``set -eu``."""
    (folder / "config_X.sh").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-euc", "source ./config_X.sh && exec env -0"],
        cwd=folder,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return dict(item.split("=", 1) for item in done.stdout.decode().split("\0") if item)


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_stays_a_value(value: str, tmp_path: Path) -> None:
    found = sourced(render({"X": value}, comments=(value, "a\nexport Y=1")), tmp_path)
    assert found["X"] == value
    assert "Y" not in found
    assert {p.name for p in tmp_path.iterdir()} == {"config_X.sh"}


values = st.dictionaries(
    st.from_regex(r"LT_[A-Z]{1,8}", fullmatch=True),
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.booleans(),
        st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",))),
    ),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(values)
def test_every_value_survives_the_round_trip(tmp_path_factory: pytest.TempPathFactory, given: dict[str, Value]) -> None:
    found = sourced(render(given), tmp_path_factory.mktemp("round"))
    assert {name: found[name] for name in given} == {name: value_text(value) for name, value in given.items()}
    for name, value in given.items():
        if isinstance(value, float):
            assert float(found[name]) == value
