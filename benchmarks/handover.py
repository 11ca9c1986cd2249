"""Leases of real processes: ``python -m benchmarks.handover [--starts 100] [--handovers 5] [--store sqlite]``.

Two drivers of one study are started at the same instant, repeatedly, on SQLite and on a separate PostgreSQL server: how
often did exactly one of them work? Then a driver is killed (SIGKILL) while a standby with another host name waits: how
long until the standby has the lease, and until it has adopted the jobs? Needs root (host names) and Debian's
postgresql. A double start takes two to three processor seconds, so a hundred on each database take about eight minutes
on an idle machine with two cores. Progress goes to stderr, and the counts of an interrupted run are kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from lora_tune.store import Store, sqlite_url
from tests.cli.test_sweep import TRIAL, study
from tests.postgres import Postgres
from tests.waiting import wait_for


def folder_with_study(root: Path, name: str, trials: int, pace: float) -> Path:
    (root / "studies").mkdir(parents=True, exist_ok=True)
    (root / "studies" / f"{name}.toml").write_text(study(trials=trials, pace=pace))
    (root / "trial.py").write_text(TRIAL)
    return root


def start(root: Path, url: str, *arguments: str, host: str = "") -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "lora_tune.sweep", "--quiet", *arguments]
    if host:
        argv = ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh", *argv]
    environment = {**os.environ, "LORA_TUNE_STORAGE": url}
    with (root / "errors.txt").open("ab") as errors:
        return subprocess.Popen(
            argv, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors
        )


def double_starts(root: Path, url: str, count: int) -> int:
    """In how many of ``count`` double starts of a new study exactly one driver worked and each trial ran once."""
    good = 0
    for number in range(count):
        name = f"double{number}"
        folder_with_study(root, name, trials=1, pace=0.05)
        drivers = [start(root, url, "--study", name) for _ in range(2)]
        codes = sorted(driver.wait(300) for driver in drivers)
        runs = [log.read_text().count('"run_start"') for log in (root / "sweeps" / name).glob("trials/*/*/job.log")]
        # 3: refused. If the first driver finished before the second one checked, the second found nothing left to do.
        if runs == [1] and codes[0] in (0, 4) and codes[1] in (codes[0], 3):
            good += 1
            print(f"{url.partition(':')[0]}: {good} of {number + 1}", file=sys.stderr)
        else:
            journal = root / "sweeps" / name / "driver.log"  # missing if neither driver reached the sweep
            said = (journal.read_text() if journal.exists() else "") + (root / "errors.txt").read_text()[-2000:]
            print(f"double start {number}: exit codes {codes}, runs {runs}\n{said}", file=sys.stderr)
    return good


def handovers(root: Path, url: str, count: int) -> list[tuple[float, float]]:
    """Seconds from ``kill -9`` of a driver to its standby's lease, and to the adoption of the running job."""
    found = []
    for number in range(count):
        name = f"over{number}"
        folder_with_study(root, name, trials=50, pace=1.0)
        store = None
        first = start(root, url, "--study", name)
        wait_for(lambda name=name: list((root / "sweeps" / name).glob("trials/*/*/started.json")), 120, "a trial")
        standby = start(root, url, "--study", name, "--standby", host="another-host")
        time.sleep(5)  # until the standby has started and checked the lease
        first.kill()
        killed = time.monotonic()
        first.wait()
        store = Store(url, read_only=True)
        wait_for(lambda name=name, store=store: store.held(name).owner.startswith("another-host"), 120, "the lease")
        leased = time.monotonic() - killed
        log = root / "sweeps" / name / "driver.log"
        wait_for(lambda log=log: '"adopted"' in log.read_text(), 120, "the adoption")
        found.append((leased, time.monotonic() - killed))
        standby.terminate()
        standby.wait(120)
        store.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=100)
    parser.add_argument("--handovers", type=int, default=5)
    parser.add_argument("--store", choices=("sqlite", "postgresql"), help="double starts on this database only")
    options = parser.parse_args()
    result: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
    }
    with tempfile.TemporaryDirectory() as place, Postgres() as server:
        root = Path(place)
        urls = {"sqlite": sqlite_url(root / "shared.db"), "postgresql": server.new_database()}
        for kind, url in urls.items() if options.store is None else ((options.store, urls[options.store]),):
            good = double_starts(folder_with_study(root / kind, "none", 1, 0.1), url, options.starts)
            result[f"{kind}: double starts with exactly one driver"] = f"{good} of {options.starts}"
        times = handovers(folder_with_study(root / "over", "none", 1, 0.1), server.new_database(), options.handovers)
        if times:
            result["kill -9 to the standby's lease, seconds, worst"] = round(max(t[0] for t in times), 1)
            result["kill -9 to the jobs' adoption, seconds, worst"] = round(max(t[1] for t in times), 1)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
