"""First sweeps, which know no good run yet: what StallPruner and Optuna's own pruners stop, in plain Optuna.

Each sweep draws whole runs from a pool, in random order, and shows them to each pruner one after another, at the same
places of training; what is pruned ends there for the trials after it, and a run ends at the target. Bad runs never
reach it. A run would have become the best if, had it gone on, it had reached the target in less training than every
run before it, or while none of them had, come lower. Risk: the share of these that was pruned, with a 90% interval, of
those that a pruner may judge at all (the fifth trial and later). Kept: sweeps whose best run was not pruned.
Pools: recorded trials, public runs, synthetic shapes, and the curves of AlgoPerf's submissions by workload, from a
checkout of mlcommons/submissions_algorithms (``LORA_TUNE_ALGOPERF``).
"""

from __future__ import annotations

import csv
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.pruners import (
    BasePruner,
    HyperbandPruner,
    MedianPruner,
    PatientPruner,
    SuccessiveHalvingPruner,
    WilcoxonPruner,
)
from scipy.special import betaincinv

from benchmarks.public_runs import folder
from benchmarks.stopping.shapes import all_shapes
from benchmarks.stopping.tables import Table, published, recorded, table, whole
from lora_tune.curves.comparison import FEWEST, ComparedRun, supported
from lora_tune.search.pruner import StallPruner

TRIALS, SWEEPS, PLACES = 40, 4, 24
JUDGED = FEWEST + 1
"""Trials before which our rule judges none."""

FIRST = 1e6
"""By how much any run that reaches the target is better than all that do not."""

FEWEST_EVALS = 8
"""Of a public run that is used."""

WORKLOADS: Mapping[str, tuple[str, int, float]] = {
    "criteo1tb": ("validation/loss", 1, 0.123735),
    "fastmri": ("validation/ssim", -1, 0.723653),
    "imagenet_resnet": ("validation/accuracy", -1, 0.77431),
    "imagenet_vit": ("validation/accuracy", -1, 0.77309),
    "librispeech_conformer": ("validation/wer", 1, 0.085884),
    "librispeech_deepspeech": ("validation/wer", 1, 0.119936),
    "ogbg": ("validation/mean_average_precision", -1, 0.28098),
    "wmt": ("validation/bleu", -1, 30.8491),
}
"""AlgoPerf's workloads: the column that its targets are of, 1 where lower is better, and the target."""


@dataclass(frozen=True, slots=True)
class Swept:
    """One sweep. bad, best: whether each bad run, and each that would have become the best, was pruned. used: share of
    all evals. kept: the best run was not pruned."""

    bad: Sequence[bool]
    best: Sequence[bool]
    used: float
    kept: bool


def pruners(target: float) -> dict[str, Callable[[], BasePruner]]:
    """Ours and the field's, as somebody would write them down."""
    return {
        "StallPruner": lambda: StallPruner(target, max_steps=PLACES),
        "StallPruner, 8 references": lambda: StallPruner(target, max_steps=PLACES, references=8),
        "Median": MedianPruner,
        "Hyperband": lambda: HyperbandPruner(min_resource=1, max_resource=PLACES),
        "ASHA": SuccessiveHalvingPruner,
        "Wilcoxon": WilcoxonPruner,
        "patience of 5": lambda: PatientPruner(None, patience=5),
    }


def main() -> None:
    """Print a row for each pruner, over all pools, and ours for each pool."""
    warnings.filterwarnings("ignore")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    public = [published()] if (folder() / "runs.jsonl.gz").is_file() else []
    pools = [*recorded(), *public, *all_shapes(), *algoperf()]
    print(f"\n{SWEEPS} sweeps of {TRIALS} trials in each of {len(pools)} pools; stated by StallPruner: "
          f"{supported(0.01, FEWEST):.1%}, of 8 references {supported(0.01, 8):.1%}")  # fmt: skip
    print("| pruner | bad pruned | risk (90%) | evals used | kept |\n|---|---|---|---|---|")
    for name in pruners(0.0):
        swept = {pool.name: [sweep(pool, seed, name) for seed in range(SWEEPS)] for pool in pools}
        print(f"| {name} | {_cells([one for some in swept.values() for one in some])} |", flush=True)
        if name == "StallPruner":
            for pool, some in swept.items():
                print(f"| {name}: {pool} | {_cells(some)} |")


