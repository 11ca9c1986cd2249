"""The sweep command on a wall clock that jumps: ``python -m tests.chaos.stepped FILE ARGUMENTS``.

FILE holds by how many seconds the clock is wrong just now. The monotonic clock is as it is, as on a real machine.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

_true = time.time
_file = Path(sys.argv[1])


def _stepped() -> float:
    return _true() + float(_file.read_text())


if __name__ == "__main__":
    time.time = _stepped
    from lora_tune.sweep import main

    main(sys.argv[2:])
