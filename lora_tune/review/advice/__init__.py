"""Advice in plain words: the field's if-then rules, applied to what was observed in one sweep, with the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

from lora_tune.config.study import Study
from lora_tune.logs.run import TrainPoint
from lora_tune.review.advice.base import Advice, learning_rate, listed, reached
from lora_tune.review.advice.convergence import CONVERGENCE_RULES, overfits
from lora_tune.review.advice.machine import MACHINE_RULES
from lora_tune.review.importance import FailingValue, explained, failing_values
from lora_tune.store.records import StudyRecords

# What MLPerf's rules imply for a sweep of one of its benchmarks: what is taken back, and what is paid for nothing.


FEWEST = 2
"""Trials at one batch size before their convergence is compared with the reference's."""


def taken_back(study: Study, sweep: StudyRecords) -> Advice | None:
    """Trials that converge in fewer samples than the reference: the score is scaled back to it.

    A slower learning rate then costs nothing as long as the mean stays below the reference, and buys steadier runs.
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


RULES_OF_MLPERF: tuple[Callable[[Study, StudyRecords], Advice | None], ...] = (taken_back,)


__all__ = ["Advice", "advise"]


def advise(study: Study, sweep: StudyRecords, train: Mapping[int, Sequence[TrainPoint]] | None = None) -> list[Advice]:
    """Everything that the sweep so far gives reason to say, convergence first. Pure.

    train: training losses by trial, from its log; without them nothing is said about overfitting.
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
        evidence=f"{listed(value.trials)}; by luck alone so far apart with a chance of {max(value.chance, 1e-4):.2g}",
        trials=value.trials,
    )
