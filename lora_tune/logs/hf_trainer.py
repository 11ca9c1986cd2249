"""Prints of Hugging Face's Trainer."""

from __future__ import annotations

import ast
import re

from lora_tune.base.host import steady_epoch
from lora_tune.logs.lines import NUMBER, Clock, LineReader, ReaderKind
from lora_tune.logs.run import as_number


class HfTrainerReader(LineReader):
    """Prints of transformers' Trainer, one Python dict a line.

    ``{'loss': 1.2, 'learning_rate': 0.0001, 'epoch': 0.04}``, ``{'eval_loss': 0.93, 'eval_runtime': 4.1, 'epoch':
    0.5}``, and at the end ``{'train_runtime': 2577.75, 'train_samples_per_second': 95.339, 'train_loss': 1.0156,
    'epoch': 0.9}``, which becomes ``run_stop`` and the run's throughput.

    samples_per_epoch: samples in the training set; the dicts count in epochs. Without it, samples are epochs.
    metric: the key whose values are the evals, such as ``eval_accuracy``.
    The run starts at ``***** Running training *****`` if that is printed.
    """

    def __init__(self, clock: Clock = steady_epoch, samples_per_epoch: float = 1.0, metric: str = "eval_loss") -> None:
        super().__init__(clock)
        if metric in ("loss", "train_loss"):
            raise ValueError(f"{metric!r} is the training loss of these prints; name an eval's key, such as eval_loss")
        self._samples_per_epoch, self._metric = samples_per_epoch, metric
        self._logged = re.compile(rf"'(?:loss|train_runtime|{re.escape(metric)})':")

    def line(self, text: str, now: int) -> bool:
        builder = self.run_builder
        if "***** Running training *****" in text and not builder.train and not builder.evals:
            builder.run_start = now
        entry = next((one[0] for one in _DICT.finditer(text) if self._logged.search(one[0])), None)
        if entry is None:
            return True
        logged = _literal(entry)
        if logged is None:
            return False
        epoch = as_number(logged.get("epoch"))
        samples = None if epoch is None else epoch * self._samples_per_epoch
        if "train_runtime" in logged:
            if builder.run_stop is None:
                builder.run_stop = now
            speed = as_number(logged.get("train_samples_per_second"))
            if speed is not None:
                builder.add_stated(now, speed, False)
                builder.overall = speed
            return True
        names = {"loss": "train_loss", "eval_runtime": "eval_seconds", self._metric: "loss"}
        return self.take_fields({names[key]: logged[key] for key in names if key in logged}, now, samples)


_DICT = re.compile(r"\{'[^{}\\]*\}")
_FLAT = re.compile(
    r"\{(?:'[^'\\]*': (?:'[^'\\]*'|-?\d[\d.]*(?:[eE][-+]?\d+)?|-?nan|-?inf|None|True|False)(?:, (?=')|(?=\})))+\}"
)
_NOT_A_LITERAL = re.compile(r"(?<=: )(-?(?:nan|inf))(?=[,}])")


def _literal(text: str) -> dict[str, object] | None:
    """A flat Python dict of plain values; None for anything else, which is not even parsed."""
    if not _FLAT.fullmatch(text):
        return None
    try:
        value = ast.literal_eval(_NOT_A_LITERAL.sub(r"'\1'", text))
    except (ValueError, SyntaxError):  # such as the number 1.2.3
        return None
    return value if isinstance(value, dict) else None


KIND = ReaderKind(
    make=HfTrainerReader,
    settings={"samples_per_epoch": NUMBER, "metric": str},
    metric="metric",
    counts=lambda settings: "samples" if "samples_per_epoch" in settings else "epochs",
)
"""``workload.log.kind = "hf_trainer"``."""
