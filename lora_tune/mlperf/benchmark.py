"""One MLPerf Training benchmark under one ruleset, as data: target, metric, runs, rules and reference convergence."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Literal

from lora_tune.base.errors import InputError
from lora_tune.base.scatter import STOP_SD
from lora_tune.curves.timing import Schedule
from lora_tune.mlperf import convergence
from lora_tune.mlperf import rules as rules_text
from lora_tune.mlperf.convergence import Reference
from lora_tune.mlperf.rules import Direction, Metric, Rules, TextRules, metrics, read_rules
from lora_tune.mlperf.rulesets import as_ruleset, benchmarks_of, newest_with, rulesets, unknown_benchmark

ProgressKey = Literal["samples_count", "epoch_num"]
_PROGRESS = re.compile(r"'(samples_count|epoch_num)' in v")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark under one ruleset. Read it with :func:`read_benchmark`, or construct your own.

    metrics: a run must reach all of them; one, except for stable_diffusion. progress: the key for the progress of
    evals. runs: result files of a submission. rules: of the closed division. text: rules that only the rules' text has.
    """

    name: str
    ruleset: str
    metrics: tuple[Metric, ...]
    progress: ProgressKey
    runs: int
    rules: Rules
    text: TextRules = field(default_factory=TextRules)

    @property
    def stop_cv(self) -> float:
        """Relative sd of the progress at which runs of one submission reach the target, from public submissions."""
        return STOP_CV.get(self.name, STOP_SD)

    @property
    def target(self) -> float:
        """The value of the first metric that ends a run."""
        return self.metrics[0].target

    @property
    def direction(self) -> Direction:
        """Whether the first metric falls or rises towards its target."""
        return self.metrics[0].direction

    @cached_property
    def fixed(self) -> Mapping[str, object]:
        """MLLOG key -> the only value that the closed division allows at any batch size, the rules' text included."""
        return {**self.rules.demanded({}), **self.text.fixed}

    def demanded(self, header: Mapping[str, object]) -> dict[str, object]:
        """MLLOG key -> the only value that the closed division allows, given the values in ``header``.

        ``header`` needs ``global_batch_size`` and the other chosen values, which formulas read.
        """
        by_text = self.by_text(header)
        return {**self.rules.demanded({**by_text, **header}), **by_text}

    def by_text(self, header: Mapping[str, object]) -> dict[str, object]:
        """As :meth:`demanded`, by the rules' text alone."""
        formulas = {key: value for key, rule in self.text.formulas.items() if (value := rule(header)) is not None}
        return {**self.text.fixed, **formulas}

    @cached_property
    def read_by_others(self) -> frozenset[str]:
        """MLLOG keys that the rule of another key can read: the batch size, and keys whose values the rules keep."""
        return frozenset({"global_batch_size"}) | self.rules.keeping | self.text.reads

    def eval_schedule(self, batch: int) -> Schedule | None:
        """The closed division's evals at a global batch size, in the unit of ``progress``; None if they are free.

        Raises ValueError for a batch size below 1.
        """
        if batch < 1:
            raise ValueError(f"a global batch size is at least 1, not {batch}")
        text = self.text.grid.schedule(batch) if self.text.grid else None
        first, interval = self.rules.eval_samples({"global_batch_size": batch})
        interval = interval or (text.interval_samples if text else None)
        if interval is None:
            return None
        return Schedule(first or (text.first_samples if text else interval), interval)

    def reference(self, batch: int) -> Reference | None:
        """The reference convergence at a batch size, in the unit of ``progress``; None if there is none."""
        return convergence.reference(self.name, batch, self.ruleset)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes with a reference convergence point, ascending; empty if there is none."""
        return convergence.batch_sizes(self.name, self.ruleset)


def read_benchmark(name: str, ruleset: str | None = None) -> Benchmark:
    """The benchmark from the installed mlperf_logging under a ruleset, by default the newest that has it.

    Raises InputError for an unknown benchmark or ruleset, or if the rules state no target.
    """
    used = newest_with(name) if ruleset is None else as_ruleset(ruleset)
    rules = read_rules(used, "closed_common", f"closed_{name}")
    return Benchmark(
        name=name,
        ruleset=used,
        metrics=metrics(rules),
        progress=_progress(rules),
        runs=_runs(name, used),
        rules=rules,
        text=rules_text.of(name, used),
    )


def _progress(rules: Rules) -> ProgressKey:
    """The progress key that the rules demand in the metadata of an eval."""
    tests = " ".join(test for rule in rules.keys if rule.target_test for test in rule.tests)
    match = _PROGRESS.search(tests)
    return "epoch_num" if match and match[1] == "epoch_num" else "samples_count"


def _runs(name: str, ruleset: str) -> int:
    """Result files of a submission; half the reference's runs if the package has no count for the benchmark."""
    from mlperf_logging.benchmark_meta import get_result_file_counts

    counted = get_result_file_counts("training").get(name)
    return int(counted) if counted else convergence.reference_runs(name, ruleset) // 2


# The benchmarks of the installed mlperf_logging and of other packages.


GROUP = "lora_tune.benchmarks"
"""Entry point group for benchmarks: name -> a callable that takes a ruleset, or None for its newest."""

LORA = "llama2_70b_lora"
"""The benchmark with whose public runs this package is calibrated."""

STOP_CV: Mapping[str, float] = {
    LORA: STOP_SD, "llama31_8b": 0.04, "flux1": 0.029, "bert": 0.08, "dlrm_dcnv2": 0.069, "rgat": 0.061,
}  # fmt: skip
"""Relative sd of the progress at which runs of one configuration reach the target, within public submissions
(``python -m benchmarks.statistics.by_benchmark``); ``STOP_SD`` for other benchmarks."""


@cache
def find_benchmark(name: str, ruleset: str | None = None) -> Benchmark:
    """The benchmark under a ruleset, by default the newest that has it.

    Raises InputError for a benchmark or ruleset that neither mlperf_logging nor an installed package has.
    """
    if maker := _outside().get(name):
        return maker(ruleset)
    if name not in (known := benchmark_names()):
        raise InputError(unknown_benchmark(name, known))
    return read_benchmark(name, ruleset)


@cache
def benchmark_names() -> tuple[str, ...]:
    """The names of all benchmarks, in any ruleset."""
    return tuple(sorted({name for r in rulesets() for name in benchmarks_of(r)} | set(_outside())))


def check_name(name: str) -> str:
    """The name. Raises ValueError if no benchmark has it; used by the validation of study files."""
    if name not in (known := benchmark_names()):
        raise ValueError(unknown_benchmark(name, known))
    return name


@cache
def _outside() -> dict[str, Callable[[str | None], Benchmark]]:
    return {point.name: point.load() for point in entry_points(group=GROUP)}
