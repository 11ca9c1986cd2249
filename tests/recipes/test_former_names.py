"""Run lines of configurations that were exported before the trainers became a package of their own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest


@pytest.mark.parametrize("program", ["peft_lora", "packed_lora", "nemo_lora", "bridge_lora", "warm_worker"])
def test_a_program_starts_under_its_former_name(program: str) -> None:
    former = importlib.util.find_spec(f"lora_tune.recipes.{program}")
    today = importlib.util.find_spec(f"lora_tune_recipes.{program}")
    assert former is not None
    assert today is not None
    assert former.origin == today.origin


def test_the_relay_of_an_older_study_file_runs() -> None:
    line = [sys.executable, "-m", "lora_tune.recipes.relay"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m lora_tune.logs.relay FOLDER")
