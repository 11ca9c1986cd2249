"""The pace of the machine told apart from the merit of a configuration: every time that is compared is at one pace.

``ln(seconds for the same progress) = work of a step + machine (which node, when) + scatter``. Parameters that may
change what a step costs make its work, so a layout's own pace is never explained away. Runs of equal work differ by
the machine alone: each is compared, at equal progress, with the fastest of them that agree. What the machine did is
then known of their nodes and times, and is taken over for works that ran once, or only while it was slow.
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
"""Parameters that leave a training step as it is, by name in capitals; any other may change what a step costs."""

LEAST = math.log(1.1)
"""The least ln(pace) that is corrected: equal runs on a quiet machine differ by some percent."""

SDS = 3.0
"""Standard errors that the median pace of a node must differ by, to be the node's."""

LATE = 0.5
"""Seconds by which a time must differ to be corrected: lines without time stamps are seen so late."""

USUAL_WEIGHT = 6
"""Comparisons of runs that ``PACE_SD`` is worth."""

BLIND = 10.0
"""Times its limit that a run may take before its first eval or train loss, where others do the same work a step."""

MUCH_SLOWER = 1.25
"""Times as long for the same work, from which on a limit of wall-clock time says so."""

ALIKE = 1.5
"""Ratio of the training between evals up to which two runs count as evaluating alike: evals take about an eighth of a
run's time (MLPerf's LoRA), so that their times for the same progress differ by less than ``LEAST``."""

MOST = 5
"""Runs that one is compared with. More would cost time in long sweeps."""

Array = npt.NDArray[np.float64]

Nodes = tuple[str, ...]

Points = Sequence[tuple[float, float]]
"""(samples, seconds) of a run."""

Work = tuple[bool, frozenset[tuple[str, str]]]
"""What decides the cost of a step: whether it is a short run for its speed, and the parameters that may change it."""


@dataclass(slots=True)
class _Ran:
    """An ended run. seconds: that it took, infinite where its speed alone is known. machine: ln of its seconds over
    those at the reference pace, as far as is known."""

    number: int
    nodes: Nodes
    began: float
    points: Points
    seconds: float
    machine: float = 0.0


@dataclass(slots=True)
class _EqualWork:
    """Runs of equal work. fast: those that agree on the fastest pace; at: ln of how slow the machine was for these.

    interval: samples between evals, at the least; 0 where a run has no two.
    """

    interval: float
    runs: list[_Ran]
    fast: list[_Ran] = field(default_factory=list)
    at: float = 0.0

    def compare(self, tolerance: float) -> None:
        """Every run beside the fastest that agree; of four and more a single one that is faster yet does not count."""
        self.fast = self.runs
        if len(self.runs) == 1:
            return
        ends = np.array([max(run.points) for run in self.runs])
        values = np.log(ends[:, 1] / ends[:, 0])
        for _ in range(2):
            close = np.flatnonzero(np.abs(values - _fast(values)) <= tolerance)
            self.fast = [self.runs[at] for at in close[:MOST]]  # the first of them, which stay so when others end
            values = np.log(self.times_slower([run.points for run in self.runs]))
        for run, value in zip(self.runs, values, strict=True):
            run.machine = float(value)

    def take_over(self, known: dict[Nodes, list[tuple[float, float]]], tolerance: float) -> None:
        """Compare with other works by the states of the nodes on which both ran. known: (when, state) by nodes, in
        order, to which its own are added.

        A machine stays as it is from one run to the next on the same nodes; where it did not, nothing is taken over.
        Runs between two others say more of that than runs before or after all of them.
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
        """Seconds of runs (n) over those of the fastest, each as far as both have come: training becomes slower where
        it changes precision."""
        ends = np.array([max(points) for points in runs])
        return np.asarray(np.median([_over(runs, ends, run.points) for run in self.fast], axis=0))


@dataclass(frozen=True, slots=True)
class MachinePace:
    """What the machine did in the ended runs of a sweep.

    slower: seconds over those at the reference pace, of the runs for which the machine was another. beside: runs at
    that pace, by the number of each of these. groups: runs by their work, and of one work by how much they train
    between evals, which take time, too. states: (when, ln of how slow the machine was) of nodes, in order of time.
    """

    slower: dict[int, float]
    beside: dict[int, Sequence[_Ran]]
    groups: Mapping[Work, Sequence[_EqualWork]]
    states: dict[Nodes, Sequence[tuple[float, float]]]

    def now(self, study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
        """The same of a run that goes on; 1 where nothing is known, ``BLIND`` where it should have shown progress."""
        group = self.equal_work(study, trial, run.evals)
        if group is None:
            return self.on_nodes(sweep, trial)
        points = _running(study, trial, run)
        if not points:
            return BLIND
        return float(group.times_slower([points])[0]) * math.exp(group.at)

    def equal_work(self, study: Study, trial: Trial, evals: Sequence[Eval] = ()) -> _EqualWork | None:
        """Ended runs of the same work; of those with as much training between evals, as far as they are known.

        None for a run that only its log tells of (``replay``): a log does not state all that its program was given.
        """
        groups = self.groups.get(_work(study, trial)) if trial.tuned else None
        if groups is None:
            return None
        interval = _interval(evals)
        like = [group for group in groups if group.interval / ALIKE < interval < group.interval * ALIKE]
        return max(like or groups, key=lambda group: len(group.runs))

    def on_nodes(self, sweep: StudyRecords, trial: Trial) -> float:
        """The same by what the last runs on its nodes have shown; 1 where nothing is known."""
        machine = _state(self.states.get(sweep.nodes_of(trial.number), ()), math.inf, LEAST)
        return math.exp(machine) if machine is not None and abs(machine) > LEAST else 1.0


def machine_pace(study: Study, sweep: StudyRecords) -> MachinePace:
    """The pace of the machine over all ended runs of the sweep."""
    return sweep.once(("machine pace", study.digest), lambda: _estimated(study, sweep))


def slowdown(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """How many times longer a run that goes on takes than at the reference pace; at least 1.

    1 where nothing is known. A run that shows no progress where others of the same work have some has ``BLIND``.
    """
    return max(1.0, machine_pace(study, sweep).now(study, sweep, trial, run))


def slowdown_on_nodes(study: Study, sweep: StudyRecords, trial: Trial, run: RunLog) -> float:
    """The same by what the last runs on the trial's nodes have shown, whatever its own log says."""
    del run
    return max(1.0, machine_pace(study, sweep).on_nodes(sweep, trial))


