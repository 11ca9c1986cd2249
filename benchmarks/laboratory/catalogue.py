"""Every problem of the laboratory by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.laboratory.families import FAMILIES
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import PROBLEMS
from benchmarks.laboratory.scripts import SCRIPTS

CATALOGUE: dict[str, Callable[[int], Problem]] = {**PROBLEMS, **FAMILIES, **SCRIPTS}
"""Name -> the problem at site ``variant`` (0: the public average)."""
