"""Sweeps that compare with the public runs, which one good run may contradict: good runs stopped, and bad ones caught.

Each sweep plays whole runs at GBS 8 one after another, 60% of them good, in front of the driver's own ``judge_curve``
with the records as they were then. Good runs are public ones of submissions that the envelope was not calibrated on.
Where the public runs are right these are as they were: of all submissions, or of one (a user's own machine). Where
they are wrong the same runs need more samples (one public site does, 1.29 times), or trained in FP4 and are said not
to. Bad runs are simulated and never reach the target. Said: the mean of what status stated while the good runs trained.
"Believed to the end": the same sweeps, judged by the public runs from the first run to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import TARGET, by_submission, is_test, load
from benchmarks.statistics import perturbed
from benchmarks.statistics.crossing import real_noise
from benchmarks.stopping.envelope import HEALING
from lora_tune.config.study import Study, parse_study
from lora_tune.controller.evidence import applicable, contradiction, public_envelope
from lora_tune.controller.pruning import judge_curve
from lora_tune.curves.stopping import verdict
from lora_tune.logs.run import Eval, RunLog
from lora_tune.mlperf.convergence import published
from lora_tune.review.stopping import stopping_account
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

SWEEPS, TRIALS, GOOD_SHARE = 8, 40, 0.6
RATES = (0.01, 0.05)
BATCH = 8
SLOWER = (1.05, 1.1, 1.15, 1.2, 1.3, 1.6)
STUDY = """
[workload]
kind = "command"
argv = ["python", "train.py"]
[site]
system = "H100"
[space]
LR = { type = "float", low = 1e-4, high = 1e-3, log = true }
[objective]
target = 0.925
curves = "llama2_70b_lora"
[budget]
trials = 40
[pruning]
cap = false
audit = 0.0
"""

Run = Sequence[Eval]
Judge = Callable[[Study, StudyRecords, Trial, RunLog], bool]


@dataclass(frozen=True, slots=True)
class Played:
    """One sweep. good, bad: whether each such run was stopped; said: the rate stated while each good one trained, 0
    where none was compared; given_up: whether a good run contradicted the public ones."""

    good: Sequence[bool]
    bad: Sequence[bool]
    said: Sequence[float]
    given_up: bool


def main() -> None:
    """Print the table."""
    groups = {s: g for s, g in by_submission(load()).items() if g[0].gbs == BATCH}
    ours = [[r.run.evals for r in g] for s, g in groups.items() if is_test(s) and is_good(g)]
    calibration = [g for s, g in groups.items() if not is_test(s) and is_good(g)]
    bad = _bad_runs(real_noise(published(BATCH).family, calibration))
    everybody = [run for group in ours for run in group]
    machines: dict[str, Sequence[Sequence[Run]]] = {
        "right, runs of all submissions": [everybody],
        "right, runs of one submission": ours,
        **{f"wrong, {s} times the samples": [[slower(run, s) for run in everybody]] for s in SLOWER},
        "wrong, FP4 said to be FP8": [[r.run.evals for s in HEALING for r in groups[s]]],
    }
    print(f"\n{SWEEPS} sweeps of {TRIALS} trials a row")
    print("| public runs | stated | said | good stopped (90%) | bad caught | given up | believed to the end |")
    print("|---|---|---|---|---|---|---|")
    for name, pools in machines.items():
        for rate in RATES:
            study = parse_study(STUDY, Path("belief.toml")).with_options({"pruning": {"false_prune_rate": rate}})
            found, blind = (
                [play(study, pools[seed % len(pools)], bad, seed, judge) for seed in range(SWEEPS)]
                for judge in (as_shipped, to_the_end)
            )
            said = np.mean([s for one in found for s in one.said])
            caught = np.mean([stopped for one in found for stopped in one.bad])
            given_up = np.mean([one.given_up for one in found])
            print(
                f"| {name} | {rate:.0%} | {said:.1%} | {_share(found)} | {caught:.0%} | {given_up:.0%} | "
                f"{_share(blind)} |",
                flush=True,
            )


def _share(found: Sequence[Played]) -> str:
    """The share of good runs stopped, with a bootstrap interval over sweeps, whose runs share a history."""
    counts = np.array([(sum(one.good), len(one.good)) for one in found])
    drawn = counts[np.random.default_rng(0).integers(len(counts), size=(1000, len(counts)))].sum(axis=1)
    low, high = np.quantile(drawn[:, 0] / drawn[:, 1], (0.05, 0.95))
    return f"{counts[:, 0].sum() / counts[:, 1].sum():.1%} ({low:.1%} to {high:.1%})"


def slower(run: Run, times: float) -> Run:
    """The run with each eval after so many times the samples."""
    return [Eval(e.samples * times, e.loss, e.seconds) for e in run]


def _bad_runs(noise: np.ndarray) -> Sequence[Run]:
    return [
        run
        for seed, shape in enumerate(perturbed.BAD.values())
        for run in perturbed.never_reach(perturbed.simulate(shape, noise, 60, seed))
    ]


def play(study: Study, good: Sequence[Run], bad: Sequence[Run], seed: int, judge: Judge) -> Played:
    """One sweep, trials one after another; what is stopped ends there for the trials after it."""
    rng = np.random.default_rng(seed)
    sweep = StudyRecords(name=study.name, digest=study.digest, study_toml="", began_at=0.0)
    stops: dict[bool, list[bool]] = {True: [], False: []}
    said: list[float] = []
    for number in range(TRIALS):
        is_good_run = bool(rng.random() < GOOD_SHARE)
        pool = good if is_good_run else bad
        run = pool[int(rng.integers(len(pool)))]
        if is_good_run:
            account = stopping_account(study, sweep, float(number))
            said.append((account.kept if account else None) or 0.0)
        trial = _running(number)
        seen = stopped_at(study, replace(sweep, trials={**sweep.trials, number: trial}), trial, run, judge)
        stops[is_good_run].append(seen is not None)
        sweep = ended(sweep, trial, run[:seen], stopped=seen is not None)
    return Played(stops[True], stops[False], said, contradiction(study, sweep) is not None)


def stopped_at(study: Study, sweep: StudyRecords, trial: Trial, run: Run, judge: Judge) -> int | None:
    """How many evals the run had when it was stopped; None: it came to its end."""
    shown = (RunLog(run_start_ms=0, evals=tuple(run[: n + 1])) for n in range(len(run)))
    return next((n + 1 for n, log in enumerate(shown) if judge(study, sweep, trial, log)), None)


def as_shipped(study: Study, sweep: StudyRecords, trial: Trial, log: RunLog) -> bool:
    """The driver's own answer."""
    return judge_curve(study, sweep, trial, log) is not None


