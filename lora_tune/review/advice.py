"""Advice from a sweep's results, with evidence, on convergence and on the machine."""

from __future__ import annotations

import csv
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from statistics import median

from lora_tune.base.text import counted, duration, trials_text
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.logs.run import TrainPoint
from lora_tune.review.advice_convergence import CONVERGENCE_RULES, Advice, learning_rate, overfits, reached
from lora_tune.review.importance import FailingValue, explained, failing_values
from lora_tune.review.summary import batch_text, machine_text, not_at_pace
from lora_tune.search.noise import noise_of
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import StudyRecords, Trial, Verdict

# Consequences of MLPerf's rules: RCP normalisation takes gains back.


FEWEST = 2
"""Minimum trials at one batch size for a comparison with the reference convergence."""


def rcp_normalised_gain(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials that converge in fewer samples than the reference, to which the score is normalised.

    A lower learning rate then costs nothing while the mean stays below the reference, and gives steadier runs.
    """
    benchmark = study.benchmark
    if benchmark is None or benchmark.progress != "samples_count":
        return None
    batches: dict[int, list[tuple[float, int]]] = {}
    for trial in reached(sweep):
        batch = trial.parameters.get("GBS")
        if isinstance(batch, int) and trial.samples is not None and learning_rate(trial) is not None:
            batches.setdefault(batch, []).append((trial.samples, trial.number))
    for batch, runs in sorted(batches.items(), key=lambda item: -len(item[1])):
        against = benchmark.reference(batch)
        middle = median(samples for samples, _ in runs)
        if against is None or len(runs) < FEWEST or middle >= against.mean:
            continue
        refused = middle < against.fastest
        return Advice(
            seen="runs converge faster than the reference, which is taken back",
            do=("lower the learning rate, or the RCP check refuses such runs" if refused else
                "a lower learning rate costs nothing here; only throughput and the time of evals pay"),
            evidence=f"GBS {batch}: {middle:.6g} samples in the middle of {len(runs)} runs, reference mean "
            f"{against.mean:.6g}, refused below {against.fastest:.6g} ({benchmark.name}, {benchmark.ruleset})",
            trials=tuple(sorted(number for _, number in runs)),
        )  # fmt: skip
    return None


RULES_OF_MLPERF: tuple[Callable[[Study, StudyRecords], Advice | None], ...] = (rcp_normalised_gain,)


__all__ = ["Advice", "advise"]


def advise(study: Study, sweep: StudyRecords, train: Mapping[int, Sequence[TrainPoint]] | None = None) -> list[Advice]:
    """All advice that the sweep supports, convergence first. Pure.

    train: training losses by trial, from its log; needed for advice on overfitting.
    """
    failing = failing_values(sweep)
    rest = replace(sweep, trials={n: t for n, t in sweep.trials.items() if n not in explained(failing)})
    answers: list[Advice | None] = [_failing(study, value) for value in failing]
    answers += [rule(study, rest) for rule in CONVERGENCE_RULES]
    answers += [rule(study, sweep) for rule in (*MACHINE_RULES, *RULES_OF_MLPERF)]
    answers.append(overfits(study, sweep, train or {}))
    return [advice for advice in answers if advice is not None]


def _failing(study: Study, value: FailingValue) -> Advice:
    return Advice(
        seen=value.sentence(study),
        do=f"leave that out of space.{value.name}, or look at one of these trials: explain --trial {value.trials[0]}",
        evidence=f"{trials_text(value.trials)}; by luck alone so far apart with a chance of "
        f"{max(value.chance, 1e-4):.2g}",
        trials=value.trials,
    )


EXPENSIVE_EVALS = 0.2
"""Maximum acceptable share of evals in the time to the target."""
RARE = 0.2
"""Maximum eval interval as a share of the samples to the target; on average half an interval is lost."""
SLOW = 0.9
"""Throughput below this share of the best published one on the same machine is slow."""
START_UP = 0.25
"""Maximum acceptable share of start-up in the node-hours."""
LUCK = 0.02
"""If the best of all runs may be lower than this by luck, gains of later runs cannot be detected."""
STALE = 0.4
"""Share of the node-hours at the end without gain from which on more trials look pointless."""
GAIN = 0.01
"""Minimum relative improvement that counts as a gain."""


def out_of_memory(study: Study, sweep: StudyRecords) -> Advice | None:
    """Layouts that ran out of memory, and those that ran."""
    del study
    died, ran = defaultdict(list), set()
    for trial in sweep.trials.values():
        if trial.verdict is Verdict.INFEASIBLE:
            died[_layout(trial)].append(trial.number)
        elif trial.metrics.samples_per_second:
            ran.add(_layout(trial))
    if not died:
        return None
    always = sorted(x for x in died if x not in ran)
    numbers = tuple(sorted(n for group in died.values() for n in group))
    counts = "; ".join(
        f"{layout}: {len(n)} died" + (", others ran" if layout in ran else "") for layout, n in died.items()
    )
    fits = f"; {', '.join(sorted(ran)[:4])} fit" if ran else ""
    drop = f"leave {', '.join(always[:3])} out, or " if always and ran else ""
    return Advice(
        seen="trials run out of memory",
        do=f"{drop}use more TP or CP, smaller micro batches with more accumulation, or activation recomputation",
        evidence=counts + fits,
        trials=numbers,
    )


def _layout(trial: Trial) -> str:
    names = [n for n in ("TP", "PP", "CP", "MBS") if n in trial.parameters]
    return " ".join(f"{n}{trial.parameters[n]}" for n in names) or batch_text(trial.parameters) or "this script"


def evals_expensive(study: Study, sweep: StudyRecords) -> Advice | None:
    """Evals take a large share of the time to the target."""
    shares = []
    for trial in reached(sweep):
        each = trial.metrics.seconds_per_eval
        if each and trial.seconds and trial.samples:
            count = sum(e.samples <= trial.samples for e in sweep.last_evals(trial.number))
            shares.append(count * each / trial.seconds)
    if not shares or median(shares) <= EXPENSIVE_EVALS:
        return None
    do = "evaluate more rarely or start later" if study.division == "open" else (
        "in the closed division the interval is fixed; use a layout that evaluates faster, or a larger eval batch"
    )  # fmt: skip
    return Advice(
        seen="evaluations are expensive",
        do=do,
        evidence=f"evals take {median(shares):.0%} of the time to the target {_of(shares)}",
    )


def evals_too_rare(study: Study, sweep: StudyRecords) -> Advice | None:
    """The target is passed long before an eval observes it."""
    steps = []
    for trial in reached(sweep):
        evals = sweep.last_evals(trial.number)
        if len(evals) >= 2 and trial.samples:
            steps.append((evals[-1].samples - evals[-2].samples) / trial.samples)
    if study.division != "open" or not steps or median(steps) <= RARE:
        return None
    return Advice(
        seen="evaluations are infrequent",
        do="evaluate more often: every run goes on for half an interval after it has passed the target",
        evidence=f"one interval is {median(steps):.0%} of the {study.progress_unit} to the target {_of(steps)}",
    )


def _of(values: Sequence[float]) -> str:
    return f"(median of {counted(len(values), 'trials')})"


@cache
def _published() -> tuple[dict[str, str], ...]:
    text = files("lora_tune.search").joinpath("published.csv").read_text(encoding="utf-8")
    return tuple(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _in_fp4(trial: Trial) -> bool:
    """Whether its parameters imply FP4 training; most FP4 runs set HEALING_ITER."""
    stated = trial.parameters.get("FP4", "HEALING_ITER" in trial.parameters)
    return str(stated).lower() in ("true", "1")


def slower_than_published(study: Study, sweep: StudyRecords) -> Advice | None:
    """The best throughput against the best published one on as many GPUs of the kind; llama2_70b_lora only."""
    known = sorted({r["accelerator"] for r in _published()}, key=len, reverse=True)
    kind = next((k for k in known if k in study.site.system.upper()), None)
    gpus = study.site.nodes * study.site.gpus_per_node
    if kind is None or study.objective.curves != "llama2_70b_lora":
        return None
    own = [(t.metrics.samples_per_second, t) for t in sweep.trials.values() if t.metrics.samples_per_second]
    speed, trial = max(own, key=lambda x: x[0], default=(0.0, None))
    rows = [
        r
        for r in _published()
        if (r["accelerator"], r["accelerators"]) == (kind, str(gpus))
        and r["samples_per_second"]
        and trial is not None
        and (r["precision"] == "FP4") == _in_fp4(trial)  # FP4 is 1.5 times as fast
    ]
    if not rows or trial is None:
        return None
    best = max(rows, key=lambda r: float(r["samples_per_second"]))
    theirs = float(best["samples_per_second"])
    if speed >= SLOW * theirs:
        return None
    degrees = " ".join(f"{n}{best[n]}" for n in ("TP", "PP", "CP") if best[n]) or "layout unknown"
    return Advice(
        seen="this machine is slow against published ones of its kind",
        do=f"try {degrees} with MINIBS {best['MINIBS']}; check the container, FP8 and TP overlap settings, clocks, and "
        "NCCL bandwidth (above 300 GB/s is healthy on a DGX H100)",
        evidence=f"{speed:.3g} samples/s at best here (trial {trial.number}, {_layout(trial)}); {best['submitter']} "
        f"{best['system']}, {best['round']}: {theirs:.3g} on {gpus} {kind}"
        + (f" in {best['precision']}" if best["precision"] else ""),
        trials=(trial.number,),
    )


def bad_node(study: Study, sweep: StudyRecords) -> Advice | None:
    """A node with repeated infrastructure failures."""
    del study
    failures, stays = Counter[str](), Counter[str]()
    for attempt in sweep.attempts.values():
        stays.update(attempt.nodes)
        if attempt.failure in ("infrastructure", "flaky"):
            failures.update(attempt.nodes)
    for node, count in failures.most_common(1):
        others = sum(failures.values()) - count
        if count >= 2 and count >= 0.5 * stays[node] and count > 2 * others and len(stays) > 1:
            return Advice(
                seen="one node fails again and again",
                do=f"set site.exclude = {node!r} and tell your administrators",
                evidence=f"{count} of {stays[node]} attempts on {node} failed, {others} on all other nodes",
            )
    return None


def machine_changed(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials whose machine was slower or faster than the reference pace."""
    if not (slow := not_at_pace(sweep)):
        return None
    return Advice(
        seen="the machine was slower for some trials than for others",
        do="nothing for the ranking, which compares all at one pace; look at what else ran there, and measure again on "
        "a quiet machine (lora-tune confirm) where the time by the clock counts",
        evidence=machine_text(study, sweep),
        trials=tuple(slow),
    )


def suspended(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials whose jobs were suspended."""
    del study
    paused = {t.number: t.metrics.paused_seconds for t in sweep.trials.values() if t.metrics.paused_seconds}
    if not paused:
        return None
    most = max(paused, key=lambda n: paused[n])
    return Advice(
        seen="jobs were suspended while they ran",
        do="nothing for the results, which leave it out; where it costs too much, ask for a partition or QOS whose "
        "jobs are not suspended",
        evidence=f"{trials_text(tuple(sorted(paused)))} stood still for {duration(sum(paused.values()))}, "
        f"trial {most} for {duration(paused[most])}",
        trials=tuple(sorted(paused)),
    )


def start_up(study: Study, sweep: StudyRecords) -> Advice | None:
    """Start-up time, which is not scored but costs node-hours."""
    hours = sum(t.metrics.node_hours or 0.0 for t in sweep.trials.values())
    lost = 0.0
    for trial in sweep.trials.values():
        attempts = sweep.attempts_of(trial.number)
        lost += (trial.metrics.init_seconds or 0.0) / 3600 * (attempts[-1].node_count if attempts else 1)
    if not hours or lost <= START_UP * hours:
        return None
    return Advice(
        seen="start-up takes a large share of what is paid",
        do="confirm with several seeds in one allocation, keep caches warm, and let short trials share a process",
        evidence=f"{spent_text(study, lost)} of {spent_text(study, hours)} {spent_name(study)} went by before the "
        "clock started",
    )


def nothing_gained(study: Study, sweep: StudyRecords) -> Advice | None:
    """The last trials brought no gain, or noise hides it: with many noisy runs the luckiest lies so low that a real
    improvement does not show below it."""
    ended = sorted((t for t in sweep.trials.values() if t.finished_at is not None), key=lambda t: t.finished_at or 0.0)
    if len(reached(sweep)) < 8 or not objective_of(study).timed:
        return None
    hours = [t.metrics.node_hours or 0.0 for t in ended]
    best, last_gain = float("inf"), 0
    for at, trial in enumerate(ended):
        if trial.verdict is Verdict.REACHED and trial.objective < (1 - GAIN) * best:
            best, last_gain = trial.objective, at
    stale = sum(hours[last_gain + 1 :])
    if stale <= STALE * sum(hours):
        return None
    since = tuple(sorted(t.number for t in ended[last_gain + 1 :]))
    scatter = noise_of(study, sweep)
    if (luck := scatter.sd * math.sqrt(2 * math.log(len(reached(sweep))))) > LUCK:
        return Advice(
            seen="whether more trials would bring anything cannot be told",
            do="confirm the best with more seeds before you spend more, or stop",
            evidence=f"{scatter.sentence}, so the best of {len(reached(sweep))} runs is about {luck:.0%} low by luck",
            trials=since,
        )
    return Advice(
        seen="more trials bring nothing",
        do="stop here and confirm the best with more seeds, or change the space",
        evidence=f"the last {spent_text(study, stale)} of {spent_text(study, sum(hours))} {spent_name(study)} "
        f"({trials_text(since)}) gained less than {GAIN:.0%}",
        trials=since,
    )


MACHINE_RULES: tuple[Callable[[Study, StudyRecords], Advice | None], ...] = (
    out_of_memory,
    evals_expensive,
    evals_too_rare,
    slower_than_published,
    bad_node,
    machine_changed,
    suspended,
    start_up,
    nothing_gained,
)
