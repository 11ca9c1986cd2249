"""Lines of any form by the names in them: the numbers that :mod:`lora_tune.logs.tokens` finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_tune.base.host import steady_epoch
from lora_tune.logs.lines import FORM, SCALES, Clock, LineReader, ReaderKind, scaled_samples
from lora_tune.logs.tokens import ORDER, Token, Tokens, batch_of, terms_of


class NamedReader(LineReader):
    """Lines of any form, by the names of their numbers.

    A name is written as words: ``val loss`` is ``val_loss=``, ``Val Loss:``, ``vloss``, ``loss: 2.3`` behind ``val |``
    or below ``=== validation ===``, and a column of a table.

    loss: the name of an eval's measure; train_loss: of the training loss. samples, step or epoch: the name of what says
    how far the run is, on the same line or on the last one before (0 before the first). below: it stands on a line
    below the eval's. batches: evals print their batches as ``Test: [ 3/78]``; "last" reads the last one alone, "none"
    the line behind them, "iter 30" those with this count. global_batch_size, samples_per_epoch, from_zero, repeated and
    decimal_comma: as for patterns.
    """

    def __init__(
        self,
        clock: Clock = steady_epoch,
        *,
        loss: str = "val loss",
        train_loss: str = "",
        batches: str = "",
        below: bool = False,
        global_batch_size: float = 1.0,
        samples_per_epoch: float = 1.0,
        from_zero: bool = False,
        repeated: bool = False,
        decimal_comma: bool = False,
        **places: str,
    ) -> None:
        super().__init__(clock)
        if len(places) > 1 or (train_loss and terms_of(train_loss) == terms_of(loss)):
            raise ValueError("log kind 'named' needs one of samples, step and epoch, and a train_loss other than loss")
        scale = {"samples": 1.0, "step": global_batch_size, "epoch": samples_per_epoch}
        unit, name = next(iter(places.items()), ("step", "step"))
        self._unit, self._place, self._scale = unit, terms_of(name), {unit: scale[unit]}
        self._names = {terms_of(loss): "loss"} | ({terms_of(train_loss): "train_loss"} if train_loss else {})
        self._batches, self._below = batches, below
        self._first, self.repeated, self.decimal_comma = 0 if from_zero else 1, repeated, decimal_comma
        self._tokens = Tokens()
        self._last: str | None = None
        self._waiting: dict[str, str] = {}
        self.unmatched.patterns = loss

    def line(self, text: str, now: int) -> bool:
        tokens = self._tokens.of(text)
        place = next((t.number for t in tokens if t.terms == self._place and t.unit == self._unit), None)
        values = {self._names[t.terms]: t.number for t in reversed(tokens) if t.terms in self._names and not t.unit}
        if "loss" in values and not of_counted_batch(text, tokens, self._batches):
            del values["loss"]
        self._last = self._last if place is None else place
        if self._below:
            values, self._waiting = (self._waiting | values, {}) if place is not None else ({}, self._waiting | values)
        samples = scaled_samples({self._unit: self._last}, self._scale, first=self._first) if self._last else 0.0
        return self.take_fields(values, now, samples) if values else True


def of_counted_batch(line: str, tokens: list[Token], batches: str) -> bool:
    """Whether what a line says of an eval counts, by the setting ``batches``."""
    if batches in ("", "last", "none"):
        batch = batch_of(line) if batches else None
        return batch is None or (batches == "last" and batch[0] == batch[1])
    *name, number = batches.split()
    return any(t.name == " ".join(name) and t.number == number for t in tokens)


def _counts(settings: Mapping[str, Any]) -> str:
    """What the settings count in; nothing scales steps without the batch size."""
    for name, scale in (("step", "global_batch_size"), ("epoch", "samples_per_epoch")):
        if name in settings and scale not in settings:
            return f"{name}s"
    return "samples"


KIND = ReaderKind(
    make=NamedReader,
    settings={**SCALES, **FORM, "below": bool, **dict.fromkeys(("loss", "train_loss", "batches", *ORDER), str)},
    metric="loss",
    counts=_counts,
)
"""``workload.log.kind = "named"``."""
