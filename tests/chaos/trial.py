"""A trial of the chaos sweeps that are timed: its curve follows from its parameters, and the truth lies elsewhere.

What ran with which parameters, and how long by a monotonic clock, goes into a file of its own in the folder
``CHAOS_LEDGER``, which no fault touches. What goes into the log is what a training prints: MLLOG lines with time stamps
of a wall clock that the file ``CHAOS_CLOCK`` sets wrong, or with ``CHAOS_STAMPS=0`` plain lines.

It works a thousandth of a second in fifty, so that a quota of processor time holds it up. SIGUSR1 lets it start again
from the beginning within its job, SIGUSR2 from its last eval, as from a checkpoint.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

EVALS, BATCH, TARGET = 8, 8, 0.93
STEPS = 10
"""Optimizer steps between two evals."""

SLICE, WORK = 0.02, 0.001
"""Seconds of a slice of training, and of processor time in it."""

STOOD_STILL = 0.25
"""A slice that took longer by this, and waited for no processor, was a pause."""


def losses(rate: float, seed: int) -> list[float]:
    """The eval losses of a run; of most rates between 1e-4 and 1e-3 some lie below the target."""
    chance = random.Random(f"{rate!r} {seed}")
    best = 3 + chance.randrange(6) + 2 * abs(math.log10(rate / 3e-4))
    return [round(TARGET + 0.004 * (best - k) + chance.uniform(-1e-4, 1e-4), 6) for k in range(1, EVALS + 1)]


def samples_to_target(rate: float, seed: int) -> int | None:
    """Samples at the first eval that meets the target; None where none does."""
    reached = [k for k, loss in enumerate(losses(rate, seed), 1) if loss <= TARGET]
    return reached[0] * STEPS * BATCH if reached else None


class Again(Exception):
    """A signal came: start again. kept: whether what was trained up to the last eval is kept."""

    def __init__(self, kept: bool) -> None:
        self.kept = kept


def main() -> None:
    rate, seed, pace = float(os.environ["LR"]), int(os.environ["SEED"]), float(os.environ["CHAOS_PACE"])
    token = os.environ.get("LORA_TUNE_ATTEMPT", "")
    truth: dict[str, Any] = {
        "token": token, "rate": rate, "seed": seed, "pid": os.getpid(), "seconds": None, "pauses": [],
        "restarts": 0, "resumes": 0, "began": 0.0, "evals": None,
    }  # fmt: skip
    ledger = Path(os.environ["CHAOS_LEDGER"], f"{time.monotonic_ns()}-{os.getpid()}.json")
    note(ledger, truth)
    done = 0
    while True:
        try:
            train(rate, seed, pace, ledger, truth, done)
            return
        except Again as again:
            done = (truth["evals"] or 0) if again.kept else 0
            truth["resumes" if done else "restarts"] += 1
            note(ledger, truth)


def train(rate: float, seed: int, pace: float, ledger: Path, truth: dict[str, Any], done: int) -> None:
    """One program's run, from the eval number ``done`` on. Raises Again when a signal asks for another one."""
    stamped = os.environ["CHAOS_STAMPS"] != "0"
    emit(stamped, "seed", seed)
    emit(stamped, "opt_base_learning_rate", rate)
    emit(stamped, "global_batch_size", BATCH)
    began = emit(stamped, "run_start", None)
    # Who goes on from a checkpoint has trained since its first start. So has, for all that a log can tell, who starts
    # again before it has printed any progress.
    if not done and truth["evals"] != 0:
        truth |= {"began": began, "pauses": [], "evals": 0}
    for number, kept in ((signal.SIGUSR1, False), (signal.SIGUSR2, True)):
        signal.signal(number, lambda *_, kept=kept: again(kept))
    for k, loss in list(enumerate(losses(rate, seed), 1))[done:]:
        work(pace, truth["pauses"])
        at = emit(stamped, "eval_accuracy", loss, samples_count=k * STEPS * BATCH)
        truth["evals"] = k
        if loss <= TARGET:
            end()
            note(ledger, {**truth, "seconds": at - truth["began"]})
            emit(stamped, "run_stop", None, status="success")
            return
    end()
    emit(stamped, "run_stop", None, status="aborted")


def again(kept: bool) -> None:
    end()
    raise Again(kept)


def end() -> None:
    """No signal starts anything again from here on."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def note(ledger: Path, truth: dict[str, Any]) -> None:
    new = ledger.with_suffix(".new")
    new.write_text(json.dumps(truth))
    new.replace(ledger)


def work(seconds: float, pauses: list[float]) -> None:
    """Train for so long, if nothing holds it up. pauses: gets for how long it stood still at a time."""
    for _ in range(round(seconds / SLICE)):
        before, waited, used = time.monotonic(), waiting(), time.process_time()
        while time.process_time() - used < WORK:
            pass
        time.sleep(SLICE - WORK)
        still = time.monotonic() - before - SLICE - (waiting() - waited)
        if still > STOOD_STILL:
            pauses.append(round(still, 3))


def waiting() -> float:
    """Seconds for which this process has waited for a processor."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def clocks() -> tuple[float, float]:
    """The monotonic clock, and the wall clock as it is set: read at one time."""
    while True:
        before = time.monotonic()
        wall = time.time() + float(Path(os.environ["CHAOS_CLOCK"]).read_text())
        if time.monotonic() - before < 0.01:
            return before, wall


def emit(stamped: bool, key: str, value: object, **metadata: object) -> float:
    """One event as a line of the log; returns when it was, by the monotonic clock."""
    at, wall = clocks()
    line = {"namespace": "", "time_ms": int(wall * 1000), "event_type": "POINT_IN_TIME", "key": key, "value": value}
    text = f":::MLLOG {json.dumps({**line, 'metadata': {'file': 'x', 'lineno': 1, **metadata}})}"
    if not stamped:
        words = {"eval_accuracy": f"eval at {metadata.get('samples_count')}: {value}"}
        text = words.get(key, f"{key} {value if value is not None else ''}")
    print(text, flush=True)
    return at


if __name__ == "__main__":
    sys.exit(main())
