"""Is the claimed regret the true one after many runs? ``python -m benchmarks.claims [SITES]``.

One layout of the H100 surface whose speed is known, so that only convergence is left to learn. Runs are spread around
the best hyperparameters as those of a search that has settled, but chosen without looking at results; after 40, 160
and 340 of them the model recommends and claims. Prints the means of claimed and true regret over sites. A search of 64
trials at a time gets there too, but takes many minutes a site.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import math
import platform
import sys
from datetime import date
from typing import Any

import numpy as np

from benchmarks.laboratory.ours import METHODS
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import h100_wide
from lora_tune.config.parameters import LayoutParameter
from lora_tune.config.space import Space
from lora_tune.logs.run import Eval
from lora_tune.search.grey_box.model import learn
from lora_tune.search.grey_box.recommendation import recommend_from
from lora_tune.search.observations import Observation
from lora_tune.search.published import llama2_70b_lora

RUNS = (40, 160, 340)


def problem(site: int) -> Problem:
    """The wide H100 problem of a site with one layout."""
    wide = h100_wide(site)
    layout = LayoutParameter(type="layout", tp=(4,), pp=(1,), cp=(1,), mbs=(1,), gbs=(8,))
    return Problem("h100", wide.surface, Space({**wide.space.parameters, "layout": layout}, nodes=1, gpus_per_node=8))


def settings(best: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Hyperparameters near ``best``: rate within 30%, a schedule some longer, warm-up of a few tens of steps."""
    rate = best["LR"] * math.exp(rng.normal(0, 0.3))
    steps = best["MAX_STEPS"] * math.exp(abs(rng.normal(0.1, 0.3)))
    return {
        **best,
        "LR": float(np.clip(rate, 1e-5, 1e-2)),
        "MAX_STEPS": int(np.clip(steps, 100, 2500)),
        "WARMUP_STEPS": int(abs(rng.normal(0, 25))),
    }


def observed(at: Problem, values: dict[str, Any], number: int, seed: int) -> Observation:
    """What one whole run of ``values`` teaches."""
    outcome = at.surface.outcome(at.space.resolve(values), seed)
    reached = outcome.end == "success"
    evals = tuple(Eval(samples, loss, second) for samples, loss, second in outcome.evals)
    last = evals[-1].samples if evals else math.nan
    return Observation(
        number=number, values=values, evals=evals, reached=last if reached else math.nan, bound=last,
        samples_per_second=outcome.samples_per_second, seconds_per_eval=outcome.seconds_per_eval,
        infeasible=outcome.end == "oom", diverged=any(math.isnan(loss) for _, loss, _ in outcome.train),
    )  # fmt: skip


def looks(site: int) -> list[tuple[float, float]]:
    """(claimed, true) regret after each of ``RUNS``."""
    at = problem(site)
    lowest = at.exact_best
    best = dict(min(at._scores, key=at._scores.__getitem__))
    rng, goal = np.random.default_rng(site), METHODS["ours"](at, site)._goal
    seen = [observed(at, settings(best, rng), k, site * 100_003 + k) for k in range(RUNS[-1])]
    found = []
    for runs in RUNS:
        model = learn(at.coordinates, goal, [*llama2_70b_lora(), *seen[:runs]])
        recommended = recommend_from(model, np.random.default_rng(0))
        found.append((recommended.regret, at.exact_score(dict(recommended.values)) / lowest - 1))
    return found


def main() -> None:
    """Print a table."""
    sites = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    table = np.array([looks(site) for site in range(1, sites + 1)])
    print(f"{sites} sites; {date.today()}, {platform.machine()}, one core")
    print("| runs | claimed regret | true regret | ratio |\n|---|---|---|---|")
    for runs, (claimed, true) in zip(RUNS, table.mean(axis=0), strict=True):
        print(f"| {runs} | {100 * claimed:.2f}% | {100 * true:.2f}% | {claimed / true:.2f} |")


if __name__ == "__main__":
    main()