def references(study: Study, sweep: StudyRecords, trial: Trial) -> Mapping[int, Points]:
    """Ended runs of the same work a step, at the reference pace."""
    group = machine_pace(study, sweep).equal_work(study, trial)
    return {} if group is None else {run.number: run.points for run in group.fast if run.number != trial.number}


def equal_work(study: Study, trial: Trial, other: Trial) -> bool:
    """Whether a step of both trials costs alike. Nobody knows that of a trial that only its log tells of."""
    return bool(trial.tuned) and _work(study, trial) == _work(study, other)


def times_as_long(study: Study, sweep: StudyRecords, ended: Trial, trial: Trial, run: RunLog) -> Array:
    """How many times as long an ended trial took by each eval (n) of a run that goes on, both at the reference pace.

    1 (1) where the objective is no time, and where one of them does not say.
    """
    points, used = timed(sweep.last_evals(ended.number)), timed(run.evals)
    if not objective_of(study).timed or not points or not used:
        return np.ones(1)
    samples = np.minimum([n for n, _ in used], max(points)[0])
    slower = (ended.metrics.slower or 1.0) / slowdown(study, sweep, trial, run)
    return np.asarray(seconds_at(samples, points) / seconds_at(samples, used) / slower)


def at_reference_pace(study: Study, sweep: StudyRecords) -> Iterator[Trial]:
    """The ended trials whose values are not yet those at the reference pace, in their new form.

    Where the machine was no other, a value is exactly that of the clock. Losses are no times and stay.
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
        objectives = (*objectives_of(study), None)  # of one objective the second value is none
        value, second = (_moved(o, v, ratio) for o, v in zip(objectives, clock, strict=False))
        yield replace(trial, metrics=replace(
            known, objective=value, second_objective=second, slower=ratio, pace_of=reference,
            clock_objective=None if value == clock[0] else clock[0],
            clock_second_objective=None if second == clock[1] else clock[1],
        ))  # fmt: skip


def clock_text(study: Study, trial: Trial) -> str:
    """By how much the machine was another for an ended trial, beside which, and what the clock said; "" where it was
    not."""
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
    """A value of the clock at the reference pace. ratio: how many times slower the machine was, None for not."""
    if objective is None or value is None or ratio is None:
        return value
    return float(value * ratio**-objective.power_of_seconds)


def _reference_text(sweep: StudyRecords, trial: Trial, beside: Sequence[_Ran]) -> str:
    """Whose pace it is: of nodes, where the trial ran on none of them, else of trials."""
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
    """Runs of one work, with the samples between their evals, in groups that evaluate alike."""
    groups: list[_EqualWork] = []
    for interval, run in sorted(runs, key=lambda pair: pair[0]):
        if not groups or interval > ALIKE * groups[-1].interval:
            groups.append(_EqualWork(interval, []))
        groups[-1].runs.append(run)
    for group in groups:
        group.runs.sort(key=lambda run: run.number)
    return groups


def _tolerance(groups: Sequence[_EqualWork], scatter: float) -> float:
    """ln(pace) that no run differs by while the machine stays as it is: the most extreme of so many hardly does.

    What it differs from is the median of at most ``MOST`` runs, which scatters, too.
    """
    runs = sum(len(group.runs) for group in groups)
    return max(LEAST, (1 + math.sqrt(2 * math.log(max(runs, 8)))) * scatter * math.sqrt(1 + math.pi / 2 / MOST))


def _parts(groups: Iterable[_EqualWork]) -> Iterator[list[_EqualWork]]:
    """Works that share nodes, directly or by others, the largest first; between parts nothing can be compared."""
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
    """Bring the works of one part to one reference, and take down what the machine did by that."""
    known: dict[Nodes, list[tuple[float, float]]] = defaultdict(list)
    for group in part:
        group.take_over(known, tolerance)
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
    """Make the fastest state of the machine the reference, where the largest work had run in a slower one alone."""
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
    """ln of how slow the machine was at a time, by the runs just before and after it, or by two on one side.

    None where nothing is known, and where the two contradict each other.
    """
    at = bisect(known, (began, math.inf))
    near = known[at - 1 : at + 1] if 0 < at < len(known) else known[:2] if at == 0 else known[-2:]
    states = [machine for _, machine in near]
    if not states or max(states) - min(states) > max(tolerance, 0.25 * abs(sum(states))):
        return None
    return sum(states) / len(states)


def _stable(states: Sequence[tuple[float, float]], tolerance: float) -> Sequence[tuple[float, float]]:
    """The states of nodes that mostly stay as they are from one run to the next; of others, which say nothing of what
    they were in between, none."""
    changes = sum(abs(b - a) > tolerance for (_, a), (_, b) in pairwise(states))
    return states if changes <= max(1, len(states) // 5) else ()


def _other_nodes(known: Mapping[Nodes, Sequence[tuple[float, float]]], scatter: float) -> dict[Nodes, float]:
    """The median of nodes whose runs are slower, or faster, by more than that scatters."""
    middles = {n: float(np.median([m for _, m in states])) for n, states in known.items() if len(states) > 2}
    sure = {n: max(LEAST, SDS * 1.25 * scatter / math.sqrt(len(known[n]))) for n in middles}
    return {n: middle for n, middle in middles.items() if abs(middle) > sure[n]}


def _scatter(groups: Iterable[_EqualWork]) -> float:
    """Sd of ln(pace) of runs of equal work while the machine stays as it is, robust against a machine that does not.

    The lesser of two estimates: how far successive runs on the same nodes differ (drift hardly counts), and how near
    together the sorted paces lie (runs that alternate between two states are near others of their own state).
    """
    successive, gaps = [], []
    for group in groups:
        ordered = sorted(group.runs, key=lambda run: (run.nodes, run.began))
        successive += [abs(b.machine - a.machine) for a, b in pairwise(ordered) if a.nodes == b.nodes]
        values, count = sorted(run.machine for run in group.runs), len(group.runs)
        gaps += [(b - a) * count / GAPS for a, b in pairwise(values)] if count > 3 else []
    return min(_shrunk([each / DIFFERENCES for each in successive]), _shrunk(gaps))


def _shrunk(sds: Sequence[float]) -> float:
    """The median of single estimates of the scatter, drawn to what is usual while they are few."""
    if not sds:
        return PACE_SD
    middle = max(float(np.median(sds)), 1e-3)
    share = len(sds) / (len(sds) + USUAL_WEIGHT)
    return math.exp(share * math.log(middle) + (1 - share) * math.log(PACE_SD))


DIFFERENCES = 0.954
"""Median of the absolute difference of two Gaussian values, in their sd: 0.6745 times the square root of 2."""

GAPS = 1.87
"""Median gap between sorted Gaussian values, in sd over their count: half of them lie within 1.349 sd, and a gap's
median is ln 2 of its mean."""


def _work(study: Study, trial: Trial) -> Work:
    roles = study.search_space.roles()
    return trial.probe, frozenset(
        (name, str(value))
        for name, value in trial.parameters.items()
        if name.upper() not in SAME_WORK and roles.get(name) != "convergence"
    )


def _interval(evals: Sequence[Eval]) -> float:
    """Samples between evals, 0 where there are fewer than two."""
    return float(np.median(np.diff([e.samples for e in evals]))) if len(evals) > 1 else 0.0


def _ended(sweep: StudyRecords, trial: Trial, *, by_speed: bool) -> Points:
    """(samples, seconds) of a run that has ended; none of one that says nothing of its pace.

    by_speed: it is known by its speed alone: its evals, if it has any, are no part of what it is for.
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
    """(samples, seconds) of those points that say both."""
    pairs = ((p.samples, p.seconds) for p in points)
    return [(n, s) for n, s in pairs if 0 < n < math.inf and 0 < s < math.inf]


def seconds_at(samples: Array, points: Points) -> Array:
    """When a run with these (samples, seconds) had come to ``samples`` (n); beyond its end at its mean pace."""
    ordered = np.array([(0.0, 0.0), *sorted(points)])
    beyond = np.maximum(samples / ordered[-1, 0], 1.0)
    return np.asarray(np.interp(samples, ordered[:, 0], ordered[:, 1]) * beyond)


def _over(runs: Sequence[Points], ends: Array, beside: Points) -> Array:
    """Seconds of runs (n), with their ends (n, 2), over those of another one for the same samples."""
    samples, seconds = ends.T.copy()
    most, _ = max(beside)
    for at in np.flatnonzero(samples > most).tolist():
        samples[at], seconds[at] = most, seconds_at(np.array([most]), runs[at])[0]
    return np.asarray(seconds / seconds_at(samples, beside))


def _fast(values: Array) -> float:
    """The least of the values (n); of four and more the second, for one alone may be wrong."""
    return float(np.partition(values, 1)[1] if len(values) > 3 else values.min())
