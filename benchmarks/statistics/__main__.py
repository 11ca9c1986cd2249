"""``python -m benchmarks.statistics [--part NAME]``: print the figures, all or of one part (``PARTS``).

All but ``comparison`` and ``coverage`` need the public MLPerf results (``LORA_TUNE_MLPERF``, or ``../shared/mlperf``).
Everything is seeded; the same data give the same figures.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import platform
import time

PARTS = ("crossing", "capping", "comparison", "healing", "prediction", "schedule", "coverage")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.statistics", description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given again")
    parts = parser.parse_args().part or PARTS
    print(f"{datetime.date.today()}, {platform.machine()}, one core, Python {platform.python_version()}")
    for name in parts:
        begin = time.perf_counter()
        print(f"\n== {name} ==")
        importlib.import_module(f"benchmarks.statistics.{name}").main()
        print(f"({name}: {time.perf_counter() - begin:.0f} s)")


if __name__ == "__main__":
    main()
