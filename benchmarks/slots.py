"""Many trials asked at once: ``python -m benchmarks.slots [--asked 16,64] [--packed]``, one core, the H100 surface.

After 0 and after 40 finished trials, prints for each number of asks without a result between them: how many of the
proposals are different configurations, how often one is repeated (as another seed of it), how many layouts and
convergence settings they hold, how many are short runs, and the processor seconds of an ask (median, last), for the
default sampler and for Optuna's TPE in the same run.

``--packed``: the study of ``benchmarks.gpu.packed_sweep`` instead, asked as its driver asks, for the default sampler,
the grey box and TPE: 64 at once, and 64 more when all of these have ended, with made-up results. All but LR of its
space are grids with 60 points between them, so beside the configurations it prints the closest pair: the least ratio of
two learning rates of one such point.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import platform
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.samplers import BaseSampler, TPESampler
from optuna.trial import FrozenTrial

from benchmarks.ask import default, history
from benchmarks.gpu.packed_sweep import CPU, STUDY
from benchmarks.laboratory.problems import PUBLISHED_H100, h100_wide
from lora_tune.config.study import Study, parse_study
from lora_tune.mlperf.benchmark import LORA, find_benchmark
from lora_tune.search.session import Asked, Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, TrialState, Verdict

SLOTS = 64


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


def packed_study(sampler: str) -> Study:
    """The swept study of ``benchmarks.gpu.packed_sweep``, with this sampler and 64 slots."""
    text = STUDY.format(
        **CPU, site=f"slots = {SLOTS}", model="", environment="", trials=10 * SLOTS, parallel=SLOTS
    ).replace('model = ""\n', "")
    return parse_study(text, Path("packed.toml")).with_options({"search": {"sampler": sampler}})


def asked(session: Session, count: int) -> tuple[list[Asked], list[float]]:
    """So many proposals of a session without a result between them, and the processor seconds of each."""
    proposals, taken = [], []
    for _ in range(count):
        begin = time.process_time()
        proposal = session.ask()
        taken.append(time.process_time() - begin)
        assert isinstance(proposal, Asked), proposal
        proposals.append(proposal)
    return proposals, taken


def made_up_end(proposal: Asked) -> Trial:
    """A trial that reached the target: soonest at a learning rate of 3e-3, a high rank and a short warm-up."""
    tuned: dict[str, Any] = dict(proposal.tuned)
    samples = 300 * math.exp(0.3 * math.log(tuned["LR"] / 3e-3) ** 2) * (1 + 4 / tuned["LORA_RANK"])
    samples += 4.0 * tuned["WARMUP_STEPS"]
    pace = TrialMetrics(samples_per_second=100.0, seconds_per_eval=0.1, init_seconds=1.0)
    metrics = replace(
        pace, objective=samples / 100, stop_seconds=samples / 100, stop_samples=samples, node_hours=samples / 360_000
    )
    ran = Trial(
        number=proposal.number, seed=proposal.number, tuned=tuned, parameters=tuned, state=TrialState.RUNNING,
        metrics=metrics,
    )  # fmt: skip
    return ran.finished(Verdict.REACHED, "made up", float(proposal.number))


def told_apart(points: Sequence[Mapping[str, Any]]) -> int:
    """How many of the points differ from each other in something else than LR, or there by 1% or more."""
    rates: dict[tuple[tuple[str, Any], ...], list[float]] = {}
    for point in points:
        others = tuple(sorted((name, value) for name, value in point.items() if name != "LR"))
        rates.setdefault(others, []).append(point["LR"])
    apart = 0
    for alike in rates.values():
        last = 0.0
        for rate in sorted(alike):
            if rate >= last * 1.01:
                apart, last = apart + 1, rate
    return apart


def packed(sampler: str) -> None:
    """Print what 64 asks propose at the beginning, and what 64 more do after the ends of these."""
    session = Session(packed_study(sampler))
    for when in ("at the beginning", f"after {SLOTS} ended"):
        proposals, taken = asked(session, SLOTS)
        points = [proposal.tuned for proposal in proposals]
        whole = len({tuple(sorted(p.items())) for p in points})
        print(
            f"{sampler}, {SLOTS} {when}: {whole} configurations, {told_apart(points)} of them 1% of LR or more apart; "
            f"an ask {np.median(taken):.3f} s, the last {taken[-1]:.3f} s",
            flush=True,
        )
        for proposal in proposals:
            session.tell(made_up_end(proposal))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--asked", default="16,64", help="asks without a result between them, separated by commas")
    parser.add_argument("--packed", action="store_true", help="64 of the study of a packed sweep instead")
    options = parser.parse_args()
    find_benchmark(LORA).reference(8)  # MLPerf's checker is imported once a process, not by an ask
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, one core; load of the machine {os.getloadavg()[0]:.1f}")
    if options.packed:
        for name in ("auto", "grey_box", "tpe"):
            packed(name)
        return
    for ended in (0, 40):
        trials = history(ended)
        for count in (int(text) for text in options.asked.split(",")):
            for name, sampler in (("default", default()), ("TPE", TPESampler(seed=1, constant_liar=True))):
                print(f"after {ended}, {count} at once, {name}: {asked_at_once(sampler, trials, count)}", flush=True)


if __name__ == "__main__":
    main()
