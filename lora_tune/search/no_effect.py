"""Parameters without an effect: trials with different values whose evals are equal to the last digit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.base.text import trials_text
from lora_tune.config.study import Study
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial
from lora_tune.workloads import load
from lora_tune.workloads.command import CommandWorkload

LEAST = 3
"""Configurations that must agree before a parameter is reported."""

LEAST_COARSE = 6
"""The same for evals with few digits, such as the accuracy on a small set, which may agree by chance."""

LEAST_SHARE = 0.5
"""Share of the longest run that another must have completed before its evals count as evidence."""

_DIGITS = 6
"""Significant digits of all different evals of a run, below which they are coarse."""

_SPEED_RATIO = 1.5
"""Ratio of times to the same eval above which a parameter may affect speed; equal work on one machine differs less."""

_LEARNS = re.compile(
    r"(?i)(?:\w+_)?(?:lr|learning_?rate|warm_?up\w*|\w*drop_?out\w*|weight_?decay|wd|beta_?\d|momentum|\w*alpha"
    r"|schedule\w*|clip\w*|max_grad_norm|label_smoothing|seed|eps|epsilon)"
)
"""Names of parameters that affect evals if they affect anything, never speed alone."""

_KEPT = "no effect"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoEffect:
    """Parameters without an effect on evals. trials: whose evals agree. every: no trial with evals disagrees.

    misleads: whether differences in the objective can then only be noise, so that nothing can be recommended. unread:
    statement that the script's text reads none of them, with the remedy; "" if the evidence is equal evals.
    """

    names: tuple[str, ...]
    trials: tuple[int, ...]
    every: bool
    misleads: bool
    unread: str = ""

    @property
    def sentence(self) -> str:
        """Observation and remedy, for people."""
        if self.unread:
            return f"{self.unread}; its trials differ by chance alone; nothing is recommended"
        result = "; nothing is recommended" if self.misleads else ""
        verb, them = ("have", "them") if len(self.names) > 1 else ("has", "it")
        return (
            f"{', '.join(self.names)} {verb} no effect: {trials_text(self.trials)} differ in {them} and their evals "
            f"are the same to the last digit{result}; see whether the script uses its command and variables, which "
            "sweep --dry-run shows, then begin anew"
        )


def no_effect(study: Study, sweep: StudyRecords) -> NoEffect | None:
    """Parameters without an effect in at least three configurations; None if evals differ or are too few."""
    return sweep.once(_KEPT, lambda: _unread(study, sweep) or _no_effect(study, sweep))


def _unread(study: Study, sweep: StudyRecords) -> NoEffect | None:
    """The parameters of a script that reads none of them, after two of its configurations have ended in any way."""
    ended = [t for t in sweep.trials.values() if t.verdict is not None and not t.probe and t.replicate_of is None]
    names = _varied(ended)
    if study.workload.kind != "command" or not names:
        return None
    workload = load(study, study.name)
    sentence = workload.all_unread if isinstance(workload, CommandWorkload) else ""
    numbers = tuple(sorted(t.number for t in ended))
    return NoEffect(names=names, trials=numbers, every=True, misleads=True, unread=sentence) if sentence else None


def _no_effect(study: Study, sweep: StudyRecords) -> NoEffect | None:
    objective = objective_of(study)
    if not (objective.timed or objective.has_target or study.objective.metric):
        return None  # evals are no evidence on speed
    groups = _groups([(trial, curve) for trial in sweep.trials.values() if (curve := _curve(study, sweep, trial))])
    if not groups:
        return None
    alike, longest = max(groups, key=lambda g: _configurations(g[0]))
    every = len(groups) == 1
    least = LEAST if _digits(longest) >= _DIGITS else LEAST_COARSE
    names = _varied(alike)
    if not names or _configurations(alike) < least or (not every and len({loss for _, loss in longest}) < 2):
        return None
    misleads = every and study.objective.second is None and not (objective.timed and _speed(sweep, alike, names))
    return NoEffect(names=names, trials=tuple(sorted(t.number for t in alike)), every=every, misleads=misleads)


def _groups(
    curves: Sequence[tuple[Trial, Sequence[tuple[float, str]]]],
) -> list[tuple[list[Trial], Sequence[tuple[float, str]]]]:
    """Trials grouped by agreeing curves, each group with its longest curve.

    Schedules differ late. So a run is ignored if it was stopped before half of the longest, or if its evals are also
    the first ones of two runs that diverged from each other.
    """
    groups: list[tuple[list[Trial], Sequence[tuple[float, str]]]] = []
    farthest = max((curve[-1][0] for _, curve in curves), default=0.0)
    whole = [(trial, curve) for trial, curve in curves if curve[-1][0] >= LEAST_SHARE * farthest]
    for trial, evals in sorted(whole, key=lambda pair: -len(pair[1])):
        agreeing = [group for group in groups if _agree(group[1], evals)]
        if not agreeing:
            groups.append(([trial], evals))
        elif len(agreeing) == 1:
            agreeing[0][0].append(trial)
    return groups


def _curve(study: Study, sweep: StudyRecords, trial: Trial) -> tuple[tuple[float, str], ...]:
    """A finished trial's evals after the start of training, as printed; empty if one is not finite."""
    if trial.verdict is None or trial.probe or trial.replicate_of is not None:
        return ()
    evals = sweep.last_evals(trial.number)
    if any(not math.isfinite(e.loss) for e in evals):
        return ()
    return tuple((e.samples, f"{study.shown(e.loss):.10g}") for e in evals if e.samples > 0)


def _agree(one: Sequence[tuple[float, str]], other: Sequence[tuple[float, str]]) -> bool:
    """Whether two curves are equal over their common length."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _digits(curve: Sequence[tuple[float, str]]) -> int:
    return sum(len(re.sub(r"e.*|[-.]", "", loss).strip("0")) for loss in {loss for _, loss in curve})


def _configurations(trials: Sequence[Trial]) -> int:
    return len({tuple(sorted(t.tuned.items())) for t in trials})


def _varied(trials: Sequence[Trial]) -> tuple[str, ...]:
    """Tuned parameters in which the trials differ."""
    names = dict.fromkeys(name for t in trials for name in t.tuned)
    return tuple(n for n in names if len({t.tuned.get(n) for t in trials}) > 1)


def _speed(sweep: StudyRecords, trials: Sequence[Trial], names: Sequence[str]) -> bool:
    """Whether the parameters may affect speed: their names allow it, and the trials' times differ."""
    if all(_LEARNS.fullmatch(name) for name in names):
        return False
    common = min(len(sweep.last_evals(t.number)) for t in trials) - 1
    times = [sweep.last_evals(t.number)[common].seconds for t in trials]
    return min(times) > 0 and max(times) > _SPEED_RATIO * min(times)
