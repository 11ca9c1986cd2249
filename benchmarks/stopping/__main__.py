"""``python -m benchmarks.stopping``: what the stopping rule stops, beside other rules and beside the published runs.

Published runs need the public MLPerf results (``LORA_TUNE_MLPERF``), AlgoPerf's a checkout (``LORA_TUNE_ALGOPERF``).
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import time
from collections.abc import Callable

from benchmarks.stopping import belief, envelope, first, fp4, sweeps

PARTS: dict[str, Callable[[], None]] = {
    "belief": belief.main, "envelope": envelope.main, "first": first.main, "fp4": fp4.main, "sweeps": sweeps.main,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.stopping", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given again")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, no GPU")
    for part in options.part or PARTS:
        begin = time.perf_counter()
        PARTS[part]()
        print(f"({part}: {time.perf_counter() - begin:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
