"""What only the text of MLPerf's training rules states, and mlperf_logging's files do not: a table with its sources.

The text is ``training_rules.adoc`` of mlcommons/training_policies, as of 2026-05-14. Where the text and the checkers
differ, the rules say that the checkers are right; nothing here repeats what a checker knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.rulesets import order

Formula = Callable[[Mapping[str, object]], object]
"""MLLOG values by key -> what another key must be; None where a value that it needs is not there."""


@dataclass(frozen=True, slots=True)
class Grid:
    """When evals fall, in the benchmark's unit of progress.

    every: between evals, in whole steps where ``steps`` is true: rounded up to a multiple of the batch size.
    skipped: evals left out at the start, by batch size.
    """

    every: Callable[[int], float]
    skipped: Callable[[int], int] = lambda _batch: 0
    steps: bool = True

    def schedule(self, batch: int) -> Schedule:
        """The first eval and the interval at a global batch size."""
        every = self.every(batch)
        interval = math.ceil(every / batch) * batch if self.steps else every
        return Schedule(first_samples=(self.skipped(batch) + 1) * interval, interval_samples=interval)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Of one benchmark. fixed: MLLOG key -> value. formulas: MLLOG key -> formula. sources: section by key."""

    fixed: Mapping[str, object] = field(default_factory=dict)
    formulas: Mapping[str, Formula] = field(default_factory=dict)
    grid: Grid | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The MLLOG keys that the formulas look for."""
        lookups = _Asked()
        for formula in self.formulas.values():
            formula(lookups)
        return frozenset(lookups.looked_for)


class _Asked(Mapping[str, object]):
    """No values, and a note of each key that was looked for."""

    def __init__(self) -> None:
        self.looked_for: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.looked_for.add(key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """One statement of the text: key is an MLLOG key, or "evals". since, until: rulesets, inclusive; "" for any."""

    benchmarks: tuple[str, ...]
    key: str
    value: object | None = None
    formula: Formula | None = None
    grid: Grid | None = None
    source: str
    since: str = ""
    until: str = ""

    def holds(self, benchmark: str, ruleset: str) -> bool:
        """Whether the statement is about a benchmark in a ruleset."""
        if benchmark not in self.benchmarks:
            return False
        at = order(ruleset)
        return (not self.since or at >= order(self.since)) and (not self.until or at <= order(self.until))


def _share(of: str, factor: float) -> Formula:
    def formula(header: Mapping[str, object]) -> object:
        base = header.get(of)
        return base * factor if isinstance(base, int | float) else None

    return formula


def _steps_405b(steps: int) -> Callable[[Mapping[str, object]], int | None]:
    """Steps at the reference's 1,152 sequences, equal in sequences at every batch size."""

    def formula(header: Mapping[str, object]) -> int | None:
        batch = header.get("global_batch_size")
        return math.ceil(steps * 1152 / batch) if isinstance(batch, int | float) and batch > 0 else None

    return formula


HYPERPARAMETERS, EVALS = "Hyperparameters", "Quality measure, evaluation frequency"
OLD_EVALS = "Deprecated benchmarks quality measure"
LORA, PRETRAINING = ("llama2_70b_lora",), ("llama31_8b", "gpt_oss_20b")

TABLE = (
    TextRule(benchmarks=LORA, key="lora_alpha", value=32, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="lora_dropout", value=0.1, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="opt_adamw_weight_decay", value=1e-4, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="opt_gradient_clip_norm", value=0.3, source=HYPERPARAMETERS),
    # The table says 8196 and "fixed to reference"; the reference trains on sequences of 8,192 tokens.
    TextRule(benchmarks=LORA, key="max_sequence_length", value=8192, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="evals", source=EVALS,
        grid=Grid(lambda _gbs: 384, lambda gbs: math.floor(0.125 * gbs + 2))),
    TextRule(benchmarks=PRETRAINING, key="opt_end_learning_rate", source=HYPERPARAMETERS,
        formula=_share("opt_base_learning_rate", 0.1)),
    TextRule(benchmarks=PRETRAINING, key="evals", source=EVALS, grid=Grid(lambda _gbs: 12_288)),
    TextRule(benchmarks=("llama31_405b",), key="opt_end_learning_rate", value=8e-7, source=HYPERPARAMETERS),
    TextRule(benchmarks=("llama31_405b",), key="opt_learning_rate_warmup_steps", source=HYPERPARAMETERS,
        formula=_steps_405b(8_000)),
    TextRule(benchmarks=("llama31_405b",), key="evals", source="v5.0 specific rules", until="5.0.0",
        grid=Grid(lambda _gbs: 46_080)),
    TextRule(benchmarks=("llama31_405b",), key="evals", source=EVALS, since="5.1.0",
        grid=Grid(lambda _gbs: 18_432, lambda gbs: math.floor(0.0026 * gbs + 12))),
    # The checker has one equation for two keys: GBS = prompts x 16 generations.
    TextRule(benchmarks=("qwen35_397b_grpo",), key="num_prompts_per_step", source="closed_qwen35_397b_grpo.yaml",
        formula=_share("global_batch_size", 1 / 16)),
    TextRule(benchmarks=("deepseekv3_671b",), key="evals", source=EVALS, grid=Grid(lambda gbs: gbs)),
    TextRule(benchmarks=("bert",), key="evals", source=OLD_EVALS,
        grid=Grid(lambda gbs: math.floor(0.05 * (230.23 * gbs + 3_000_000) / 25_000) * 25_000, steps=False)),
    TextRule(benchmarks=("retinanet",), key="evals", source=OLD_EVALS,
         grid=Grid(lambda _gbs: 1, steps=False)),
    TextRule(benchmarks=("rgat", "dlrm_dcnv2"), key="evals", source=OLD_EVALS,
         grid=Grid(lambda _gbs: 0.05, steps=False)),
)  # fmt: skip


def of(benchmark: str, ruleset: str) -> TextRules:
    """The statements about a benchmark in a ruleset, gathered."""
    rows = [row for row in TABLE if row.holds(benchmark, ruleset)]
    return TextRules(
        fixed={row.key: row.value for row in rows if row.value is not None},
        formulas={row.key: row.formula for row in rows if row.formula is not None},
        grid=next((row.grid for row in rows if row.grid is not None), None),
        sources={row.key: row.source for row in rows},
    )
