"""One MLPerf Training benchmark under one ruleset: target, metric, runs, rules and reference convergence as data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf import convergence, rules_text
from lora_tune.mlperf.convergence import Reference
from lora_tune.mlperf.rule_state import Direction
from lora_tune.mlperf.rules import Metric, Rules, metrics, read_rules
from lora_tune.mlperf.rules_text import TextRules
from lora_tune.mlperf.rulesets import as_ruleset, newest_with

ProgressKey = Literal["samples_count", "epoch_num"]
_PROGRESS = re.compile(r"'(samples_count|epoch_num)' in v")


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """What a ruleset says of a benchmark. Read it with :func:`read_benchmark`, or build one of your own.

    metrics: what a run must reach, all of them; one but for stable_diffusion. progress: the key by which its evals
    count progress. runs: result files of a submission. rules: the closed division's. text: what only the rules' text
    states.
    """

    name: str
    ruleset: str
    metrics: tuple[Metric, ...]
    progress: ProgressKey
    runs: int
    rules: Rules
    text: TextRules = field(default_factory=TextRules)

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
        """MLLOG key -> the one value that the closed division allows at any batch size, the rules' text included."""
        return {**self.rules.demanded({}), **self.text.fixed}

    def demanded(self, header: Mapping[str, object]) -> dict[str, object]:
        """MLLOG key -> the one value that the closed division allows beside the values in ``header``.

        Give ``global_batch_size`` and whatever else is chosen: formulas follow from it.
        """
        by_text = self.by_text(header)
        return {**self.rules.demanded({**by_text, **header}), **by_text}

    def by_text(self, header: Mapping[str, object]) -> dict[str, object]:
        """As :meth:`demanded`, of the rules' text alone."""
        formulas = {key: value for key, rule in self.text.formulas.items() if (value := rule(header)) is not None}
        return {**self.text.fixed, **formulas}

    @cached_property
    def read_by_others(self) -> frozenset[str]:
        """MLLOG keys whose values the rule of another key can read: the batch size, and what the rules' code keeps."""
        return frozenset({"global_batch_size"}) | self.rules.keeping | self.text.reads

    def eval_schedule(self, batch: int) -> Schedule | None:
        """When the closed division evaluates at a global batch size, in the unit of ``progress``; None: free.

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
        """What convergence at a batch size is compared with, in the unit of ``progress``; None where there is none."""
        return convergence.reference(self.name, batch, self.ruleset)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes with a reference convergence point, ascending; empty where there is none."""
        return convergence.batch_sizes(self.name, self.ruleset)


def read_benchmark(name: str, ruleset: str | None = None) -> Benchmark:
    """The benchmark as the installed mlperf_logging states it for a ruleset, by default the newest that has it.

    Raises InputError for an unknown benchmark or ruleset, and where the rules state no target.
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
    """The key that the rules want in the metadata of an eval."""
    tests = " ".join(test for rule in rules.keys if rule.target_test for test in rule.tests)
    match = _PROGRESS.search(tests)
    return "epoch_num" if match and match[1] == "epoch_num" else "samples_count"


def _runs(name: str, ruleset: str) -> int:
    """Result files of a submission; half the reference's runs where the package has no count for the benchmark."""
    from mlperf_logging.benchmark_meta import get_result_file_counts

    counted = get_result_file_counts("training").get(name)
    return int(counted) if counted else convergence.reference_runs(name, ruleset) // 2
