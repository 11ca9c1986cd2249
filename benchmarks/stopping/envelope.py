"""The published envelope on public runs of submissions that it was not calibrated on, and on FP4 runs.

A run of v5.1 counts as FP4 when its loss lies above 0.945 at 2,000 samples or later: runs of one precision are below
0.94 by then. Undeclared: nothing states the precision, so the envelope is silent until public FP4 runs have healed.
Never healing: FP4 runs that keep the level of their last eval before the fall up to the end of training.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import TARGET, PublicRun, by_submission, is_test, load
from lora_tune.controller.evidence import HEALED
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf.published_curves import published

RATES = (0.01, 0.05, 0.1)
EARLY = 0.6
HEALS_BELOW = 0.945


def main() -> None:
    """Print the table."""
    test = [r for r in load() if is_test(r.submission) or is_fp4(r)]
    rounds = {
        "v4.0 to v5.0": [r for r in test if not r.submission.startswith("v5.1")],
        "v5.1": [r for r in test if r.submission.startswith("v5.1")],
    }
    print("\n| runs | precision | stated 1% | 5% | 10% |\n|---|---|---|---|---|")
    for name, runs in rounds.items():
        groups = by_submission(runs).values()
        kinds = {
            "FP4": [r for r in runs if is_fp4(r)],
            "good": [r for g in groups if is_good(g) for r in g if not is_fp4(r)],
            "bad submissions": [r for g in groups if not is_good(g) for r in g if not is_fp4(r)],
        }
        for kind, some in kinds.items():
            for words, begin in (("declared one", 0.0), ("undeclared", HEALED)):
                if some:
                    shares = [
                        np.mean([stopped(r, r.run.evals, rate, begin) is not None for r in some]) for rate in RATES
                    ]
                    cells = " | ".join(f"{share:.2%}" for share in shares)
                    print(f"| {name}: {kind}, {len(some)} | {words} | {cells} |", flush=True)
    never = [(r, never_healing(r)) for r in load() if is_fp4(r)]
    early = np.mean([(at := stopped(r, e, 0.01, HEALED)) is not None and at <= EARLY * _end(r) for r, e in never])
    print(f"| FP4 that never heals, {len(never)}: stopped by {EARLY:.0%} of the end | undeclared | {early:.0%} | | |")


def is_fp4(run: PublicRun) -> bool:
    """Whether a run of v5.1 at GBS 8 shows the level of public FP4 runs before they heal."""
    return (
        run.gbs == 8
        and run.submission.startswith("v5.1")
        and any(e.loss > HEALS_BELOW and e.samples >= 2000 for e in run.run.evals)
    )


def never_healing(run: PublicRun) -> list[Eval]:
    """The run without its fall, evals going on to the end of training."""
    before = [e for e in run.run.evals if e.loss > HEALS_BELOW]
    step = run.run.evals[1].samples - run.run.evals[0].samples
    later = np.arange(before[-1].samples + step, _end(run), step)
    return [*before, *(Eval(float(s), before[-1].loss, float(s)) for s in later)]


def stopped(run: PublicRun, evals: Sequence[Eval], rate: float, begin: float) -> float | None:
    """Samples at which the envelope stops a run. begin: where it begins to judge, over the median samples to target."""
    envelope = published(run.gbs)
    if envelope is None:
        return None
    start = begin * float(np.exp(envelope.family.log_samples[-1]))
    evidence = Evidence(published=envelope, rate=rate, published_from=start)
    stops = (e.samples for i, e in enumerate(evals) if verdict(evals[: i + 1], TARGET, evidence, length=_end(run)).stop)
    return next(stops, None)


def _end(run: PublicRun) -> float:
    return float(run.max_steps * run.gbs)
