"""Ends a cluster whose owner is gone: ``python -m tests.cluster.keeper FOLDER`` waits for its input to close."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from tests.cluster.cluster import end_processes_of, remove_control_groups


def main(folder: str) -> None:
    # Ctrl-C goes to the whole terminal; the owner stops its cluster itself then, and closes our input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end_processes_of(Path(folder))
    remove_control_groups(Path(folder))


if __name__ == "__main__":
    main(sys.argv[1])
