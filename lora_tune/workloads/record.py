"""The effective record of a trial: the variables that its program receives, by the names that the tree reads. Pure.

All users (rules, starting point, eval schedule, names, disclosures, the check of a trial's log, export and doctor) read
this record; none of them reads configs, defaults or proposals itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from lora_tune.base.errors import SetupError
from lora_tune.config.layout import Layout
from lora_tune.config.parameters import Value
from lora_tune.mlperf.gate import as_value, batch_names, keys_of

ALIASES: Mapping[str, tuple[str, ...]] = {
    "TP": ("TENSOR_MODEL_PARALLEL", "PRIMUS_TP"),
    "PP": ("PIPELINE_MODEL_PARALLEL", "PRIMUS_PP"),
    "VP": ("INTERLEAVED_PIPELINE",),
    "CP": ("CONTEXT_PARALLEL",),
    "SP": ("SEQ_PARALLEL",),
    "EP": ("EXPERT_PARALLEL", "PRIMUS_EP"),
    "MBS": ("MICRO_BATCH_SIZE", "PRIMUS_MICRO_BATCH_SIZE"),
    "LR": ("LEARNING_RATE", "PRIMUS_LR"),
    "MIN_LR": ("PRIMUS_MIN_LR",),
    "WARMUP_STEPS": ("LR_WARMUP_STEPS", "LR_WARMUP_ITERS", "PRIMUS_LR_WARMUP_ITERS"),
    "MAX_STEPS": ("PRIMUS_TRAIN_ITERS",),
    "FP8_ACT": ("FP8_ACTIVATION",),
    "FP8_ACTIVATION": ("FP8_ACT",),
    "VAL_CHECK_INTERVAL": ("PRIMUS_EVAL_INTERVAL",),
    "SKIP_EVALS": ("SKIP_EVAL",),
    "GBS": ("GLOBAL_BATCH_SIZE", "PRIMUS_GLOBAL_BATCH_SIZE"),
}
"""Our name -> equivalent names in other rounds (v4.0 to v6.0), in other benchmarks, and in AMD's implementations."""

NEUTRAL: Mapping[str, Value] = {"TP": 1, "PP": 1, "VP": 1, "CP": 1, "EP": 1, "SP": 0, "MBS": 1}
"""Layout values without effect: an implementation need not read them."""

LAYOUT = ("TP", "PP", "CP", "SP", "MBS")

SOME_ROUNDS = frozenset({"WARMUP_STEPS", "MIN_LR", "HEALING_ITER"})
"""Training parameters that only the trees of some rounds and vendors have; elsewhere a study ignores them."""

NULLS = ("null", "none")
"""Spellings of YAML's null in a config, in any case."""

_CONFIG = 1
"""Index of the config among a record's layers."""

_SHARE = "WARMUP_RATIO"
"""WARMUP_STEPS as a share of MAX_STEPS (v4.x)."""


def usual_name(name: str, benchmark: str = "") -> str:
    """Our name for a tree's variable ``name``; the name itself if there is none."""
    if name in ALIASES:
        return name
    if name in batch_names(benchmark):
        return "GBS"
    return next((usual for usual, others in ALIASES.items() if name in others), name)


def names_of(name: str, benchmark: str = "") -> tuple[str, ...]:
    """``name`` and its equivalents in trees; itself first, a benchmark's batch names last."""
    return (name, *ALIASES.get(name, ()), *(batch_names(benchmark) if name == "GBS" else ()))


def key_of(benchmark: str, name: str) -> str:
    """The MLLOG key under which a benchmark's programs log a variable; "" if unknown.

    Equivalent names share one: a trial's MAX_STEPS may be written as a tree's PRIMUS_TRAIN_ITERS.
    """
    keys = keys_of(benchmark)
    others = (usual for usual, names in ALIASES.items() if name in names)
    return next((key for known in (*others, name) if (key := keys.get(known.upper()))), "")


@cache
def spellings(benchmark: str, name: str) -> tuple[str, ...]:
    """All equivalent names of ``name``, the usual one first."""
    usual = usual_name("WARMUP_STEPS" if name == _SHARE else name, benchmark)
    return (*names_of(usual, benchmark), *([_SHARE] if usual == "WARMUP_STEPS" else []))


