"""The first proposals for 64 slots of a pack: ``python -m benchmarks.slots``, one core.

A study of packed trials, with proposals requested as by its driver, for the default sampler, the grey box and TPE: 64
at once, and 64 more when all of these have ended, with simulated results. Prints the number of configurations, how many
of them differ by 1% of the learning rate or more, and the processor seconds per ask.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from lora_tune.config.study import Study, parse_study
from lora_tune.search.session import SearchPoint, Session
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, TrialState, Verdict

SLOTS = 64
STUDY = """
[workload]
kind = "peft"
[site]
slots = 64
system = "H200"
[space]
LR = { type = "float", low = 1e-4, high = 3e-2, log = true }
LORA_RANK = { type = "categorical", choices = [8, 16, 32, 64] }
WARMUP_STEPS = { type = "int", low = 0, high = 40, step = 10 }
MAX_STEPS = { type = "int", low = 80, high = 160, step = 40 }
layout = { type = "layout", minibs = [8], mbs = [8] }
SEQ = 64
EVAL_SAMPLES = 8
VAL_CHECK_INTERVAL = 128
[objective]
target = 1.9
[search]
seed = 1
[budget]
trials = 640
parallel = 64
trial_minutes = 3
"""


def packed_study(sampler: str) -> Study:
    """The study with this sampler."""
    return parse_study(STUDY, Path("packed.toml")).with_options({"search": {"sampler": sampler}})


def asked(session: Session, count: int) -> tuple[list[SearchPoint], list[float]]:
    """``count`` proposals of a session without results between them, and the processor seconds of each."""
    proposals, taken = [], []
    for _ in range(count):
        begin = time.process_time()
        proposal = session.ask()
        taken.append(time.process_time() - begin)
        assert isinstance(proposal, SearchPoint), proposal
        proposals.append(proposal)
    return proposals, taken


def made_up_end(proposal: SearchPoint) -> Trial:
    """A trial that reached the target: fastest at a learning rate of 3e-3, a high rank and a short warm-up."""
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
    """How many of the points differ in a parameter other than LR, or by 1% or more in LR."""
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
    """Print the first 64 proposals, and 64 more after those have ended."""
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
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    print(f"{date.today()}, {platform.machine()}, one core; load of the machine {os.getloadavg()[0]:.1f}")
    for name in ("auto", "grey_box", "tpe"):
        packed(name)


if __name__ == "__main__":
    main()
