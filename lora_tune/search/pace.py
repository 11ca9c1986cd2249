"""Separates the machine's pace from the merit of configurations, so that times are compared at one reference pace.

Model: ``ln(seconds for the same progress) = work of a step + machine (node, time) + noise``. Parameters that may change
the cost of a step define its work, so a layout's speed is never attributed to the machine. Runs of equal work differ by
the machine alone: each is compared, at equal progress, with the fastest ones that agree. The resulting slowdowns of
nodes and times are then applied to works that ran once, or only while the machine was slow.
"""

from __future__ import annotations

import math
from bisect import bisect, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from lora_tune import curves
from lora_tune.base.scatter import PACE_SD
from lora_tune.base.text import listed, trials_text
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from lora_tune.search.objectives import Objective, objective_of, objectives_of
from lora_tune.search.usual_names import RATE, STEPS, WARMUP
from lora_tune.store.records import StudyRecords, Trial, Verdict

SAME_WORK = frozenset({*RATE, *STEPS, *WARMUP, "MIN_LR", "WARMUP_RATIO", "WEIGHT_DECAY", "SEED"})
"""Parameters that do not change the cost of a training step, in capitals; any other may."""

LEAST = math.log(1.1)
"""Least ln(slowdown) that is corrected: equal runs on a quiet machine differ by a few percent."""

SDS = 3.0
"""Standard errors by which a node's median must differ to be attributed to the node."""

LATE = 0.5
"""Least difference in seconds that is corrected: the delay in reading lines without time stamps."""

USUAL_WEIGHT = 6
"""Weight of the prior ``PACE_SD``, in comparisons of runs."""

NO_PROGRESS_SLOWDOWN = 10.0
"""Slowdown assumed for a run without an eval or train loss so far if others of the same work have some; delays its
cap."""

MUCH_SLOWER = 1.25
"""Slowdown from which on messages about wall-clock limits mention it."""

ALIKE = 1.5
"""Ratio of eval intervals up to which two runs count as evaluating alike. Evals take about an eighth of a run's time
(MLPerf's LoRA), so times for equal progress then differ by less than ``LEAST``."""

MOST = 5
"""Maximum number of runs with which one is compared, to limit the cost in long sweeps."""

Array = npt.NDArray[np.float64]

Nodes = tuple[str, ...]

Points = Sequence[tuple[float, float]]
"""(samples, seconds) of a run."""

Work = tuple[bool, frozenset[tuple[str, str]]]
"""Determines the cost of a step: whether the run is a probe, and the parameters that may change the cost."""


@dataclass(slots=True)
class _Ran:
    """An ended run. seconds: its duration, infinite if only its speed is known. machine: ln(seconds over those at the
    reference pace), 0 if unknown."""

    number: int
    nodes: Nodes
    began: float
    points: Points
    seconds: float
    machine: float = 0.0


@dataclass(slots=True)
class _EqualWork:
    """Runs of equal work. fast: those that agree on the fastest pace; at: ln(slowdown of the machine) during these.

    interval: smallest number of samples between evals; 0 if a run has fewer than two.
    """

    interval: float
    runs: list[_Ran]
    fast: list[_Ran] = field(default_factory=list)
    at: float = 0.0

    def compare(self, tolerance: float) -> None:
        """Compare each run with the fastest ones that agree; among four or more, a single faster run is ignored."""
        self.fast = self.runs
        if len(self.runs) == 1:
            return
        ends = np.array([max(run.points) for run in self.runs])
        values = np.log(ends[:, 1] / ends[:, 0])
        for _ in range(2):
            close = np.flatnonzero(np.abs(values - _fast(values)) <= tolerance)
            self.fast = [self.runs[at] for at in close[:MOST]]  # the earliest, so that the set is stable
            values = np.log(self.times_slower([run.points for run in self.runs]))
        for run, value in zip(self.runs, values, strict=True):
            run.machine = float(value)

    def align(self, known: dict[Nodes, list[tuple[float, float]]], tolerance: float) -> None:
        """Align with other works by the states of shared nodes. known: (time, state) by nodes, sorted; extended by this
        work.

        The state is assumed constant between successive runs on the same nodes; nodes that change often are skipped.
        Runs between two others are preferred to runs before or after all of them.
        """
        states_of = [(run, _stable(known.get(run.nodes, ()), tolerance)) for run in self.runs]
        between = [(run, states) for run, states in states_of if states and states[0][0] < run.began < states[-1][0]]
        moved: list[float] = []
        for runs in (between, states_of):
            states = ((run, _state(beside, run.began, tolerance)) for run, beside in runs)
            moved = moved or [state - run.machine for run, state in states if state is not None]
        at = float(np.median(moved)) if moved else 0.0
        self.at = at if abs(at) > tolerance else 0.0
        for run in self.runs:
            run.machine += self.at
            if len(self.runs) > 1:
                insort(known[run.nodes], (run.began, run.machine))

    def times_slower(self, runs: Sequence[Points]) -> Array:
        """Slowdown of runs (n) against the fastest, each over the samples that both have, since training slows down
        when the precision changes."""
        ends = np.array([max(points) for points in runs])
        return np.asarray(np.median([_over(runs, ends, run.points) for run in self.fast], axis=0))


