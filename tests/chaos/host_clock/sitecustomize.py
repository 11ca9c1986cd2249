"""A host whose wall clock is slewed: every Python that has this folder on its path reads the time from it.

The file ``CHAOS_HOST_CLOCK`` holds by how many seconds the clock is ahead, how many it gains in a second, and since
when, by the monotonic clock, which nobody slews here.
"""

import os
import time
from pathlib import Path

if os.environ.get("CHAOS_HOST_CLOCK"):
    _true, _monotonic, _file = time.time, time.monotonic, Path(os.environ["CHAOS_HOST_CLOCK"])

    def _slewed() -> float:
        ahead, rate, since = map(float, _file.read_text().split())
        return _true() + ahead + rate * (_monotonic() - since)

    time.time = _slewed
