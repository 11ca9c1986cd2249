"""Public FP4 runs as trials of a sweep, in front of the driver's own ``judge_curve``: how many good ones it stops.

The 20 runs of the two submissions whose logs or configs say FP4 with a healing step; all reach the target. Each is the
next trial of a sweep with the records as they were then. Said: nothing (of any trial); FP4 and the step (FP8 of the
others); or FP8, which is wrong. Good ones in FP8 are public runs at GBS 8 that the envelope was not calibrated on, at
the pace that the FP4 run's machine has in FP8: a sweep runs on one machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import PublicRun, by_submission, is_test, load
from benchmarks.stopping.belief import BATCH, STUDY, ended, stopped_at
from benchmarks.stopping.envelope import EARLY, HEALING, HEALING_STEPS, RATES, never_healing
from lora_tune.config.study import Study, parse_study
from lora_tune.controller import healing
from lora_tune.controller.policy import Stop
from lora_tune.controller.pruning import judge_curve
from lora_tune.curves.comparison import FEWEST, supported
from lora_tune.logs.run import Eval, RunLog
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StopKind, StudyRecords, Trial

FP4_FASTER = 1.22
"""Times as many samples/s in FP4 as in FP8: eight B200 or GB200 have 6.1 to 6.2 and 7.5 in v5.1."""

FEW, MANY = 8, 20
"""Good runs of a sweep, and of a longer one."""
SAID: Mapping[str, tuple[TrialMetrics, TrialMetrics]] = {
    "nothing": (TrialMetrics(), TrialMetrics()),
    "FP4 and the step": (TrialMetrics(precision="fp4", healing_steps=HEALING_STEPS), TrialMetrics(precision="fp8")),
    "FP8": (TrialMetrics(precision="fp8"), TrialMetrics(precision="fp8")),
}
"""What is said of the FP4 runs, and of the others."""


def main() -> None:
    """Print the table."""
    groups = by_submission(load())
    others = [r for s, g in groups.items() if g[0].gbs == BATCH and is_test(s) and is_good(g) for r in g]
    winners = [r for s in HEALING for r in groups[s]]
    print(
        f"\n{len(winners)} FP4 runs that heal, asked after each eval; never healing: stopped by {EARLY:.0%} of the end"
    )
    print("| curves | ended before | said | stopped at 1% | 5% | 10% | never healing at 1% |")
    print("|---|---|---|---|---|---|---|")
    for curves, before, words in itertools.product(("llama2_70b_lora", "own"), HISTORIES, SAID):
        shares = [_shares(_study(curves, rate), before, words, others, winners) for rate in RATES]
        cells = " | ".join(f"{stopped:.0%}" for stopped, _ in shares)
        print(f"| {curves} | {before} | {words} | {cells} | {shares[0][1]:.0%} |", flush=True)
    print("\n| said | winners capped beside eight FP8 leaders that need as long |")
    print("|---|---|")
    for words in SAID:
        capped = [_capped(words, run, i, others) for i, run in enumerate(winners)]
        print(f"| {words} | {sum(capped)} of {len(capped)} |", flush=True)
    print(f"{FEWEST} references of its own support {', '.join(f'{supported(r, FEWEST):.1%}' for r in RATES)}")


def _study(curves: str, rate: float) -> Study:
    study = parse_study(STUDY, Path("fp4.toml"))
    return study.with_options({"pruning": {"false_prune_rate": rate}, "objective": {"curves": curves}})


HISTORIES: Mapping[str, tuple[int, int]] = {
    "three bad": (0, 0), f"{FEW} good in FP8": (FEW, 0), f"{MANY} good in FP8": (MANY, 0),
    f"{FEW} good in FP8, one like it": (FEW, 1), f"{FEW} good like it": (0, FEW),
}  # fmt: skip
"""Good runs that ended before: in FP8, and of the same submission as the one that is judged."""


def _shares(
    study: Study, before: str, said: str, others: Sequence[PublicRun], winners: Sequence[PublicRun]
) -> tuple[float, float]:
    rows = [_judged(study, before, said, run, i, others, winners) for i, run in enumerate(winners)]
    good, never = np.mean(rows, axis=0)
    return float(good), float(never)


def _judged(
    study: Study, before: str, said: str, run: PublicRun, seed: int, others: Sequence[PublicRun],
    winners: Sequence[PublicRun],
) -> tuple[bool, bool]:  # fmt: skip
    """Whether the run is stopped, and whether it would be by 60% of its end without its fall."""
    rng = np.random.default_rng(seed)
    in_fp8, alike = HISTORIES[before]
    own = [r for r in winners if r.submission == run.submission and r is not run]
    known, of_others = SAID[said]
    sweep = StudyRecords(name=study.name, digest=study.digest, study_toml="", began_at=0.0)
    for evals in _bad(3):
        sweep = _after(sweep, evals, run.max_steps, of_others)
    for other in (others[i] for i in rng.permutation(len(others))[:in_fp8]):
        sweep = _after(sweep, _in_fp8(other, run), run.max_steps, of_others)
    for like in (own[i] for i in rng.permutation(len(own))[:alike]):
        sweep = _after(sweep, like.run.evals, run.max_steps, known)
    trial = _trial(sweep, run.max_steps, known)
    good, never = (_stop(study, sweep, trial, evals) for evals in (run.run.evals, never_healing(run)))
    return good is not None, never is not None and never <= EARLY * run.max_steps * run.gbs


def _capped(said: str, run: PublicRun, seed: int, others: Sequence[PublicRun]) -> bool:
    """Whether the cap ends the run after any of its evals, though it comes to the target as soon as the leaders did."""
    study = _study("llama2_70b_lora", RATES[0]).with_options({"pruning": {"cap": True}})
    known, of_others = SAID[said]
    stop = next(e for e in run.run.evals if e.loss <= study.target)
    sweep = StudyRecords(name=study.name, digest=study.digest, study_toml="", began_at=0.0)
    for place, i in enumerate(np.random.default_rng(seed).permutation(len(others))[:FEW]):
        seconds = stop.seconds * (1 + 0.002 * place)
        sweep = _after(sweep, _in_seconds(others[i], seconds), run.max_steps, of_others)
        leader = sweep.trials[len(sweep.trials) - 1]
        timed = replace(leader, seconds=seconds, metrics=replace(leader.metrics, objective=seconds))
        sweep = replace(sweep, trials={**sweep.trials, timed.number: timed})
    trial = _trial(sweep, run.max_steps, known)
    now = replace(sweep, trials={**sweep.trials, trial.number: trial})
    return any(_ends(study, now, trial, run, count) for count in range(1, run.run.evals.index(stop) + 1))


def _ends(study: Study, sweep: StudyRecords, trial: Trial, run: PublicRun, count: int) -> bool:
    """Whether the driver stops the run as it is after ``count`` evals."""
    evals = run.run.evals[:count]
    log = RunLog(
        run_start_ms=0, last_ms=int(1000 * evals[-1].seconds), evals=evals,
        throughput=run.run.throughput[:count], eval_seconds=run.run.eval_seconds[:count],
    )  # fmt: skip
    judged = judge_curve(study, sweep, trial, log)
    return isinstance(judged, Stop) and judged.kind is StopKind.CAPPED


def _in_fp8(other: PublicRun, run: PublicRun) -> Sequence[Eval]:
    """The evals of an FP8 run as the machine of an FP4 one would have made them."""
    first = run.run.evals[0]
    return [e._replace(seconds=e.samples / first.samples * first.seconds * FP4_FASTER) for e in other.run.evals]


def _in_seconds(other: PublicRun, seconds: float) -> Sequence[Eval]:
    """The evals of a run that comes to its end after so many seconds."""
    return [e._replace(seconds=e.samples / other.stop * seconds) for e in other.run.evals]


def _bad(count: int) -> Iterator[Sequence[Eval]]:
    """Runs that stay where they began."""
    for _ in range(count):
        yield [Eval(s, 1.2, s) for s in np.arange(1536.0, 5000.0, 384.0).tolist()]


def _trial(sweep: StudyRecords, steps: int, said: TrialMetrics) -> Trial:
    number = len(sweep.trials)
    values = {"LR": 4e-4, "GBS": BATCH, "MAX_STEPS": steps}
    return Trial(number=number, seed=number, tuned={"LR": 4e-4}, parameters=values, metrics=said, proposed_at=number)


def _after(sweep: StudyRecords, run: Sequence[Eval], steps: int, said: TrialMetrics) -> StudyRecords:
    """The records after one more run has ended, with what the driver keeps of its precision."""
    trial = _trial(sweep, steps, said)
    change = healing.healing_samples(trial, RunLog(evals=tuple(run)), sweep)
    kept = replace(trial.metrics, healing_samples=change or None)
    return ended(sweep, replace(trial, metrics=kept), run, stopped=False)


def _stop(study: Study, sweep: StudyRecords, trial: Trial, run: Sequence[Eval]) -> float | None:
    """Samples at which the driver stops the run."""
    now = replace(sweep, trials={**sweep.trials, trial.number: trial})
    count = stopped_at(study, now, trial, run, lambda *asked: judge_curve(*asked) is not None)
    return None if count is None else run[count - 1].samples
