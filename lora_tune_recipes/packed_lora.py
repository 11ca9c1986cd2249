"""Many trials of the PEFT recipe in one process: ``python -m lora_tune_recipes.packed_lora FOLDER``.

Trials come and go while others train: ``FOLDER`` is watched for requests and for stops (``launchers.pack_folder``).
Each trial reads its own knobs (``settings.Settings``), writes its own log, and ends for itself. The first one decides
which base all of them share. The program ends when nobody has asked for anything for a while.

With ``--packs N`` it starts N of itself, one a GPU, that share the folder (``packed.job``).

Exit codes: 0 it was idle; 2, 3 the base cannot be used, and every trial says so; 1 a fault of the program or the GPU;
143 it was asked to end. Trials that trained then have no end on record, and are saved: their next attempts go on.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune_recipes.ending import end_with, say_why
from lora_tune_recipes.packed import job
from lora_tune_recipes.peft_lora import hush

IDLE_SECONDS = 20.0
"""After this long without a trial the program ends."""


def main() -> int:
    """Parse the command line and serve; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the pack, with requests in it")
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="seconds without a trial until it ends")
    parser.add_argument("--packs", type=int, default=1, help="packs that share the folder, a process each")
    parser.add_argument("--slots", type=int, default=1, help="trials of each of them at most")
    parser.add_argument("--pack", type=int, help="which of them this process is; it starts them all when absent")
    options = parser.parse_args()
    try:
        if options.packs > 1 and options.pack is None:
            folder = PackFolder(options.folder)
            return job.run((sys.executable, *sys.orig_argv[1:]), folder, options.packs, options.idle)
        return 0 if _serve(options) else job.TERMINATED
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        return say_why("packed_lora", error)


def _serve(options: argparse.Namespace) -> bool:
    """Be one pack; False where it was told to end before nothing was left to do."""
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from lora_tune_recipes.packed.loop import PackLoop
    except ImportError as error:
        raise SetupError(f"{' '.join(str(error).split())}; pip install 'lora-tune[peft]'") from error
    folder = PackFolder(options.folder, options.pack or 0)
    # One of several ends when all are idle, which the process that started them sees.
    idle = options.idle if options.pack is None else math.inf
    host = PackLoop(folder, idle, packs=options.packs, slots=options.slots)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    return host.serve()


if __name__ == "__main__":
    end_with(main)
