"""JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_tune.base.host import steady_epoch
from lora_tune.logs.lines import FACTS, FORM, SCALES, Clock, LineReader, ReaderKind, scaled_samples


class JsonLinesReader(LineReader):
    """One JSON object a line; lines that start otherwise are ignored.

    Each setting is the name under which the objects hold that fact: ``loss`` (of an eval), ``train_loss``,
    ``samples`` or ``step`` or ``epoch``, ``seconds`` since the start of the run (without it, arrival times),
    ``eval_seconds``, ``throughput`` in samples/s. global_batch_size turns steps, and samples_per_epoch epochs, into
    samples; from_zero: the first epoch and step are called 0, so one is added; decimal_comma: texts hold numbers
    such as ``"0,925"``.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        from_zero: bool = False,
        repeated: bool = False,
        decimal_comma: bool = False,
        loss: str = "eval_loss",
        **names: str,
    ) -> None:
        super().__init__(clock)
        if names.get("train_loss") == loss:
            raise ValueError(f"loss and train_loss are both {loss!r}; loss is the key of an eval's")
        self._scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        self._first, self.repeated, self.decimal_comma = 0 if from_zero else 1, repeated, decimal_comma
        self._names = {name: names.get(name, name) for name in FACTS} | {"loss": loss}

    def line(self, text: str, now: int) -> bool:
        text = text.lstrip()
        if not text.startswith("{"):
            return True
        try:
            record = json.loads(text)
        except (ValueError, RecursionError):
            return False
        fields = {fact: record[name] for fact, name in self._names.items() if record.get(name) is not None}
        return self.take_fields(fields, now, scaled_samples(fields, self._scale, first=self._first))


def _counts(settings: Mapping[str, Any]) -> str:
    """What the objects count in, where the settings name it; nothing scales steps without the batch size."""
    for name, scale in (("step", "global_batch_size"), ("epoch", "samples_per_epoch")):
        if name in settings and "samples" not in settings and scale not in settings:
            return f"{name}s"
    return "samples"


KIND = ReaderKind(
    make=JsonLinesReader,
    settings={**SCALES, **FORM, "loss": str, **dict.fromkeys(FACTS, str)},
    metric="loss",
    counts=_counts,
)
"""``workload.log.kind = "jsonl"``."""