def to_the_end(study: Study, sweep: StudyRecords, trial: Trial, log: RunLog) -> bool:
    """The rule without a doubt of the public runs, and without a start that goes free."""
    public = public_envelope(study, trial)
    known = replace(applicable(study, sweep, trial, log).evidence, published=public, published_from=0.0, shown=())
    return verdict(log.evals, TARGET, known, length=perturbed.MAX_SAMPLES).stop


def _running(number: int) -> Trial:
    steps = int(perturbed.MAX_SAMPLES / BATCH * max(SLOWER))
    values = {"LR": 4e-4, "GBS": BATCH, "MAX_STEPS": steps}
    known = TrialMetrics(precision="FP8")
    return Trial(number=number, seed=number, tuned={"LR": 4e-4}, parameters=values, metrics=known, proposed_at=number)


def ended(sweep: StudyRecords, trial: Trial, run: Run, *, stopped: bool) -> StudyRecords:
    """The records after the trial, which takes half of a second."""
    reached = not stopped and run[-1].loss <= TARGET
    how = Verdict.PRUNED if stopped else Verdict.REACHED if reached else Verdict.CENSORED
    number, at = trial.number, trial.proposed_at + 0.5
    done = replace(
        trial, state=TrialState.FINISHED, verdict=how, finished_at=at, seconds=0.5 if reached else None,
        samples=run[-1].samples if reached else None,
    )  # fmt: skip
    attempt = Attempt(trial=number, number=0, job_name=f"trial {number}", folder="")
    return replace(
        sweep, trials={**sweep.trials, number: done}, attempts={**sweep.attempts, (number, 0): attempt},
        evals={**sweep.evals, (number, 0): tuple(run)},
    )  # fmt: skip
