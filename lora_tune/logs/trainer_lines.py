"""Lines of trainers whose names alone do not say how they are read: one row each. Data, and one function over it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_VALUE = r"(?P<loss>[-+]?(?:\d[\d.]*(?:[eE][-+]?\d+)?|nan|inf))"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerLines:
    """How one trainer's lines are read.

    Parameters
    ----------
    sign : str
        Pattern of a line that only this trainer prints; it is searched in each line.
    settings : dict
        Keys of ``workload.log`` for ``kind = "regex"``.
    unit : str
        What its progress counts.
    rising : bool
        Whether more of the measure is better.
    is_eval : bool
        False where the trainer prints a training loss alone.
    unless : str
        Pattern of a line beside which this reading is not wanted; "" for none.
    """

    sign: str
    settings: dict[str, Any] = field(default_factory=dict)
    unit: str = "step"
    rising: bool = False
    is_eval: bool = True
    unless: str = ""


_TORCHTUNE = r".*(?<!\d)\d+\|(?P<step>\d+)\|Loss:\s*"
_STEPS = r"\|\s+total_timesteps\s+\|\s+(?P<step>\d+)"

ROWS = (
    # torchtune's tqdm bar, "1|2|Loss: 2.6:  20%|", and its log line of a validation
    TrainerLines(
        sign=r"(?<!\d)\d+\|\d+\|Loss:",
        settings={
            "eval": rf"(?i)\bvalidation loss:\s*{_VALUE}",
            "train": rf"{_TORCHTUNE}{_VALUE}",
            "progress": r".*(?<!\d)\d+\|(?P<step>\d+)\|Loss:",
        },
    ),
    TrainerLines(sign=r"(?<!\d)\d+\|\d+\|Loss:", settings={"eval": f"{_TORCHTUNE}{_VALUE}"}, is_eval=False),
    # LitGPT's line of an iteration repeats its last validation until there is a new one
    TrainerLines(
        sign=r"loss train(?: \(curr\))?: .*?, val(?: \(prev val iter\))?:",
        settings={
            "eval": rf"\bstep (?P<step>\d+)\b.*?loss train.*?, val(?: \(prev val iter\))?:\s*{_VALUE}",
            "train": rf"\bstep (?P<step>\d+)\b.*?loss train(?: \(curr\))?:\s*{_VALUE}",
            "repeated": True,
        },
        unless=r"val loss:? \d",
    ),
    # stable-baselines3: its EvalCallback's line, else the tables of evals, else of rollouts
    TrainerLines(
        sign=r"Eval num_timesteps=\d+, episode_reward=",
        settings={"eval": rf"Eval num_timesteps=(?P<step>\d+), episode_reward={_VALUE}"},
        rising=True,
    ),
    TrainerLines(
        sign=r"\|\s+mean_reward\s+\|",
        settings={"eval": rf"\|\s+mean_reward\s+\|\s+{_VALUE}", "progress": _STEPS},
        rising=True,
    ),
    TrainerLines(
        sign=r"\|\s+ep_rew_mean\s+\|",
        settings={"eval": rf"\|\s+ep_rew_mean\s+\|\s+{_VALUE}", "progress": _STEPS},
        rising=True,
    ),
    # scikit-learn's MLP with early_stopping, its gradient boosting, and SGD
    TrainerLines(
        sign=r"^Validation score: ",
        settings={
            "eval": rf"^Validation score:\s*{_VALUE}",
            "train": rf"^Iteration (?P<step>\d+), loss = {_VALUE}",
            "progress": r"^Iteration (?P<step>\d+), loss =",
        },
        rising=True,
    ),
    TrainerLines(
        sign=r"^\s*Iter\s+Train Loss(?:\s+OOB Improve)?\s+Remaining Time",
        settings={"eval": rf"^\s*(?P<step>\d+)\s+{_VALUE}\s+(?:[-+.\d]+\s+)?[\d.]+[smh]\s*$"},
        is_eval=False,
    ),
    TrainerLines(
        sign=r"^Norm: [\d.]+, NNZs: \d+, Bias: ",
        settings={"eval": rf"Avg\. loss: {_VALUE}", "progress": r"^-- Epoch (?P<epoch>\d+)"},
        unit="epoch",
        is_eval=False,
    ),
    TrainerLines(
        sign=r"^\[\d+/\d+\] \d+ trees?, .*val loss: ",
        settings={
            "eval": rf"^\[(?P<step>\d+)/\d+\] .*?\bval loss: {_VALUE}",
            "train": rf"^\[(?P<step>\d+)/\d+\] .*?\btrain loss: {_VALUE}",
        },
    ),
    # BasicSR's block of a validation, "# psnr: 30.12  Best: 30.12 @ 5000 iter"
    TrainerLines(
        sign=r"^\s*# psnr: ",
        settings={"eval": rf"^\s*# psnr: {_VALUE}", "progress": r"\biter:\s*(?P<step>\d[\d,]*\d)"},
        rising=True,
    ),
    # an episode's own reward, and the mean of the last ones, which is less of luck
    TrainerLines(
        sign=r"(?i)\blast reward:.*\baverage reward:",
        settings={"eval": rf"(?i)\bepisode:?\s+(?P<step>\d+).*?\baverage reward:\s*{_VALUE}"},
        rising=True,
    ),
    # the mean over folds, which is all that a cross-validation comes to
    TrainerLines(
        sign=r"(?i)^\W*fold:?\s*\d+",
        settings={
            "eval": r"(?i)\b(?:mean|average|avg|overall)\s+(?:(?:cv|cross[- ]?validation|val\w*|oof|test)\s+)?"
            rf"(?:auc|roc[-_ ]auc|acc|accuracy|f1|score|r2|map|ap)\w*\s*[:=]?\s*{_VALUE}",
            "progress": r"(?i)^\W*fold:?\s*(?P<step>\d+)",
        },
        rising=True,
    ),
)  # fmt: skip
"""The likeliest first."""


def rows_of(lines: Sequence[str]) -> Iterator[tuple[TrainerLines, str]]:
    """The rows whose sign stands in the lines, each with the first line that its pattern for evals matches."""
    for row in ROWS:
        if not any(re.search(row.sign, line) for line in lines):
            continue
        if row.unless and any(re.search(row.unless, line) for line in lines):
            continue
        example = next((line.strip() for line in lines if re.search(row.settings["eval"], line)), "")
        if example:
            yield row, example
