"""A trial of the local chaos sweeps: its curve follows from its parameters alone, and it tells the truth elsewhere.

What ran with which parameters, and how long by a monotonic clock, goes into a file of its own in the folder
``CHAOS_LEDGER``, which no fault touches. What goes into the log is what a training prints: MLLOG lines with time stamps
of a wall clock that the file ``CHAOS_CLOCK`` sets wrong, or with ``CHAOS_STAMPS=0`` plain lines.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from pathlib import Path

EVALS, BATCH, TARGET = 8, 8, 0.93
STEPS = 10
"""Optimizer steps between two evals."""


def losses(rate: float, seed: int) -> list[float]:
    """The eval losses of a run; of most rates between 1e-4 and 1e-3 some lie below the target."""
    chance = random.Random(f"{rate!r} {seed}")
    best = 3 + chance.randrange(6) + 2 * abs(math.log10(rate / 3e-4))
    return [round(TARGET + 0.004 * (best - k) + chance.uniform(-1e-4, 1e-4), 6) for k in range(1, EVALS + 1)]


def samples_to_target(rate: float, seed: int) -> int | None:
    """Samples at the first eval that meets the target; None where none does."""
    reached = [k for k, loss in enumerate(losses(rate, seed), 1) if loss <= TARGET]
    return reached[0] * STEPS * BATCH if reached else None


def main() -> None:
    rate, seed, pace = float(os.environ["LR"]), int(os.environ["SEED"]), float(os.environ["CHAOS_PACE"])
    token = os.environ.get("LORA_TUNE_ATTEMPT", "")
    truth = {"token": token, "rate": rate, "seed": seed, "pid": os.getpid(), "seconds": None}
    ledger = Path(os.environ["CHAOS_LEDGER"], f"{time.monotonic_ns()}-{os.getpid()}.json")
    ledger.write_text(json.dumps(truth))
    stamped = os.environ["CHAOS_STAMPS"] != "0"
    emit(stamped, "seed", seed)
    emit(stamped, "opt_base_learning_rate", rate)
    emit(stamped, "global_batch_size", BATCH)
    emit(stamped, "run_start", None)
    began = time.monotonic()
    for k, loss in enumerate(losses(rate, seed), 1):
        time.sleep(pace)
        emit(stamped, "eval_accuracy", loss, samples_count=k * STEPS * BATCH)
        if loss <= TARGET:
            ledger.write_text(json.dumps({**truth, "seconds": time.monotonic() - began}))
            emit(stamped, "run_stop", None, status="success")
            return
    emit(stamped, "run_stop", None, status="aborted")


def emit(stamped: bool, key: str, value: object, **metadata: object) -> None:
    """One event as a line of the log."""
    if not stamped:
        words = {"eval_accuracy": f"eval at {metadata.get('samples_count')}: {value}"}
        print(words.get(key, f"{key} {value if value is not None else ''}"), flush=True)
        return
    now = time.time() + float(Path(os.environ["CHAOS_CLOCK"]).read_text())
    line = {"namespace": "", "time_ms": int(now * 1000), "event_type": "POINT_IN_TIME", "key": key, "value": value}
    print(f":::MLLOG {json.dumps({**line, 'metadata': {'file': 'x', 'lineno': 1, **metadata}})}", flush=True)


if __name__ == "__main__":
    main()
