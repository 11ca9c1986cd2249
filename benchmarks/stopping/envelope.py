"""The published envelope on public runs of submissions that it was not calibrated on, and on FP4 runs.

FP4 are the runs of the two submissions of v5.1's half whose logs or configs say so; they heal at step 350. Late are two
others, of one site with CP 4 and 8: no log or config of theirs says FP4, they need 29% more samples than others, but
they come. Undeclared: nothing states the precision, so the envelope is silent until public FP4 runs have healed. Bad:
other submissions that needed more than 1.2 times the reference's samples, though they reached the target, and simulated
runs that never do. Never healing: FP4 runs with the level of their last eval before it up to the end of training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.calibrate_curves import is_good
from benchmarks.public_runs import TARGET, PublicRun, by_submission, is_test, load
from benchmarks.statistics import perturbed
from benchmarks.statistics.crossing import real_noise
from lora_tune.controller.evidence import EVALS_TO_HEAL, HEALED
from lora_tune.curves.published import PUBLISHED_STEP
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf.convergence import published

RATES = (0.01, 0.05, 0.1)
EARLY = 0.6
HEALING = ("v5.1/NVIDIA/tyche_ngpu8_ngc25.09_nemo", "v5.1/Nebius/nebius_b200_n2")
LATE = ("v5.1/University-of-Florida/hpg.dgxb200x8.n4", "v5.1/University-of-Florida/hpg.dgxb200x8.n8")
HEALING_STEPS = 350
HEALING_SAMPLES = HEALING_STEPS * 8.0
Height = Callable[[PublicRun], float]
"""How bad a run looks by its first eval after the change."""
NEVER = 60
"""Simulated runs of each shape that never reaches the target."""


def main() -> None:
    """Print the table."""
    test = [r for r in load() if is_test(r.submission) or r.submission in HEALING]
    rounds = {
        "v4.0 to v5.0": [r for r in test if not r.submission.startswith("v5.1")],
        "v5.1": [r for r in test if r.submission.startswith("v5.1")],
    }
    print("\n| runs | precision | stated 1% | 5% | 10% |\n|---|---|---|---|---|")
    for name, runs in rounds.items():
        groups = by_submission(runs).values()
        kinds = {
            "FP4": [r for r in runs if r.submission in HEALING],
            "late": [r for r in runs if r.submission in LATE],
            "good": [r for g in groups if is_good(g) for r in g],
            "bad submissions": [r for g in groups if not is_good(g) for r in g if r.submission not in HEALING + LATE],
        }
        for kind, some in kinds.items():
            for words, begin in (("declared one", 0.0), ("undeclared", HEALED)):
                if some:
                    shares = [
                        np.mean([stopped(r, r.run.evals, rate, begin) is not None for r in some]) for rate in RATES
                    ]
                    cells = " | ".join(f"{share:.2%}" for share in shares)
                    print(f"| {name}: {kind}, {len(some)} | {words} | {cells} |", flush=True)
    _never_reach()
    _never_heal([r for r in load() if r.submission in HEALING])
    _by_one_eval([r for r in load() if r.submission in HEALING])


def _never_reach() -> None:
    """Runs with a bad learning rate, stalled or diverging, with the noise of real ones."""
    good = [r for s, g in by_submission(load()).items() if g[0].gbs == 8 and is_good(g) and not is_test(s) for r in g]
    noise = real_noise(published(8).family, [good])
    runs = [
        run
        for seed, shape in enumerate(perturbed.BAD.values())
        for run in perturbed.never_reach(perturbed.simulate(shape, noise, NEVER, seed))
    ]
    for words, begin in (("declared one", 0.0), ("undeclared", HEALED)):
        stops = [[judged(run, 8, perturbed.MAX_SAMPLES, rate, begin) or np.inf for run in runs] for rate in RATES]
        cells = " | ".join(f"{np.mean(np.array(at) <= EARLY * perturbed.MAX_SAMPLES):.2%}" for at in stops)
        print(f"| never reach it, {len(runs)}: stopped by {EARLY:.0%} of the end | {words} | {cells} |", flush=True)


def _never_heal(runs: Sequence[PublicRun]) -> None:
    for words, begin in (("undeclared", HEALED), ("declared", None)):
        for steps in sorted({r.max_steps for r in runs}):
            some = [r for r in runs if r.max_steps == steps]
            at = [(stopped(r, never_healing(r), 0.01, begin) or np.inf) / _end(r) for r in some]
            print(
                f"| FP4 that never heals, {steps} steps, {len(some)}: by {EARLY:.0%} of the end; median | {words} | "
                f"{np.mean(np.array(at) <= EARLY):.0%}, {np.median(at):.0%} | | |"
            )


def _by_one_eval(runs: Sequence[PublicRun]) -> None:
    """What the first eval after the change tells, the only one there is by 60% of 700 steps.

    By the fall from the eval before the change, or by the loss there. A limit that lets all of n runs pass supports
    1 / (n + 1).
    """
    kinds: tuple[tuple[str, Height, Height], ...] = (
        ("by the fall", lambda r: _after(r) - _before(r), lambda _: 0.0),
        ("by the loss", _after, _before),
    )
    for words, height, never in kinds:
        caught = np.mean([never(r) > max(map(height, runs)) for r in runs])
        stopped_of = [
            sum(height(r) > max(height(o) for o in runs if o.submission != name) for r in runs if r.submission == name)
            for name in dict.fromkeys(r.submission for r in runs)
        ]
        print(
            f"| one eval after the change: limit of {len(runs)} good ones ({1 / (len(runs) + 1):.1%} supported): "
            f"never healing caught; good stopped of each submission by the limit of the others | {words} | "
            f"{caught:.0%}; {', '.join(map(str, stopped_of))} | | |"
        )


def _before(run: PublicRun) -> float:
    return [e.loss for e in run.run.evals if e.samples < HEALING_SAMPLES][-1]


def _after(run: PublicRun) -> float:
    return next(e.loss for e in run.run.evals if e.samples > HEALING_SAMPLES)


def never_healing(run: PublicRun) -> list[Eval]:
    """The run without its fall, evals going on to the end of training."""
    before = [e for e in run.run.evals if e.samples < HEALING_SAMPLES]
    step = run.run.evals[1].samples - run.run.evals[0].samples
    later = np.arange(before[-1].samples + step, _end(run), step)
    return [*before, *(Eval(float(s), before[-1].loss, float(s)) for s in later)]


def stopped(run: PublicRun, evals: Sequence[Eval], rate: float, begin: float | None) -> float | None:
    """Samples at which the envelope stops a run of this one's batch and length. begin: see ``judged``."""
    return judged(evals, run.gbs, _end(run), rate, begin)


def judged(evals: Sequence[Eval], gbs: float, length: float, rate: float, begin: float | None) -> float | None:
    """Samples at which the envelope stops a run.

    begin: where it begins to judge, over the median samples to target; None: after a stated change of precision.
    """
    envelope = published(gbs)
    if envelope is None:
        return None
    healed = HEALING_SAMPLES + EVALS_TO_HEAL * PUBLISHED_STEP
    start = healed if begin is None else begin * float(np.exp(envelope.family.log_samples[-1]))
    evidence = Evidence(published=envelope, rate=rate, published_from=start)
    return _stop(evals, evidence, length)


def _stop(evals: Sequence[Eval], evidence: Evidence, length: float) -> float | None:
    """Samples at which a run is stopped, asked after each eval."""
    stops = (e.samples for i, e in enumerate(evals) if verdict(evals[: i + 1], TARGET, evidence, length=length).stop)
    return next(stops, None)


def _end(run: PublicRun) -> float:
    return float(run.max_steps * run.gbs)
