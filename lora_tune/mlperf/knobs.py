"""Which MLLOG key a variable of the public implementations ends in: ``knobs.csv``, with where each was seen."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

INTERVAL_NAMES = ("VAL_CHECK_INTERVAL", "PRIMUS_EVAL_INTERVAL", "EVAL_INTERVAL", "EVAL_EVERY", "EVAL_STEPS")
"""Variables that say how often a run evaluates, in samples or in steps."""

INTERVAL_IN_STEPS = frozenset({"llama31_405b", "llama31_8b", "gpt_oss_20b", "deepseekv3_671b"})
"""Benchmarks whose public implementations count VAL_CHECK_INTERVAL in optimizer steps; others count samples.

Source: conf/custom.yaml of NVIDIA's llama31_405b and llama31_8b (v5.0 to v6.0), conf/gpt_oss.yaml (v6.0)."""

SKIP_NAMES = ("SKIP_EVALS", "SKIP_EVAL")
"""Variables that say how many evals are left out at the start."""


@cache
def keys_of(benchmark: str) -> Mapping[str, str]:
    """Variable (upper case) -> MLLOG key for a benchmark; its own rows before those for all."""
    text = (files("lora_tune.mlperf") / "knobs.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    common = {row["variable"]: row["key"] for row in rows if row["benchmark"] == "*"}
    return common | {row["variable"]: row["key"] for row in rows if row["benchmark"] == benchmark}


def batch_names(benchmark: str) -> tuple[str, ...]:
    """Variables that state the global batch of a benchmark's implementations by themselves."""
    return tuple(name for name, key in keys_of(benchmark).items() if key == "global_batch_size" and name != "GBS")


def announced(benchmark: str, values: Mapping[str, object]) -> dict[str, object]:
    """What a trial with these variables would announce, by MLLOG key; variables that no key names are left out.

    Numbers in text become numbers, as the implementations read them.
    """
    keys = keys_of(benchmark)
    stated = {keys[name.upper()]: value for name, value in values.items() if name.upper() in keys}
    return {key: as_value(value) if isinstance(value, str) else value for key, value in stated.items()}


def as_value(text: str) -> str | int | float:
    """A variable's text as the value that a study would state: a whole number, a number, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
