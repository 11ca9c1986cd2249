"""What packs are worth on a real base: ``python -m benchmarks.gpu.real_base_figures FOLDER PART... [--seconds N]``

FOLDER is what ``benchmarks.gpu.real_base`` made. Each part prints one JSON line a figure, and begins nothing after
--seconds (of the part):

    passes   a pack of 8 trials of 8 x 512 tokens: milliseconds a pass eager, recorded, recorded and compiled; memory,
             warm-up, largest difference of a loss from the eager ones; the same of one trial, and of 16
    single   trials an hour to a verdict, one at a time: a process each, a warm worker; eager, recorded, compiled
    start    seconds from a process's start to its imports, base, text, measured speed and a pack of 16 recorded, and
             its passes: eager, compiled with the compiler's cache as it is, and with the cache that this has left
    trials   trials an hour to a verdict of a pack that is fed, counted from the program's start, half the time compiled
             and half eager; every trial's end, so that the same trials can be compared
    paces    seconds a step of one shape as ten packs measure it, each in a process of its own
    priors   losses of 768 packed runs over learning rate, rank, alpha, batch and targets, two seeds (--out)
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

TRIAL: dict[str, object] = {
    "SEQ": 512, "MINIBS": 8, "MAX_STEPS": 100, "EVAL_SAMPLES": 32, "VAL_CHECK_INTERVAL": 200, "TARGET": 2.15,
    "LORA_DROPOUT": 0.05,
}  # fmt: skip
MODES: dict[str, dict[str, object]] = {
    "eager": {"CUDA_GRAPH": 0},
    "recorded": {},
    "recorded and compiled": {"TORCH_COMPILE": 1},
}
GRID: dict[str, object] = {
    "SEQ": 256, "MAX_STEPS": 48, "EVAL_SAMPLES": 32, "WARMUP_STEPS": 4, "LORA_DROPOUT": 0, "TORCH_COMPILE": 1,
    "MINIBS": [4, 8, 16], "LORA_TARGETS": ["attention", "all"], "LORA_RANK": [4, 8, 16, 64], "LORA_ALPHA": [16, 64],
    "LR": [1e-4, 2.15e-4, 4.64e-4, 1e-3, 2.15e-3, 4.64e-3, 1e-2, 2.15e-2], "SEED": [1, 2],
}  # fmt: skip
"""768 runs."""


def note(part: str, **figures: object) -> None:
    """One line of the record."""
    print(json.dumps({"part": part, **figures}), flush=True)


def common_of(folder: Path) -> dict[str, object]:
    """The knobs of the base and its text."""
    return {"MODEL": folder / "base", "DATADIR": folder / "text"}


def a_pack(base: Any, common: dict[str, object], slots: int, rounds: int) -> dict[str, Any]:
    """Passes of ``slots`` trials: milliseconds of each, and all losses."""
    import torch

    from benchmarks.gpu.packed import settings_of, synchronize
    from lora_tune_recipes.packed.pack import Pack
    from lora_tune_recipes.packed.slot import Slot

    pack = Pack(base, patience=0.0)
    trials = [settings_of(**common, SEED=i, LR=2e-4 * (1 + i % 4), LORA_RANK=(8, 16)[i % 2]) for i in range(slots)]
    members = [Slot(one, base.texts(one)) for one in trials]
    for slot in members:
        pack.join(slot)
    torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    pack.record()
    synchronize()
    warm_up, times, losses = time.monotonic() - began, [], []
    for _ in range(rounds):
        synchronize()
        began = time.monotonic()
        done = pack.round()
        synchronize()
        times.append(time.monotonic() - began)
        losses.append([float(done[slot]) for slot in members])
    began = time.monotonic()
    scores = pack.evaluate(members)
    return {
        "slots": slots, "warm_up_s": round(warm_up, 1), "pass_ms": round(1e3 * statistics.median(times[10:]), 2),
        "eval_ms": round(1e3 * (time.monotonic() - began), 1),
        "gib": round(torch.cuda.max_memory_reserved() / 2**30, 1), "losses": losses, "scores": scores,
    }  # fmt: skip


def passes(folder: Path, seconds: float) -> None:
    """The ``passes`` part."""
    import torch

    from benchmarks.gpu.packed import settings_of
    from lora_tune_recipes.packed.base import PackedBase

    until = time.monotonic() + seconds
    eager: dict[tuple[int, float], tuple[Any, Any]] = {}
    for dropout in (0, 0.05):
        for mode, knobs in MODES.items():
            common = {**common_of(folder), **TRIAL, **knobs, "LORA_DROPOUT": dropout}
            base = PackedBase(settings_of(**common))
            for slots in (8, 1, 16) if dropout == 0 else (8,):
                if time.monotonic() > until:
                    note("passes", left_out=f"{mode}, {slots} slots, dropout {dropout}")
                    continue
                record = a_pack(base, common, slots, 30)
                losses, scores = np.array(record.pop("losses")), np.array(record.pop("scores"))
                first = eager.setdefault((slots, dropout), (losses, scores))
                apart, scored = np.abs(losses - first[0]), np.abs(scores - first[1])
                note(
                    "passes", mode=mode, dropout=dropout, **record, apart=round(float(apart.max()), 5),
                    eval_apart=round(float(scored.max()), 5), loss=[losses[0].mean(), losses[-1].mean()],
                )  # fmt: skip
                gc.collect()
                torch.cuda.empty_cache()
            del base
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()


def start(folder: Path, seconds: float) -> None:
    """The ``start`` part."""
    until, eager = time.monotonic() + seconds, None
    for mode in ("eager", "recorded and compiled", "recorded and compiled"):
        if time.monotonic() > until:
            note("start", left_out=mode)
            continue
        call = f"from benchmarks.gpu import real_base_figures as f; f.start_of({str(folder)!r}, {mode!r}"
        child = subprocess.run(
            [sys.executable, "-c", f"{call}, {time.monotonic()})"], stdout=subprocess.PIPE, text=True, timeout=300
        )
        if child.returncode:
            note("start", failed=mode)
            continue
        record = json.loads(child.stdout.splitlines()[-1])
        losses = np.array([*record.pop("losses"), record.pop("scores")])
        eager = losses if eager is None else eager
        note("start", mode=mode, **record, apart=round(float(np.abs(losses - eager).max()), 5))


def start_of(folder: str, mode: str, began: float) -> None:
    """Print what a process that started at ``began`` (monotonic) has done until a pack of 16 trains."""
    from torch._dynamo.utils import counters

    from benchmarks.gpu.packed import settings_of
    from lora_tune_recipes.packed.base import PackedBase
    from lora_tune_recipes.packed.slot import Slot
    from lora_tune_recipes.packed.speed import Speeds

    at: dict[str, float] = {}

    def reached(stage: str) -> None:
        at[stage] = round(time.monotonic() - began, 1)

    reached("imports")
    common = {**common_of(Path(folder)), **TRIAL, **MODES[mode]}
    settings = settings_of(**common)
    base = PackedBase(settings)
    reached("base")
    slot = Slot(settings, base.texts(settings))
    reached("text")
    Speeds(base).of(slot)
    reached("speed")
    record = a_pack(base, common, 16, 30)
    reached("passes")
    programs = {"programs": counters["stats"]["unique_graphs"], **counters["aot_autograd"]}
    print(json.dumps({"at": at, **record, "programs": programs}))


def fed_pack(common: dict[str, object], slots: int, seconds: float) -> dict[str, object]:
    """Trials through one pack for so long, ``slots`` at a time. ends: number of each trial, seconds from the start."""
    from benchmarks.gpu.packed import variables
    from lora_tune.base.paths import AttemptPaths
    from lora_tune.launchers.pack_folder import PackFolder
    from lora_tune.workloads.base import Job
    from lora_tune.workloads.base import SlotTerms as JobSlot

    with tempfile.TemporaryDirectory() as root:
        folder = PackFolder(Path(root) / "pack")
        folder.make()
        places: list[Path] = []
        ends: dict[int, float] = {}
        command = [sys.executable, "-m", "lora_tune_recipes.packed_lora", str(folder.paths.folder), "--idle", "5"]
        began = time.monotonic()
        child = subprocess.Popen(command)
        while time.monotonic() - began < seconds and child.poll() is None:
            while len(places) - len(ends) < slots:
                place = Path(root) / f"{len(places)}"
                place.mkdir()
                slot = JobSlot(argv=(), knobs=variables(common, len(places)))
                folder.ask(Job(name=f"{place.name}-0", folder=place, argv=(), log=AttemptPaths(place).log, slot=slot))
                places.append(place)
            for number, place in enumerate(places):
                if number not in ends and AttemptPaths(place).ended.exists():
                    ends[number] = round(time.monotonic() - began, 1)
            time.sleep(0.05)
        lasted = time.monotonic() - began
        child.terminate()
        child.wait()
        logs = [AttemptPaths(place).log for place in places]
        texts = [log.read_text() if log.exists() else "" for log in logs]
        samples = [max((int(n) for n in re.findall(r'"samples_count": (\d+)', text)), default=0) for text in texts]
        return {
            "slots": slots, "ended": len(ends), "reached": sum('"status": "success"' in text for text in texts),
            "samples": sum(samples), "seconds": round(lasted, 1), "an_hour": round(3600 * len(ends) / lasted),
            "ends": sorted(ends.items(), key=lambda end: end[1]),
        }  # fmt: skip


def trials(folder: Path, seconds: float) -> None:
    """The ``trials`` part."""
    common = {**common_of(folder), **TRIAL}
    for mode in ("recorded and compiled", "eager"):
        note("trials", way=f"pack, {mode}", **fed_pack({**common, **MODES[mode]}, 16, seconds / 2))


def single(folder: Path, seconds: float) -> None:
    """The ``single`` part."""
    from benchmarks.gpu.packed import one_at_a_time, warm_worker

    common, until = {**common_of(folder), **TRIAL}, time.monotonic() + seconds

    def one_by_one(way: str, count: int, mode: str, environment: dict[str, str] | None = None) -> None:
        if time.monotonic() > until:
            note("single", left_out=way)
            return
        each = one_at_a_time({**common, **MODES[mode]}, count, environment)
        note("single", way=way, trials=count, trial_s=round(each, 2), an_hour=round(3600 / each))

    one_by_one("one process each, eager", 2, "eager")
    one_by_one("one process each, compiled for the first time", 1, "recorded and compiled")
    one_by_one("one process each, compiled before", 2, "recorded and compiled")
    with warm_worker() as environment:
        one_by_one("warm worker, eager", 3, "eager", environment)
        one_by_one("warm worker, recorded", 3, "recorded", environment)
        one_by_one("warm worker, compiled before", 3, "recorded and compiled", environment)


def pace(folder: str, mode: str) -> None:
    """What one pack measures."""
    from benchmarks.gpu.packed import settings_of
    from lora_tune_recipes.packed.base import PackedBase
    from lora_tune_recipes.packed.slot import Slot
    from lora_tune_recipes.packed.speed import Speeds

    settings = settings_of(**{**common_of(Path(folder)), **TRIAL, **MODES[mode]})
    base = PackedBase(settings)
    began = time.monotonic()
    speed = Speeds(base).of(Slot(settings, base.texts(settings)))
    note(
        "paces", mode=mode, step_ms=round(1e3 * speed.step_seconds, 3), eval_ms=round(1e3 * speed.eval_seconds, 2),
        pair_gain=round(speed.pair_gain, 3), measured_in_s=round(time.monotonic() - began, 1),
    )  # fmt: skip


def paces(folder: Path, seconds: float) -> None:
    """The ``paces`` part: a process for each measurement, forked before CUDA has started."""
    import lora_tune_recipes.packed.loop  # noqa: F401 - once, instead of in every process

    context, until = multiprocessing.get_context("fork"), time.monotonic() + seconds
    for mode, count in (("recorded", 10), ("eager", 4), ("recorded and compiled", 4)):
        for _ in range(count):
            if time.monotonic() < until:
                child = context.Process(target=pace, args=(str(folder), mode))
                child.start()
                child.join(max(5.0, until - time.monotonic()))
                if child.is_alive():
                    child.terminate()


def priors(folder: Path, seconds: float, out: Path | None) -> None:
    """The ``priors`` part."""
    from lora_tune_recipes import many_adapters

    grid = {name: str(value) for name, value in common_of(folder).items()} | GRID
    began = time.monotonic()
    table = many_adapters.run(grid, tokens=16 * 16 * 256, seconds=seconds)
    if out is not None:
        np.savez_compressed(out, **table)
    note("priors", runs=len(table["batch"]), seconds=round(time.monotonic() - began, 1), meta=table["meta"])


def main() -> None:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("parts", nargs="+", choices=("passes", "single", "start", "trials", "paces", "priors"))
    parser.add_argument("--seconds", type=float, default=240.0, help="of each part (default %(default)s)")
    parser.add_argument("--out", type=Path, help=".npz of the priors part")
    options = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    made: dict[str, Callable[[], None]] = {
        "passes": lambda: passes(options.folder, options.seconds),
        "single": lambda: single(options.folder, options.seconds),
        "start": lambda: start(options.folder, options.seconds),
        "trials": lambda: trials(options.folder, options.seconds),
        "paces": lambda: paces(options.folder, options.seconds),
        "priors": lambda: priors(options.folder, options.seconds, options.out),
    }
    for part in options.parts:
        began = time.monotonic()
        made[part]()
        note(part, part_seconds=round(time.monotonic() - began, 1))


if __name__ == "__main__":
    main()
