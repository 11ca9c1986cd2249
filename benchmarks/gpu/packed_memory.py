"""A pack whose GPU runs out of memory: ``python -m benchmarks.gpu.packed_memory --base FOLDER --out FILE``.

A pack of one trial measures the free memory and what the trial takes. Then this program takes all but ``--left`` GiB of
the device, and asks for the further trials, for which the pack believes that there is room. Once the pack has said that
memory was short, everything is given back. Every trial must come to its end, with one log of one run, and with the eval
losses that it has in a pack with all of the memory. Exit code 1 where one does not, or memory was never short.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.packed import variables
from benchmarks.gpu.packed_live import ask
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import RunLog
from lora_tune_recipes import settings as knobs

TRIAL: dict[str, object] = {"SEQ": 512, "MINIBS": 8, "EVAL_SAMPLES": 64, "VAL_CHECK_INTERVAL": 128}
CPU: dict[str, object] = {"SEQ": 64, "MINIBS": 8, "EVAL_SAMPLES": 8, "VAL_CHECK_INTERVAL": 128}
"""To try the program where there is no GPU: memory is never short there."""
SHORT = "out of memory"
POLL = 0.05
LIMIT = 150.0
"""Seconds that a pack may take for all trials."""
SPARED = 2**28
"""Bytes that are left beside ``--left``: what this process's own allocator adds."""


def run_of(place: Path) -> RunLog:
    log = AttemptPaths(place).log
    reader = MllogReader()
    reader.feed(log.read_bytes() if log.exists() else b"")
    return reader.run()


def until(condition: Any, host: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it came true before the pack or the time ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        if host.poll() is not None:
            return bool(condition())
        time.sleep(POLL)
    return False


def take_all_but(gib: float) -> torch.Tensor:
    """Hold the device's free memory, but so much."""
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, int(free - gib * 2**30 - SPARED)), dtype=torch.uint8, device="cuda")


def train(common: dict[str, object], trials: int, left: float | None) -> tuple[list[Path], list[RunLog], str, float]:
    """All trials in one pack; left: GiB for it once the first one trains, None for everything.

    Returns their folders, their logs, what the pack said, and its seconds.
    """
    with tempfile.TemporaryDirectory() as root:
        folder = PackFolder(Path(root) / "pack")
        folder.make()
        places = [Path(root) / f"{i}" for i in range(trials)]
        said = Path(root) / "pack.log"
        began = time.monotonic()
        with said.open("wb") as output:
            command = [sys.executable, "-m", "lora_tune_recipes.packed_lora", str(folder.paths.folder), "--idle", "15"]
            host = subprocess.Popen(command, stdout=output, stderr=output)
        try:
            ask(folder, places[0], variables(common, 0))
            held: list[torch.Tensor] = []
            if until(lambda: run_of(places[0]).evals, host, LIMIT) and left is not None:
                held.append(take_all_but(left))
            for i, place in enumerate(places[1:], 1):
                ask(folder, place, variables(common, i))
            until(lambda: SHORT in said.read_text() or all_ended(places), host, 45)
            held.clear()
            torch.cuda.empty_cache()
            until(lambda: all_ended(places), host, LIMIT)
            folder.let_go()
            seconds = time.monotonic() - began
            runs = [run_of(place) for place in places]
            return [place for place in places if not ended_well(place)], runs, said.read_text(), seconds
        finally:
            host.terminate()
            try:
                host.wait(15)
            except subprocess.TimeoutExpired:
                host.kill()
                host.wait()


def all_ended(places: Sequence[Path]) -> bool:
    return all(AttemptPaths(place).ended.exists() for place in places)


def ended_well(place: Path) -> bool:
    ended, log = AttemptPaths(place).ended, AttemptPaths(place).log
    text = log.read_text(errors="replace") if log.exists() else ""
    whole = text.count('"run_start"') == text.count('"run_stop"') == 1
    return whole and ended.exists() and json.loads(ended.read_text())["exit_code"] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=knobs.TINY, help="base of the trials (default: the shipped one)")
    parser.add_argument("--trials", type=int, default=32, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="of a trial (default %(default)s)")
    parser.add_argument("--left", type=float, default=6.0, help="GiB beside the first trial (default %(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the numbers")
    options = parser.parse_args()
    cuda = torch.cuda.is_available()
    common = {**(TRIAL if cuda else CPU), "MODEL": options.base, "MAX_STEPS": options.steps}
    if cuda:
        torch.zeros(1, device="cuda")  # the context takes seconds, in which the first trial would end
    bad, runs, said, seconds = train(common, options.trials, options.left if cuda else None)
    ill, unhindered, _, plain_seconds = train(common, options.trials, None)
    lines = [line for line in said.splitlines() if SHORT in line]
    gaps = sorted(abs(a.evals[-1].loss - b.evals[-1].loss) for a, b in zip(runs, unhindered, strict=True) if a.evals)
    found = {
        "trials": options.trials,
        "short": lines,
        "not whole": [place.name for place in bad],
        "not whole unhindered": [place.name for place in ill],
        "evals": [len(run.evals) for run in runs],
        "seconds": [seconds, plain_seconds],
        "gaps": {"median": statistics.median(gaps), "largest": gaps[-1]} if gaps else None,
        "pack": said[-3000:],
    }
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({key: value for key, value in found.items() if key not in ("evals", "pack")}), flush=True)
    return bool(bad or ill or (cuda and not lines))


if __name__ == "__main__":
    sys.exit(main())
