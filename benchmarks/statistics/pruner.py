"""The stall pruner and Optuna's pruners on the same curves: good runs killed, bad runs caught, and how early."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import optuna

from benchmarks.calibrate_curves import calibrate, is_good
from benchmarks.public_runs import TARGET, PublicRun, by_submission, fold, is_test, load
from benchmarks.statistics import perturbed, tiny
from benchmarks.statistics.crossing import FOLDS, real_noise
from lora_tune import curves
from lora_tune.logs.mllog import Eval
from lora_tune.mlperf import published_curves
from lora_tune.mlperf.published_curves import envelope
from lora_tune.search.pruner import StallPruner

SIMULATED = 250
EARLY = 0.6
REFERENCES = 60
Stops = Callable[[Sequence[Eval]], int | None]
"""A rule applied to a whole run: the index of the eval after which it stops the run, None when it never does."""


@dataclass(frozen=True)
class Material:
    """good: test runs at GBS 8. perturbed: by kind, simulated runs that never reach the target. healing: FP4 runs."""

    good: list[Sequence[Eval]]
    perturbed: dict[str, list[list[Eval]]]
    healing: list[list[Eval]]


def main() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")  # experimental pruners, and their words on every NaN
    runs = load()
    groups = by_submission(runs)
    held_out(groups)
    cross_fitted(runs, groups)
    at_8 = [g for s, g in groups.items() if g[0].gbs == 8 and is_good(g)]
    noise = real_noise(published_curves.published(8).family, [g for g in at_8 if not is_test(g[0].submission)])
    kinds = {
        name: perturbed.never_reach(perturbed.simulate(shape, noise, SIMULATED, seed))
        for seed, (name, shape) in enumerate(perturbed.BAD.items())
    }
    material = Material(
        good=[r.run.evals for g in at_8 if is_test(g[0].submission) for r in g],
        perturbed=kinds,
        healing=perturbed.simulate(perturbed.healing, noise, 100, 99),
    )
    references = [r.run.evals for g in at_8 if not is_test(g[0].submission) for r in g][::7][:REFERENCES]
    table(material, references)
    tiny.main()


def first_stop(evals: Sequence[Eval], stop: Callable[[Sequence[Eval]], bool]) -> int | None:
    """The first eval, short of one that reaches the target, after which ``stop`` says so."""
    for i, e in enumerate(evals):
        if e.loss <= TARGET:
            return None
        if stop(evals[: i + 1]):
            return i
    return None


def by_verdict(
    reference: curves.Envelope | None, rate: float = 0.01, healing: float = 0.0, end: float = perturbed.MAX_SAMPLES
) -> Stops:
    def stop(evals: Sequence[Eval]) -> bool:
        found = curves.stalled(
            evals, TARGET, reference=reference, false_prune_rate=rate, healing_samples=healing,
            max_samples=end,
        )  # fmt: skip
        return found.stop

    return lambda evals: first_stop(evals, stop)


def on_public(reference: curves.Envelope | None, rate: float, run: PublicRun) -> int | None:
    return by_verdict(reference, rate, end=float(run.max_steps * run.gbs))(run.run.evals)


def held_out(groups: dict[str, list[PublicRun]]) -> None:
    """The shipped envelope on test submissions."""
    test = [g for s, g in groups.items() if is_test(s)]
    good = [r for g in test if is_good(g) for r in g]
    bad = [r for g in test if not is_good(g) for r in g]
    print(
        "Shipped envelope, test half. Bad: submissions that need more than 1.2 times the reference convergence point."
    )
    print(f"{'stated rate':>11} {'good runs':>9} {'killed':>13} {'bad runs':>8} {'at first pair':>13} {'ever':>6}")
    for rate in (0.005, 0.01, 0.02, 0.05, 0.1):
        kills = [on_public(published_curves.published(r.gbs), rate, r) is not None for r in good]
        caught = [on_public(published_curves.published(r.gbs), rate, r) for r in bad]
        print(_rates(rate, kills, caught, bad))


def _rates(rate: float, kills: list[bool], caught: list[int | None], bad: list[PublicRun]) -> str:
    first = [c is not None and c <= first_pair(r) for c, r in zip(caught, bad, strict=True)]
    ever = np.mean([c is not None for c in caught])
    killed = f"{sum(kills)} = {np.mean(kills):.2%}"
    return f"{rate:11.1%} {len(kills):9} {killed:>13} {len(bad):8} {np.mean(first):13.0%} {ever:6.0%}"


def first_pair(run: PublicRun) -> int:
    """The index of the second eval that the envelope looks at: the first opportunity."""
    start = math.exp(published_curves.published(run.gbs).family.log_samples[0])
    return sum(e.samples < 0.999 * start for e in run.run.evals) + 1


def cross_fitted(runs: Sequence[PublicRun], groups: dict[str, list[PublicRun]]) -> None:
    """Every public run against an envelope whose calibration did not see its submission."""
    folds = [calibrate([r for r in runs if fold(r.submission, FOLDS) != k]) for k in range(FOLDS)]
    print(f"\nAll public runs, by {FOLDS} calibrations that did not see them:")
    good = [r for g in groups.values() if is_good(g) for r in g]
    bad = [r for g in groups.values() if not is_good(g) for r in g]
    for rate in (0.005, 0.01, 0.02, 0.05, 0.1):
        kills = [on_public(envelope(folds[fold(r.submission, FOLDS)], r.gbs), rate, r) is not None for r in good]
        caught = [on_public(envelope(folds[fold(r.submission, FOLDS)], r.gbs), rate, r) for r in bad]
        print(_rates(rate, kills, caught, bad))


def table(material: Material, references: Sequence[Sequence[Eval]]) -> None:
    """All pruners on the same GBS 8 curves."""
    kinds = list(material.perturbed)
    print(
        f"\nGBS 8. Good: {len(material.good)} test runs. Perturbed runs that never reach the target by 8,192 samples: "
    )
    print(
        "  "
        + ", ".join(f"{k} {len(v)}" for k, v in material.perturbed.items())
        + f". FP4 healing: {len(material.healing)}."
    )
    print(
        f"Optuna's pruners saw {len(references)} calibration runs first. Share stopped before {EARLY:.0%} of the end."
    )
    print(f"{'pruner':52} {'good':>6} {'FP4':>5} | " + " ".join(f"{k:>11}" for k in kinds) + f" {'all':>7}")
    for name, rule, healed in rules(references):
        killed = np.mean([rule(e) is not None for e in material.good])
        fp4 = np.mean([healed(e) is not None for e in material.healing])
        early = {k: [_early(rule, e) for e in v] for k, v in material.perturbed.items()}
        cells = " ".join(f"{np.mean(early[k]):11.1%}" for k in kinds)
        everything = np.mean([x for v in early.values() for x in v])
        print(f"{name:52} {killed:6.1%} {fp4:5.0%} | {cells} {everything:7.1%}")


def _early(rule: Stops, evals: Sequence[Eval]) -> bool:
    at = rule(evals)
    return at is not None and evals[at].samples < EARLY * perturbed.MAX_SAMPLES


def rules(references: Sequence[Sequence[Eval]]) -> list[tuple[str, Stops, Stops]]:
    """Name, rule, and the rule with the healing step declared (the same where a pruner cannot be told)."""
    step = perturbed.HEALING_SAMPLES
    published = published_curves.published(8)
    learned = curves.envelope_from(references[:12], TARGET)
    rows: list[tuple[str, Stops, Stops]] = [
        ("stall, published envelope, 1%", by_verdict(published), by_verdict(published, healing=step)),
        ("stall, published envelope, 5%", by_verdict(published, 0.05), by_verdict(published, 0.05, step)),
        ("stall, learned from 12 runs, 1%", by_verdict(learned), by_verdict(learned, healing=step)),
        ("stall, no reference, end of training known", by_verdict(None), by_verdict(None, healing=step)),
    ]
    own = in_study(StallPruner(TARGET), references)
    declared = in_study(StallPruner(TARGET, healing_step=step, max_steps=perturbed.MAX_SAMPLES), references)
    rows.append(("StallPruner in an Optuna study", own, declared))
    others: dict[str, Callable[[], optuna.pruners.BasePruner]] = {
        "MedianPruner()": lambda: optuna.pruners.MedianPruner(),
        "MedianPruner(n_warmup_steps=2000, n_min_trials=5)": lambda: optuna.pruners.MedianPruner(
            5, 2000, n_min_trials=5
        ),
        "PercentilePruner(75, n_warmup_steps=2000)": lambda: optuna.pruners.PercentilePruner(75.0, 5, 2000),
        "PatientPruner(None, patience=2)": lambda: optuna.pruners.PatientPruner(None, patience=2),
        "PatientPruner(MedianPruner(), patience=2)": lambda: optuna.pruners.PatientPruner(
            optuna.pruners.MedianPruner(), 2
        ),
        "WilcoxonPruner(p_threshold=0.1)": lambda: optuna.pruners.WilcoxonPruner(p_threshold=0.1),
        "HyperbandPruner(1536, 8192)": lambda: optuna.pruners.HyperbandPruner(1536, 8192, 3),
    }
    for name, make in others.items():
        rule = in_study(make(), references)
        rows.append((name, rule, rule))
    return rows


def in_study(pruner: optuna.pruners.BasePruner, references: Sequence[Sequence[Eval]]) -> Stops:
    """A pruner in a study that has run ``references``; each run asked about is told as failed, to leave no trace."""
    study = optuna.create_study(pruner=pruner, study_name="pruners")
    for evals in references:
        trial = study.ask()
        for e in evals:
            trial.report(e.loss, int(e.samples))
        study.tell(trial, evals[-1].samples)

    def rule(evals: Sequence[Eval]) -> int | None:
        trial = study.ask()
        try:
            for i, e in enumerate(evals):
                if e.loss <= TARGET:
                    return None
                trial.report(e.loss, int(e.samples))
                if trial.should_prune():
                    return i
            return None
        finally:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)

    return rule
