"""How fast the machine is now beside what it was: trials that do the same work a step compared at the same progress."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from lora_tune.config.study import Study
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.search.usual_names import RATE, STEPS, WARMUP
from lora_tune.store.records import StudyRecords, Trial

SAME_WORK = frozenset({*RATE, *STEPS, *WARMUP, "MIN_LR", "WARMUP_RATIO", "WEIGHT_DECAY", "SEED"})
"""Parameters that leave a training step as it is, by name in capitals; any other may change what a step costs."""

BLIND = 10.0
"""Times its limit that a run may take before its first eval or train loss, where others do the same work a step."""

MUCH_SLOWER = 1.25
"""Times as long for the same work: a machine that became slower. Equal layouts differ by some percent between runs."""

FASTEST = 5
"""Other trials that a run is compared with: those of the highest mean pace. More would cost time in long sweeps."""

Points = Sequence[tuple[float, float]]
"""(samples, seconds) of a run."""


def slowdown(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """Seconds of the run over those of the fastest trial that does the same work a step, for the same progress.

    At least 1, and 1 where no other trial does the same work. A run that shows no progress yet has ``BLIND``.
    """
    others = references(study, sweep, trial)
    if not others:
        return 1.0
    points = timed([*run.evals, *run.train])
    return max(1.0, *_ratios(max(points), others).values()) if points else BLIND


def slowed(study: Study, sweep: StudyRecords) -> dict[int, tuple[float, int]]:
    """Of each ended trial with others of the same work: its seconds over the fastest one's, and which that is."""
    found = {}
    for trial in sweep.trials.values():
        points = timed(sweep.last_evals(trial.number))
        others = references(study, sweep, trial)
        if not trial.probe and trial.finished_at is not None and points and others:
            ratios = _ratios(max(points), others)
            fastest = max(ratios, key=lambda number: ratios[number])
            found[trial.number] = ratios[fastest], fastest
    return found


def slower_words(study: Study, sweep: StudyRecords, trial: Trial) -> str:
    """How much slower the machine was for an ended trial than for the fastest of equal work, and on which nodes.

    "" where it was not, or where no other trial does the same work a step.
    """
    ratio, fastest = slowed(study, sweep).get(trial.number, (1.0, trial.number))
    if ratio < MUCH_SLOWER:
        return ""
    own, other = (_nodes(sweep, number) for number in (trial.number, fastest))
    where = f", on {own} beside {other}" if own and other and own != other else f", both on {own}" if own else ""
    return (
        f"{ratio:.1f} times as long as trial {fastest} for the same {study.progress_unit} with the same work a step"
        f"{where}: its time is the machine's, not its configuration's"
    )


def _nodes(sweep: StudyRecords, trial: int) -> str:
    attempts = sweep.attempts_of(trial)
    return ", ".join(attempts[-1].nodes) if attempts else ""


def _ratios(point: tuple[float, float], others: Mapping[int, Points]) -> dict[int, float]:
    """The seconds of a (samples, seconds) over those of each of the others for the same samples."""
    samples, seconds = point
    return {number: seconds / seconds_at(samples, points) for number, points in others.items()}


def references(study: Study, sweep: StudyRecords, trial: Trial) -> Mapping[int, Points]:
    """The fastest other trials that do the same work a step: all that may change it is equal. No probes.

    None for a run that only its log tells of (``replay``): a log does not state all that its program was given.
    """
    if not trial.tuned:
        return {}
    groups = sweep.once(("work", study.digest), lambda: _groups(study, sweep))
    others = {n: points for n, points in groups.get(_work(study, trial), ()) if n != trial.number}
    return dict(list(others.items())[:FASTEST])


def _groups(study: Study, sweep: StudyRecords) -> dict[frozenset[tuple[str, str]], list[tuple[int, Points]]]:
    """Ended trials with evals by the work of a step, the fastest of each first, one more than are compared with."""
    groups: dict[frozenset[tuple[str, str]], list[tuple[int, Points]]] = defaultdict(list)
    for trial in sweep.trials.values():
        ended = trial.finished_at is not None and not trial.probe
        if ended and (points := timed(sweep.last_evals(trial.number))):
            groups[_work(study, trial)].append((trial.number, points))
    for work, runs in groups.items():
        groups[work] = sorted(runs, key=lambda run: max(run[1])[1] / max(run[1])[0])[: FASTEST + 1]
    return groups


def _work(study: Study, trial: Trial) -> frozenset[tuple[str, str]]:
    roles = study.search_space.roles()
    return frozenset(
        (name, str(value))
        for name, value in trial.parameters.items()
        if name.upper() not in SAME_WORK and roles.get(name) != "convergence"
    )


def timed(points: Iterable[Eval | TrainPoint]) -> list[tuple[float, float]]:
    """(samples, seconds) of those points that say both."""
    pairs = ((p.samples, p.seconds) for p in points)
    return [(n, s) for n, s in pairs if 0 < n < math.inf and 0 < s < math.inf]


def seconds_at(samples: float, points: Points) -> float:
    """When a run with these (samples, seconds) had come to ``samples``; beyond its end at its mean pace."""
    ordered = [(0.0, 0.0), *sorted(points)]
    last_samples, last_seconds = ordered[-1]
    if samples > last_samples:
        return last_seconds * samples / last_samples
    return float(np.interp(samples, [n for n, _ in ordered], [s for _, s in ordered]))
