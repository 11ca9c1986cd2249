"""Many trials asked at once: ``python -m benchmarks.slots [--asked 16,64]``, one core, the H100 surface.

After 0 and after 40 finished trials, prints for each number of asks without a result between them: how many of the
proposals are different configurations, how often one is repeated (as another seed of it), how many layouts and
convergence settings they hold, how many are short runs, and the processor seconds of an ask (median, last), for the
portfolio and for Optuna's TPE in the same run.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import platform
import time
from collections import Counter
from datetime import date

import numpy as np
import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial

from benchmarks.ask import history, portfolio
from benchmarks.laboratory.problems import PUBLISHED_H100, h100_wide
from lora_tune.mlperf.registry import LORA, find_benchmark


def asked_at_once(sampler: BaseSampler, trials: list[FrozenTrial], count: int) -> str:
    """What ``count`` asks after ``trials`` propose and cost, in words; the published point is enqueued first."""
    problem = h100_wide(0)
    study = optuna.create_study(sampler=sampler)
    study.add_trials(trials)
    study.enqueue_trial(PUBLISHED_H100)
    points, kinds, taken = [], [], []
    for _ in range(count):
        begin = time.process_time()
        trial = study.ask(problem.distributions)
        taken.append(time.process_time() - begin)
        points.append(trial.params)
        kinds.append(trial.user_attrs.get("kind", "full"))
    whole = Counter(tuple(sorted(p.items())) for p in points)
    settings = {tuple(sorted((n, v) for n, v in p.items() if n != "layout")) for p in points}
    layouts = {p["layout"] for p in points}
    return (
        f"{len(whole)} configurations (one at most {max(whole.values())} times), {len(layouts)} layouts, "
        f"{len(settings)} settings, {kinds.count('probe')} short runs; an ask {np.median(taken):.2f} s, "
        f"the last {taken[-1]:.2f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asked", default="16,64", help="asks without a result between them, separated by commas")
    options = parser.parse_args()
    find_benchmark(LORA).reference(8)  # MLPerf's checker is imported once a process, not by an ask
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, one core; load of the machine {os.getloadavg()[0]:.1f}")
    for ended in (0, 40):
        trials = history(ended)
        for count in (int(text) for text in options.asked.split(",")):
            for name, sampler in (("portfolio", portfolio()), ("TPE", TPESampler(seed=1, constant_liar=True))):
                print(f"after {ended}, {count} at once, {name}: {asked_at_once(sampler, trials, count)}", flush=True)


if __name__ == "__main__":
    main()
