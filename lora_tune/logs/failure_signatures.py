"""The failure texts that are recognised in logs (``failure_signatures.toml``), and the noise of healthy logs.

Where several appear in a log, ``failure_evidence`` weighs them: by where in the log they stand, by their ``Weight``,
and then by their place in the table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from importlib import resources
from typing import Any


class FailureKind(StrEnum):
    """What a failure says about the trial's parameters, and so what is done about it."""

    INFEASIBLE = "infeasible"
    """These parameters cannot run here, as far as one attempt can tell."""
    FLAKY = "flaky"
    """Comes and goes: the same attempt again, elsewhere."""
    INFRASTRUCTURE = "infrastructure"
    """A node, the network, a disk, the container: says nothing about the parameters."""
    CONFIGURATION = "configuration"
    """Every trial would fail like this until the user fixes it."""
    PREEMPTED = "preempted"
    """The cluster wanted the nodes back."""
    HOST_MEMORY = "host memory"
    """The kernel killed it for want of host memory, of which others had their part."""
    DISPLACED = "displaced"
    """The job in which it waited for a place ended before it began: it has not been tried."""
    CAPACITY = "capacity"
    """Its nodes could not be had, and nothing of it ran: it waits, and is submitted again."""
    HELD = "held"
    """Somebody held the job back in the queue until it was given up."""
    DRAINED = "drained"
    """The nodes that it could run on were drained, down or reserved until it was given up."""
    UNSATISFIABLE = "unsatisfiable"
    """The cluster accepted the job and can never run it."""
    DIVERGED = "diverged"
    """The loss is no number any more."""
    CLOCK = "clock"
    """The log's time stamps cannot be true: it is measured again."""
    FOREIGN = "foreign"
    """The log, or a record beside it, is another attempt's: it is run again."""
    MISMATCH = "mismatch"
    """The log announces other hyperparameters than the trial was given."""
    IMPLAUSIBLE = "implausible"
    """The log states a loss that no loss can be."""
    UNREAD = "unread"
    """Nothing in its log is what the study says its evals look like."""
    UNKNOWN = "unknown"
    NONE = ""
    """It did not fail."""


class Weight(IntEnum):
    """How much a failure text says of the cause; the smaller, the more."""

    VERDICT = 0
    """The scheduler's own statement why the job ended."""
    CAUSE = 1
    """Names the cause itself: no memory, a faulty GPU, a refused value, an uncaught exception about a missing file."""
    CONSEQUENCE = 2
    """What the other ranks print when one of them broke."""
    EXCEPTION = 3
    """Any other exception of Python."""
    REMARK = 4
    """What a shell or a tool remarks while its script goes on."""
    ENDED = 5
    """Somebody or something ended the processes; the reason is elsewhere."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One failure text. ``anchor`` is literal text that every matching line holds: only lines with it are tried.

    certain: the same values fail again, wherever they run. completes: the name of the signatures whose line says only
    that something failed, where this one's says why; by itself it is no failure.
    """

    name: str
    kind: FailureKind
    anchor: bytes
    pattern: re.Pattern[bytes]
    remedy: str
    weight: Weight = Weight.CAUSE
    certain: bool = False
    completes: str = ""


def _signature(row: Mapping[str, Any]) -> Signature:
    """A row of the table: ``anchor`` and ``pattern`` as text, ``weight`` by its name."""
    texts = {"anchor": row["anchor"].encode(), "pattern": re.compile(row["pattern"].encode())}
    weight = Weight[row.get("weight", "cause").upper()]
    return Signature(**{**row, **texts, "kind": FailureKind(row["kind"]), "weight": weight})


def _read_table() -> tuple[Signature, ...]:
    text = resources.files("lora_tune.logs").joinpath("failure_signatures.toml").read_text(encoding="utf-8")
    return tuple(map(_signature, tomllib.loads(text)["signature"]))


SIGNATURES = _read_table()
"""The most telling first. A line is matched without its ``srun -l`` label, its first 4,096 bytes."""

NOISE = re.compile(
    rb"/etc/(?:dgx|os)-release: No such file"  # every machine that is not a DGX
    rb"|enroot: (?:command )?not found"  # the clean-up of containers on a node that has none
    rb"|bash: line \d+: nvidia-smi: command not found"  # the same, asked by a step of the script on each node
    rb"|mlperf-sysjson(?:\.sh)?: line \d+: "  # describes the machine by whatever tools there are
    rb"|modprobe: (?:FATAL|ERROR|WARNING)"
    rb"|/(?:sys|proc)/\S+: (?:No such file|Permission denied)"  # what describes a system tries many places
)
"""Lines that healthy launch scripts print and go on: never evidence, wherever they stand."""