@dataclass(frozen=True, slots=True)
class MachinePace:
    """Estimated slowdown of the machine in the ended runs of a sweep.

    slower: seconds over those at the reference pace, only for runs with a correction. beside: the reference runs of
    each of these. groups: runs by work and eval interval, since evals take time. states: (time, ln slowdown) of nodes,
    sorted by time.
    """

    slower: dict[int, float]
    beside: dict[int, Sequence[_Ran]]
    groups: Mapping[Work, Sequence[_EqualWork]]
    states: dict[Nodes, Sequence[tuple[float, float]]]

    def now(self, study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
        """Slowdown of a running trial; 1 if unknown, ``NO_PROGRESS_SLOWDOWN`` if it should have shown progress."""
        group = self.equal_work(study, trial, run.evals)
        if group is None:
            return self.on_nodes(sweep, trial)
        points = _running(study, trial, run)
        if not points:
            return NO_PROGRESS_SLOWDOWN
        return float(group.times_slower([points])[0]) * math.exp(group.at)

    def equal_work(self, study: Study, trial: Trial, evals: Sequence[Eval] = ()) -> _EqualWork | None:
        """Ended runs of the same work, if possible with the same eval interval.

        None for a run known only by its log (``replay``), since a log does not state all settings.
        """
        groups = self.groups.get(_work(study, trial)) if trial.tuned else None
        if groups is None:
            return None
        interval = _interval(evals)
        like = [group for group in groups if group.interval / ALIKE < interval < group.interval * ALIKE]
        return max(like or groups, key=lambda group: len(group.runs))

    def on_nodes(self, sweep: StudyRecords, trial: Trial) -> float:
        """Slowdown by the last runs on the trial's nodes; 1 if unknown."""
        machine = _state(self.states.get(sweep.nodes_of(trial.number), ()), math.inf, LEAST)
        return math.exp(machine) if machine is not None and abs(machine) > LEAST else 1.0


def machine_pace(study: Study, sweep: StudyRecords) -> MachinePace:
    """Pace of the machine over all ended runs of the sweep."""
    return sweep.once(("machine pace", study.digest), lambda: _estimated(study, sweep))


def slowdown(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """Slowdown of a running trial against the reference pace; at least 1.

    1 if unknown. A run without progress, where others of the same work have some, has ``NO_PROGRESS_SLOWDOWN``.
    """
    return max(1.0, machine_pace(study, sweep).now(study, sweep, trial, run))


def slowdown_on_nodes(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """The same by the last runs on the trial's nodes only, not by its own log."""
    del run
    return max(1.0, machine_pace(study, sweep).on_nodes(sweep, trial))


def references(study: Study, sweep: StudyRecords, trial: Trial) -> Mapping[int, Points]:
    """Ended runs with the same work per step at the reference pace."""
    group = machine_pace(study, sweep).equal_work(study, trial)
    return {} if group is None else {run.number: run.points for run in group.fast if run.number != trial.number}


def equal_work(study: Study, trial: Trial, other: Trial) -> bool:
    """Whether a step of both trials costs the same; False if unknown, as for a trial known only by its log."""
    return bool(trial.tuned) and _work(study, trial) == _work(study, other)


def times_as_long(study: Study, sweep: StudyRecords, ended: Trial, trial: Trial, run: RunLog) -> Array:
    """Ratio of an ended trial's time to that of a running one at each eval (n), both at the reference pace.

    [1] if the objective is not a time, or if one of them has no times.
    """
    points, used = timed(sweep.last_evals(ended.number)), timed(run.evals)
    if not objective_of(study).timed or not points or not used:
        return np.ones(1)
    samples = np.minimum([n for n, _ in used], max(points)[0])
    slower = (ended.metrics.slower or 1.0) / slowdown(study, sweep, trial, run)
    return np.asarray(seconds_at(samples, points) / seconds_at(samples, used) / slower)


def at_reference_pace(study: Study, sweep: StudyRecords) -> Iterator[Trial]:
    """Ended trials whose values must be updated to the reference pace, in their new form.

    Without a correction a value equals the measured one. Losses are not times and are unchanged.
    """
    pace = machine_pace(study, sweep)
    for trial in sweep.trials.values():
        if trial.finished_at is None:
            continue
        ratio, known = pace.slower.get(trial.number), trial.metrics
        reference = _reference_text(sweep, trial, pace.beside[trial.number]) if ratio else None
        if ratio == known.slower and reference == known.pace_of:
            continue
        clock = (
            known.objective if known.clock_objective is None else known.clock_objective,
            known.second_objective if known.clock_second_objective is None else known.clock_second_objective,
        )
        objectives = (*objectives_of(study), None)  # with one objective the second value is None
        value, second = (_moved(o, v, ratio) for o, v in zip(objectives, clock, strict=False))
        yield replace(trial, metrics=replace(
            known, objective=value, second_objective=second, slower=ratio, pace_of=reference,
            clock_objective=None if value == clock[0] else clock[0],
            clock_second_objective=None if second == clock[1] else clock[1],
        ))  # fmt: skip


def clock_text(study: Study, trial: Trial) -> str:
    """Slowdown of an ended trial, its reference, and the measured value, for people; "" without a correction."""
    metrics, objective = trial.metrics, objective_of(study)
    if metrics.slower is None:
        return ""
    how = f"{metrics.slower:.2g} times as long" if metrics.slower >= 1 else f"{metrics.slower:.2g} of the time"
    reference = f"the machine took {how} for the same work as at the pace of {metrics.pace_of}"
    if metrics.objective is None or metrics.clock_objective is None:
        return reference
    by_clock, value = objective.text(metrics.clock_objective), objective.text(metrics.objective)
    return f"{reference}: {by_clock} by the clock, {value} at that pace"


def _moved(objective: Objective | None, value: float | None, ratio: float | None) -> float | None:
    """A measured value at the reference pace. ratio: slowdown of the machine, None for no correction."""
    if objective is None or value is None or ratio is None:
        return value
    return float(value * ratio**-objective.power_of_seconds)


def _reference_text(sweep: StudyRecords, trial: Trial, beside: Sequence[_Ran]) -> str:
    """Name of the reference: nodes, if the trial ran on none of them, else trials."""
    used, nodes = set(sweep.nodes_of(trial.number)), sorted({node for run in beside for node in run.nodes})
    if nodes and not used & set(nodes):
        return listed(nodes)
    return trials_text(sorted(run.number for run in beside))


def _estimated(study: Study, sweep: StudyRecords) -> MachinePace:
    ran: dict[Work, list[tuple[float, _Ran]]] = defaultdict(list)
    judges_evals = objective_of(study).judges_evals
    for trial in sweep.trials.values():
        by_speed = trial.probe or not judges_evals
        if points := _ended(sweep, trial, by_speed=by_speed):
            seconds = math.inf if by_speed else max(points)[1]
            interval = 0.0 if by_speed else _interval(sweep.last_evals(trial.number))
            run = _Ran(trial.number, sweep.nodes_of(trial.number), _began(sweep, trial), points, seconds)
            ran[_work(study, trial)].append((interval, run))
    groups = {work: _by_interval(runs) for work, runs in ran.items()}
    scatter, each = PACE_SD, [group for alike in groups.values() for group in alike]
    for _ in range(2):
        for group in each:
            group.compare(_tolerance(each, scatter))
        scatter = _scatter(each)
    tolerance = _tolerance(each, scatter)
    pace = MachinePace({}, {}, groups, {})
    for part in _parts(each):
        _join(pace, part, tolerance, scatter)
    return pace


def _by_interval(runs: Sequence[tuple[float, _Ran]]) -> list[_EqualWork]:
    """Group runs of one work, given with the samples between their evals, by similar eval intervals."""
    groups: list[_EqualWork] = []
    for interval, run in sorted(runs, key=lambda pair: pair[0]):
        if not groups or interval > ALIKE * groups[-1].interval:
            groups.append(_EqualWork(interval, []))
        groups[-1].runs.append(run)
    for group in groups:
        group.runs.sort(key=lambda run: run.number)
    return groups


def _tolerance(groups: Sequence[_EqualWork], scatter: float) -> float:
    """ln(slowdown) that no run exceeds by noise: bounds the extreme of so many runs.

    Includes the noise of the reference, a median of at most ``MOST`` runs.
    """
    runs = sum(len(group.runs) for group in groups)
    return max(LEAST, (1 + math.sqrt(2 * math.log(max(runs, 8)))) * scatter * math.sqrt(1 + math.pi / 2 / MOST))


def _parts(groups: Iterable[_EqualWork]) -> Iterator[list[_EqualWork]]:
    """Connected sets of works that share nodes, the largest first; different sets cannot be compared."""
    waiting = sorted(groups, key=lambda group: -len(group.runs))
    while waiting:
        part, nodes = [waiting.pop(0)], set[Nodes]()
        nodes.update(run.nodes for run in part[0].runs)
        while beside := [group for group in waiting if any(run.nodes in nodes for run in group.runs)]:
            part += beside[:1]
            waiting.remove(beside[0])
            nodes.update(run.nodes for run in beside[0].runs)
        yield part


def _join(pace: MachinePace, part: Sequence[_EqualWork], tolerance: float, scatter: float) -> None:
    """Align the works of one set to one reference, and record the slowdowns."""
    known: dict[Nodes, list[tuple[float, float]]] = defaultdict(list)
    for group in part:
        group.align(known, tolerance)
    _to_fastest(part, known, tolerance)
    middles = _other_nodes(known, scatter)
    compared = (run for group in part for run in group.runs if len(group.runs) > 1)
    alike = sorted((run for run in compared if abs(run.machine) <= tolerance), key=lambda run: run.number)[:MOST]
    for group in part:
        for run in group.runs:
            if abs(1 - math.exp(-run.machine)) * run.seconds <= LATE:
                continue
            if abs(run.machine) > tolerance or run.machine / middles.get(run.nodes, math.inf) > 0.5:
                pace.slower[run.number] = math.exp(run.machine)
                pace.beside[run.number] = alike if abs(group.at) > tolerance and alike else group.fast
    pace.states.update(known)


def _to_fastest(part: Sequence[_EqualWork], known: dict[Nodes, list[tuple[float, float]]], tolerance: float) -> None:
    """Make the fastest state of the machine the reference, if the largest work ran only in a slower one."""
    states = np.array([machine for each in known.values() for _, machine in each])
    if not len(states) or (fast := _fast(states)) >= -tolerance:
        return
    moved = float(np.median(states[np.abs(states - fast) <= tolerance]))
    for group in part:
        group.at -= moved
        for run in group.runs:
            run.machine -= moved
    for nodes, each in known.items():
        known[nodes] = [(began, machine - moved) for began, machine in each]


def _state(known: Sequence[tuple[float, float]], began: float, tolerance: float) -> float | None:
    """ln(slowdown) at a time, from the runs just before and after it, or from two on one side.

    None if unknown or if the two disagree.
    """
    at = bisect(known, (began, math.inf))
    near = known[at - 1 : at + 1] if 0 < at < len(known) else known[:2] if at == 0 else known[-2:]
    states = [machine for _, machine in near]
    if not states or max(states) - min(states) > max(tolerance, 0.25 * abs(sum(states))):
        return None
    return sum(states) / len(states)


def _stable(states: Sequence[tuple[float, float]], tolerance: float) -> Sequence[tuple[float, float]]:
    """The states of nodes that rarely change between runs; empty for others, whose state between runs is unknown."""
    changes = sum(abs(b - a) > tolerance for (_, a), (_, b) in pairwise(states))
    return states if changes <= max(1, len(states) // 5) else ()


def _other_nodes(known: Mapping[Nodes, Sequence[tuple[float, float]]], scatter: float) -> dict[Nodes, float]:
    """Median ln(slowdown) of nodes that differ significantly from the reference."""
    middles = {n: float(np.median([m for _, m in states])) for n, states in known.items() if len(states) > 2}
    sure = {n: max(LEAST, SDS * 1.25 * scatter / math.sqrt(len(known[n]))) for n in middles}
    return {n: middle for n, middle in middles.items() if abs(middle) > sure[n]}


def _scatter(groups: Iterable[_EqualWork]) -> float:
    """Sd of ln(pace) of runs of equal work on an unchanged machine, robust against changes.

    The smaller of two estimates: differences of successive runs on the same nodes (insensitive to drift), and gaps
    between the sorted paces (insensitive to alternation between two states).
    """
    successive, gaps = [], []
    for group in groups:
        ordered = sorted(group.runs, key=lambda run: (run.nodes, run.began))
        successive += [abs(b.machine - a.machine) for a, b in pairwise(ordered) if a.nodes == b.nodes]
        values, count = sorted(run.machine for run in group.runs), len(group.runs)
        gaps += [(b - a) * count / GAPS for a, b in pairwise(values)] if count > 3 else []
    return min(_shrunk([each / DIFFERENCES for each in successive]), _shrunk(gaps))


def _shrunk(sds: Sequence[float]) -> float:
    """Median of single estimates of the noise, shrunk towards the prior if they are few."""
    if not sds:
        return PACE_SD
    middle = max(float(np.median(sds)), 1e-3)
    share = len(sds) / (len(sds) + USUAL_WEIGHT)
    return math.exp(share * math.log(middle) + (1 - share) * math.log(PACE_SD))


DIFFERENCES = 0.954
"""Median absolute difference of two Gaussian values, in their sd: 0.6745 times the square root of 2."""

GAPS = 1.87
"""Median gap between sorted Gaussian values, in sd over their count: half of them lie within 1.349 sd, and the median
of a gap is ln 2 of its mean."""


def _work(study: Study, trial: Trial) -> Work:
    roles = study.search_space.roles()
    return trial.probe, frozenset(
        (name, str(value))
        for name, value in trial.parameters.items()
        if name.upper() not in SAME_WORK and roles.get(name) != "convergence"
    )


def _interval(evals: Sequence[Eval]) -> float:
    """Median samples between evals, 0 for fewer than two."""
    return float(np.median(np.diff([e.samples for e in evals]))) if len(evals) > 1 else 0.0


def _ended(sweep: StudyRecords, trial: Trial, *, by_speed: bool) -> Points:
    """(samples, seconds) of an ended run; empty if it has no usable times.

    by_speed: use only the throughput, since evals are not part of the run's purpose.
    """
    if trial.finished_at is None or trial.verdict in (Verdict.FAILED, Verdict.CANCELLED) or trial.replicates > 1:
        return ()
    speed = trial.metrics.samples_per_second
    if by_speed:
        return [(1.0, 1 / speed)] if speed else ()
    return timed(sweep.last_evals(trial.number))


def _running(study: Study, trial: Trial, run: RunLog) -> Points:
    speed = curves.fastest_pace(run, 0.0)
    if trial.probe or not objective_of(study).judges_evals:
        return [(1.0, 1 / speed)] if speed else ()
    return timed([*run.evals, *run.train])


def _began(sweep: StudyRecords, trial: Trial) -> float:
    attempts = sweep.attempts_of(trial.number)
    began = attempts[-1].started_at if attempts else None
    return trial.proposed_at if began is None else began


def timed(points: Iterable[Eval | TrainPoint]) -> list[tuple[float, float]]:
    """(samples, seconds) of the points that have both."""
    pairs = ((p.samples, p.seconds) for p in points)
    return [(n, s) for n, s in pairs if 0 < n < math.inf and 0 < s < math.inf]


def seconds_at(samples: Array, points: Points) -> Array:
    """Time at which a run with these (samples, seconds) reached ``samples`` (n); beyond its end by its mean pace."""
    ordered = np.array([(0.0, 0.0), *sorted(points)])
    beyond = np.maximum(samples / ordered[-1, 0], 1.0)
    return np.asarray(np.interp(samples, ordered[:, 0], ordered[:, 1]) * beyond)


def _over(runs: Sequence[Points], ends: Array, beside: Points) -> Array:
    """Seconds of runs (n), with their ends (n, 2), over those of another run for the same samples."""
    samples, seconds = ends.T.copy()
    most, _ = max(beside)
    for at in np.flatnonzero(samples > most).tolist():
        samples[at], seconds[at] = most, seconds_at(np.array([most]), runs[at])[0]
    return np.asarray(seconds / seconds_at(samples, beside))


def _fast(values: Array) -> float:
    """The minimum of the values (n); of four or more the second smallest, since a single one may be wrong."""
    return float(np.partition(values, 1)[1] if len(values) > 3 else values.min())
