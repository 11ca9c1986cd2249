"""The benchmarks that there are: those of the installed mlperf_logging, and those that other packages bring."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import entry_points

from lora_tune.base.errors import InputError
from lora_tune.mlperf.benchmark import Benchmark, read_benchmark
from lora_tune.mlperf.rulesets import benchmarks_of, rulesets, unknown_benchmark

GROUP = "lora_tune.benchmarks"
"""Entry points of a package that brings benchmarks: name -> a callable that takes a ruleset or None for its newest."""

LORA = "llama2_70b_lora"
"""The benchmark whose public runs this package was calibrated on."""


@cache
def find_benchmark(name: str, ruleset: str | None = None) -> Benchmark:
    """The benchmark under a ruleset, by default the newest that has it.

    Raises InputError for a name that neither mlperf_logging nor an installed package knows, and for such a ruleset.
    """
    if maker := _outside().get(name):
        return maker(ruleset)
    if name not in (known := benchmark_names()):
        raise InputError(unknown_benchmark(name, known))
    return read_benchmark(name, ruleset)


@cache
def benchmark_names() -> tuple[str, ...]:
    """Every benchmark that can be named, in any ruleset."""
    return tuple(sorted({name for r in rulesets() for name in benchmarks_of(r)} | set(_outside())))


def check_name(name: str) -> str:
    """The name itself. Raises ValueError where no benchmark is called so: for the validation of study files."""
    if name not in (known := benchmark_names()):
        raise ValueError(unknown_benchmark(name, known))
    return name


@cache
def _outside() -> dict[str, Callable[[str | None], Benchmark]]:
    return {point.name: point.load() for point in entry_points(group=GROUP)}
