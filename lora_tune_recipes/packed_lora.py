"""Many trials of the PEFT recipe in one process: ``python -m lora_tune_recipes.packed_lora FOLDER``.

Trials join and leave while others train: the program watches ``FOLDER`` for requests and stops
(``launchers.pack_folder``). Each trial has its own settings (``settings.Settings``), log and end. The first one
determines the base that all share. The program ends after a while without requests.

With ``--packs N`` it starts N processes, one per GPU, that share the folder (``packed.job``).

Exit codes: 0 idle; 2, 3 the base cannot be used, as every trial's log says; 1 a fault of the program or the GPU; 143
stopped: trials that were training are saved without an end record, and their next attempts resume.
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
"""The program ends after this long without a trial."""


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
    """Run one pack; False if stopped before all trials were done."""
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        from lora_tune_recipes.packed.loop import PackLoop
    except ImportError as error:
        raise SetupError(f"{' '.join(str(error).split())}; pip install 'lora-tune[peft]'") from error
    folder = PackFolder(options.folder, options.pack or 0)
    # One of several packs never ends by itself: the parent process ends them when all are idle.
    idle = options.idle if options.pack is None else math.inf
    host = PackLoop(folder, idle, packs=options.packs, slots=options.slots)
    signal.signal(signal.SIGTERM, lambda *_: host.stop())
    return host.serve()


if __name__ == "__main__":
    end_with(main)
