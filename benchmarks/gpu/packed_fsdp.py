"""Trials in packs that share one base (``FSDP=1``) beside the same in packs with a base each.

``python -m benchmarks.gpu.packed_fsdp --base FOLDER [--packs 2] [--trials 4] [--steps 20]``, on a node with a GPU a
pack; on a CPU with the shipped base it is a rehearsal. Prints a JSON line for each way and the largest difference of
eval losses.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.gpu.packed import LARGE, Knobs, variables
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.logs.mllog import MllogReader
from lora_tune.workloads.base import Job, SlotTerms
from lora_tune_recipes.settings import TINY


def losses(common: Knobs, packs: int, trials: int) -> list[float]:
    """The last eval loss of each trial of one job."""
    with tempfile.TemporaryDirectory() as root:
        folder = PackFolder(Path(root) / "pack")
        folder.make()
        attempts = [AttemptPaths(Path(root) / f"{number}") for number in range(trials)]
        for number, attempt in enumerate(attempts):
            attempt.folder.mkdir()
            slot = SlotTerms(argv=(), knobs=variables(common, number))
            folder.ask(Job(name=f"t-{number}-0", folder=attempt.folder, argv=(), log=attempt.log, slot=slot))
        options = ["--packs", str(packs), "--slots", str(-(-trials // packs)), "--idle", "1"]
        command = [sys.executable, "-m", "lora_tune_recipes.packed_lora", str(folder.paths.folder), *options]
        began = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        found = []
        for attempt in attempts:
            reader = MllogReader()
            reader.feed(attempt.log.read_bytes())
            found.append(reader.run().evals[-1].loss)
    print(json.dumps({"FSDP": common["FSDP"], "seconds": round(seconds, 1), "eval_losses": found}), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, default=TINY, help="default: the shipped one")
    parser.add_argument("--packs", type=int, default=2, help="default %(default)s")
    parser.add_argument("--trials", type=int, default=4, help="default %(default)s")
    parser.add_argument("--steps", type=int, default=20, help="default %(default)s")
    parser.add_argument("--seq", type=int, default=512, help="default %(default)s")
    options = parser.parse_args()
    common: Knobs = {**LARGE, "MODEL": options.base, "MAX_STEPS": options.steps, "SEQ": options.seq}
    whole, shared = (losses({**common, "FSDP": fsdp}, options.packs, options.trials) for fsdp in (0, 1))
    print(f"largest difference {max(abs(a - b) for a, b in zip(whole, shared, strict=True)):.2g}")


if __name__ == "__main__":
    main()
