"""``python -m benchmarks.database_away [--minutes 10] [--how stop|freeze]``: a sweep during a database outage.

A real driver with real small jobs on this machine, with its records in a real PostgreSQL. While they run, the server is
stopped (connections are refused) or frozen (all its processes stop; the kernel keeps connections and acknowledges
packets) for the given time; meanwhile jobs end, and some diverge and must be stopped. Then the server returns. Prints
the driver's delay, what it buffered, how long catching up took, and whether all trials are there once with the results
of their logs. Exits 1 if not. Needs Debian's postgresql.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tests.postgres import Postgres, missing
from tests.store.away import Room


def times(late: Sequence[float]) -> str:
    ordered = sorted(late)
    if not ordered:
        return "none"
    return f"{ordered[len(ordered) // 2]:.2f} (median), {ordered[-1]:.2f} (worst) of {len(ordered)}"


def main() -> int:
    parser = argparse.ArgumentParser(description="a sweep whose database goes away")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--how", choices=("stop", "freeze"), default="stop")
    parser.add_argument("--parallel", type=int, default=13, help="jobs that run when it goes")
    options = parser.parse_args()
    if reason := missing():
        print(reason)
        return 3
    result: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "how": options.how,
    }
    with tempfile.TemporaryDirectory() as place, Postgres() as server:
        room = Room(Path(place) / "room", server, "away", seconds=60 * options.minutes, parallel=options.parallel)
        try:
            room.start()
            seen = room.outage(options.how)
            code = room.finish(600)
            wrong = room.losses()
        finally:
            room.close()
    result |= {
        "away, seconds": round(seen.away, 1),
        "jobs that ended meanwhile": seen.ended,
        "from a job's end to its trial's end, seconds": times(seen.ended_late),
        "jobs that diverged meanwhile and were stopped": seen.stopped,
        "from the first bad line to the stop, seconds": times(seen.stopped_late),
        "jobs submitted meanwhile": seen.submitted,
        "records buffered on disk": seen.buffered,
        "processor seconds of the driver meanwhile": round(seen.driver_cpu, 1),
        "from the server's return to all saved, seconds": round(seen.caught_up, 2),
        "trials": f"{len(room.points)}, exit code {code}",
        "wrong (lost, twice, or other than the logs)": wrong or "nothing",
    }
    print(json.dumps(result, indent=1))
    return 1 if wrong or code != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
