"""Runs a training script that writes metrics into files, and prints them, so that its log contains them.

``python -m lora_tune.logs.relay FOLDER -- python train.py --logdir=FOLDER``: TensorBoard's event files, CSV tables and
JSON lines at or below FOLDER (or one such file) are followed while the script runs, and each row is printed as a JSON
object. The script's output passes through. SIGTERM and SIGINT are forwarded to the script, and its exit code is
returned.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path

from lora_tune.base.files import MetricFiles

POLL_SECONDS = 0.5


def relay(paths: list[Path], command: list[str]) -> int:
    """Run the command, print rows of its files, and return its exit code, or 128 + the signal that ended it.

    ``python`` means the current interpreter, as in commands without a relay.
    """
    if command[0] in ("python", "python3"):
        command = [sys.executable, *command[1:]]
    files = MetricFiles(paths)
    for _ in files.rows():  # rows of an earlier run
        pass
    print(f"relay: {', '.join(map(str, paths))}", flush=True)  # the run begins when its first line arrives
    child = subprocess.Popen(command)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda which, _: child.send_signal(which))
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(POLL_SECONDS)
        ended = child.returncode is not None
        for row in files.rows():
            print(json.dumps(row), flush=True)
        if ended:
            return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main() -> int:
    """Split the command line at ``--`` and run the command."""
    arguments = sys.argv[1:]
    if "--" not in arguments or not arguments[: arguments.index("--")] or not arguments[arguments.index("--") + 1 :]:
        print("usage: python -m lora_tune.logs.relay FOLDER... -- COMMAND...", file=sys.stderr)
        return 2
    at = arguments.index("--")
    return relay([Path(name) for name in arguments[:at]], arguments[at + 1 :])


if __name__ == "__main__":
    sys.exit(main())
