"""The verdict of ``mlperf_logging``'s seed checker on the result files of one submission."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from lora_tune.mlperf.heard import heard
from lora_tune.mlperf.rulesets import known_to_checkers


def seed_complaint(files: Sequence[Path], ruleset: str) -> str:
    """What the seed checker says first against runs of the closed division; "" when each logs a seed of its own.

    files: the result files in plain text, all in one folder, whose path the words do not name.
    """
    from mlperf_logging.package_checker.seed_checker import SeedChecker

    with heard() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if SeedChecker(known_to_checkers(ruleset)).check_seeds([str(f) for f in files]):
            return ""
    lines = "\n".join(messages).replace(f"{files[0].parent}/", "").splitlines()
    first = lines[0].partition("following errors: ")[2].rstrip(".") or lines[0]
    return f"{first}; and {len(lines) - 1} more" if len(lines) > 1 else first