@cache
def _thing(benchmark: str, name: str) -> str:
    """A canonical id shared by all equivalent names."""
    known = spellings(benchmark, name)
    return key_of(benchmark, known[0]) or min(known)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Record(Mapping[str, Value]):
    """The variables of a trial's program: variable -> value, by the names that the tree reads.

    stated: each value from the highest layer that sets it. assumed: names set only by the tree's defaults.
    unread: exports of a config that no file reads, because the tree reads an equivalent name.
    site_nodes, gpus_per_node: of the study's site, for a tree that does not state its nodes.
    """

    stated: Mapping[str, Value]
    assumed: frozenset[str] = frozenset()
    unread: Mapping[str, Value] = field(default_factory=dict)
    benchmark: str = ""
    site_nodes: int = 1
    gpus_per_node: int = 1

    def __getitem__(self, name: str) -> Value:
        return self.stated[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stated)

    def __len__(self) -> int:
        return len(self.stated)

    @property
    def exports(self) -> Mapping[str, Value]:
        """The variables set for the program, without the tree's own defaults."""
        return {name: value for name, value in self.stated.items() if name not in self.assumed}

    def value(self, name: str) -> Value | None:
        """The value under any equivalent name; None if it is not set, or set to null."""
        names = (name, *(n for n in spellings(self.benchmark, name) if n != _SHARE))
        known = next((self.stated[n] for n in names if n in self.stated), None)
        if known is None and name == "WARMUP_STEPS" and _SHARE in self.stated:
            share, steps = _number(self.stated[_SHARE]), _number(self.value("MAX_STEPS"))
            warmup = math.nan if share is None or steps is None else share * steps
            return round(warmup) if math.isfinite(warmup) else None
        return {"true": 1, "false": 0}.get(str(known).lower(), known) if name == "SP" else known

    def number(self, name: str) -> float | None:
        """The value as a finite number; None if not set."""
        known = _number(self.value(name))
        return known if known is not None and math.isfinite(known) else None

    def count(self, name: str) -> int | None:
        """The value as an integer; None if not set, or 0. Raises SetupError for anything else."""
        value = self.value(name)
        if value is None or value == 0:
            return None
        known = _number(value)
        if known is None or not known.is_integer() or known < 1:
            raise SetupError(f"{name} is {value!r}, which is no whole number from 1 on; correct it there")
        return int(known)

    @property
    def nodes(self) -> int:
        """Nodes of the trial."""
        return self.count("NODES") or self.count("DGXNNODES") or self.site_nodes

    @property
    def gpus(self) -> int:
        """GPUs of the trial; a node without GPUs counts as one."""
        return max(1, self.nodes * max(1, self.gpus_per_node))

    @property
    def layout(self) -> Layout:
        """The parallel layout; unset degrees are neutral.

        If the global batch is set, MINIBS is each data-parallel rank's part of it.
        """
        degrees = {name.lower(): self.count(name) or int(NEUTRAL.get(name, 1)) for name in (*LAYOUT, "VP", "EP")}
        whole = self.count("GBS")
        ranks = max(1, self.gpus // (degrees["tp"] * degrees["pp"] * degrees["cp"]))
        minibs = self.count("MINIBS") if whole is None else whole // ranks
        return Layout(**degrees, minibs=minibs or 1)

    @property
    def gbs(self) -> int | None:
        """Samples per optimizer step: set as a whole, or derived from MINIBS and the layout.

        None if the tree counts them in its own way, or the layout needs more GPUs than there are.
        """
        follows = self.count("MINIBS") is not None
        return self.count("GBS") or (self.layout.gbs(self.gpus) or None if follows else None)

    def with_batch(self) -> Record:
        """The record with GBS added if it can be derived."""
        if self.value("GBS") is not None or (batch := self.gbs) is None:
            return self
        return replace(self, stated={**self.stated, "GBS": batch})


def record_of(
    stated: Mapping[str, Value],
    config: Mapping[str, str],
    defaults: Mapping[str, str],
    *,
    reads: Collection[str] = (),
    benchmark: str = "",
    site_nodes: int = 1,
    gpus_per_node: int = 1,
) -> Record:
    """The record of a trial that sets ``stated`` on top of its config and the tree's files.

    stated: in our names or the tree's. config: exports of the base or the common config. defaults: the tree's defaults.
    reads: the variables that its files read; () if only the container knows. A value in one layer hides equivalent
    names in lower layers, also if it is ``null``; MINIBS hides a default of the global batch.
    """
    values: dict[str, Value] = {}
    unread: dict[str, Value] = {}
    set_names: frozenset[str] = frozenset()
    hidden: set[str] = set()
    for index, layer in enumerate((stated, config, defaults)):
        stated_names: set[str] = set()
        set_names = frozenset(values)
        for name, text in layer.items():
            thing = _thing(benchmark, name)
            if text == "" or thing in hidden:
                continue
            value = as_value(text) if isinstance(text, str) and index else text
            if index and name not in reads and any(other in reads for other in spellings(benchmark, name)):
                unread |= {name: value} if index == _CONFIG else {}
                continue
            stated_names.add(thing)
            if not isinstance(text, str) or text.lower() not in NULLS:
                values.setdefault(name, value)
        hidden |= stated_names | ({_thing(benchmark, "GBS")} if index == _CONFIG and "MINIBS" in values else set())
    return Record(
        stated=values, assumed=frozenset(values.keys() - set_names), unread=unread, benchmark=benchmark,
        site_nodes=site_nodes, gpus_per_node=gpus_per_node,
    )  # fmt: skip


def _number(value: Value | None) -> float | None:
    try:
        return None if value is None else float(value)
    except ValueError:
        return None