def _cells(swept: Sequence[Swept]) -> str:
    bad, best = [b for one in swept for b in one.bad], [b for one in swept for b in one.best]
    stopped, count = sum(best), len(best)
    low = betaincinv(stopped, count - stopped + 1, 0.05) if stopped else 0.0
    high = betaincinv(stopped + 1, count - stopped, 0.95) if stopped < count else 1.0
    risk = f"{stopped} of {count}, {stopped / max(1, count):.1%} ({low:.1%} to {high:.1%})"
    used, kept = np.mean([one.used for one in swept]), np.mean([one.kept for one in swept])
    return f"{np.mean(bad):.0%} | {risk} | {used:.0%} | {kept:.0%}"


def sweep(pool: Table, seed: int, pruner: str) -> Swept:
    """One sweep of plain Optuna with a pruner."""
    rng, runs = np.random.default_rng(seed), [*pool.good, *pool.bad]
    study = optuna.create_study(pruner=pruners(pool.target)[pruner](), sampler=optuna.samplers.RandomSampler(seed))
    bad, best, used, lowest, kept = [], [], [], math.inf, math.inf
    for number, i in enumerate(rng.permutation(len(runs))[:TRIALS]):
        values = at_places(runs[i], pool.target)
        result = _result(values, pool.target)
        end = _played(study, values, result)
        pruned, ahead = end is not None, math.inf if result is None else result
        used.append((end or len(values)) / len(values))
        bad += [pruned] if i >= len(pool.good) else []
        best += [pruned] if ahead < lowest and number >= JUDGED else []
        lowest, kept = min(lowest, ahead), kept if pruned else min(kept, ahead)
    return Swept(bad, best, float(np.mean(used)), kept <= lowest)


def _played(study: optuna.Study, values: Sequence[float], result: float | None) -> int | None:
    """Evals after which the pruner stops the trial; None: it goes to its end."""
    trial = study.ask()
    for place, value in enumerate(values, 1):
        if math.isfinite(value):
            trial.report(value, place)
        if math.isfinite(value) and trial.should_prune():
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            return place
    study.tell(trial, result, state=optuna.trial.TrialState.FAIL if result is None else None)
    return None


def _result(values: Sequence[float], target: float) -> float | None:
    """What a study would minimise: below zero the sooner the target is reached, else the lowest value (over it)."""
    lowest = min((v for v in values if math.isfinite(v)), default=math.inf)
    if lowest <= target:
        return len(values) / PLACES - FIRST
    return lowest if math.isfinite(lowest) else None


def at_places(run: ComparedRun, target: float) -> list[float]:
    """The run's values at equal shares of its training up to the target: of the last eval by each."""
    samples, loss = run.curve
    end = run.length or float(samples[-1])
    at = samples.searchsorted(end * np.arange(1, PLACES + 1) / PLACES * (1 + 1e-9), side="right") - 1
    values = [float(loss[i]) if i >= 0 else math.nan for i in at]
    reached = next((n for n, v in enumerate(values, 1) if v <= target), len(values))
    return values[:reached]


def algoperf() -> list[Table]:
    """A pool of each workload of AlgoPerf; none where the checkout is not there."""
    checkout = os.environ.get("LORA_TUNE_ALGOPERF")
    found: dict[str, list[ComparedRun]] = defaultdict(list)
    for path in sorted(Path(checkout).rglob("eval_measurements.csv")) if checkout else []:
        workload = path.parents[1].name.rsplit("_", 1)[0]
        if workload in WORKLOADS and (run := _algoperf_run(path, *WORKLOADS[workload][:2])):
            found[workload].append(run)
    tables = []
    for workload, runs in found.items():
        _, sign, target = WORKLOADS[workload]
        length = float(np.quantile([run.curve.samples[-1] for run in runs], 0.9))
        whole_runs = [ComparedRun(curve=run.curve, length=length) for run in runs]
        tables.append(table(f"AlgoPerf {workload}", sign * target, whole_runs))
    return tables


def _algoperf_run(path: Path, column: str, sign: int) -> ComparedRun | None:
    """A submission's run on one workload, lower is better; None where it has next to no evals."""
    rows = []
    with path.open() as lines:
        for row in csv.DictReader(lines):
            try:
                rows.append((float(row["global_step"]), sign * float(row[column])))
            except (KeyError, ValueError):
                continue
    later = [row for row in rows if row[0] > 1]
    return whole(*np.array(later).T, length=later[-1][0]) if len(later) >= FEWEST_EVALS else None
