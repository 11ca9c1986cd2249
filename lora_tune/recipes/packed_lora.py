"""Many trials of the PEFT recipe in one process: ``python -m lora_tune.recipes.packed_lora FOLDER``.

Trials come and go while others train: ``FOLDER`` is watched for requests and for stops (``launchers.pack_folder``).
Each trial reads its own knobs (``settings.Settings``), writes its own log, and ends for itself. The first one decides
which base all of them share. The program ends when nobody has asked for anything for a while.

Exit codes: 0 it was idle; 2, 3 the base cannot be used, and every trial says so; 1 a fault of the program or the GPU;
143 it was asked to end. Trials that trained then have no end on record, and are saved: their next attempts go on.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

from lora_tune.base.errors import SetupError
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.recipes.ending import end_with, say_why
from lora_tune.recipes.peft_lora import hush

IDLE_SECONDS = 20.0
"""After this long without a trial the program ends."""


TERMINATED = 143
"""Exit code of a pack that SIGTERM ended."""


def main() -> int:
    """Parse the command line and serve; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the pack, with requests in it")
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="seconds without a trial until it ends")
    options = parser.parse_args()
    hush()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        try:
            from lora_tune.recipes.packed.host import Host
        except ImportError as error:
            raise SetupError(f"{' '.join(str(error).split())}; pip install 'lora-tune[peft]'") from error
        host = Host(PackFolder(options.folder), options.idle)
        signal.signal(signal.SIGTERM, lambda *_: host.stop())
        if not host.serve():
            return TERMINATED
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        return say_why("packed_lora", error)
    return 0


if __name__ == "__main__":
    end_with(main)
