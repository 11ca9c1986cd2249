"""Two hosts, one folder, a real network file system: ``python -m benchmarks.network_folder [--starts 10]``.

GlusterFS serves a folder, and two mounts of it represent two hosts: each has a client with separate caches and a
separate host name, and its drivers keep their databases on a separate disk. Reports

- how often, of two drivers that start at the same instant, exactly one worked, and no trial ran twice;
- after ``kill -9`` of a driver, how long until the other host's driver works;
- whether a driver whose host froze for longer than its lease continues in parallel with its successor.

Everything is in separate namespaces (mounts, network, processes) and disappears with them. Needs root and Debian's
glusterfs-server, glusterfs-client and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from lora_tune.store import LEASE_SECONDS, sqlite_url
from tests.cli.test_sweep import TRIAL, study
from tests.waiting import wait_for

SERVER = "10.77.0.1"
"""The file server's address, in a separate network."""

HOSTS = ("north", "south")
INSIDE = "LORA_TUNE_INSIDE_NAMESPACES"
OWN_FOLDERS = ("/var/lib/glusterd", "/run/gluster", "/var/log/glusterfs")
REFUSED = 3


class NetworkFolder:
    """A folder on GlusterFS, mounted once for each host."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def start(self) -> None:
        """Serve and mount it. Raises RuntimeError with a failed command's output."""
        for folder in OWN_FOLDERS:
            Path(folder).mkdir(parents=True, exist_ok=True)
            _run("mount", "-t", "tmpfs", "tmpfs", folder)
        _run("ip", "link", "set", "lo", "up")
        _run("ip", "address", "add", f"{SERVER}/24", "dev", "lo")
        _run("glusterd")
        brick = self.root / "brick"
        brick.mkdir()
        self.folder.mkdir()
        wait_for(lambda: _said("gluster", "--mode=script", "pool", "list"), 60, "glusterd")
        _run("gluster", "--mode=script", "volume", "create", "sweeps", f"{SERVER}:{brick}", "force")
        _run("gluster", "--mode=script", "volume", "start", "sweeps")
        for name in HOSTS:
            self.mount(name).mkdir()
            _run("glusterfs", f"--volfile-server={SERVER}", "--volfile-id=sweeps", str(self.mount(name)))
            wait_for(lambda name=name: os.path.ismount(self.mount(name)), 60, f"the mount of {name}")

    def mount(self, host: str) -> Path:
        """A host's mount; its processes see it at ``folder``, as on hosts of one cluster."""
        return self.root / f"mount-{host}"

    @property
    def folder(self) -> Path:
        """Where every host has the folder mounted."""
        return self.root / "sweeps"

    def driver(self, host: str, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a driver of the study on one of the hosts, in a new session."""
        place = self.root / f"host-{host}"
        (place / "studies").mkdir(parents=True, exist_ok=True)
        (place / "trial.py").write_text(TRIAL)
        trials, pace = (40, 0.5) if options else (1, 0.05)
        (place / "studies" / f"{name}.toml").write_text(study(trials=trials, pace=pace))
        words = ["--study", name, "--output", str(self.folder / name), "--quiet", *options]
        become = f'hostname {host} && mount --bind {self.mount(host)} {self.folder} && exec "$@"'
        argv = ["unshare", "--uts", "--mount", "sh", "-c", become, "sh"]
        with (place / "errors.txt").open("ab") as errors:
            return subprocess.Popen(
                [*argv, sys.executable, "-m", "lora_tune.sweep", *words],
                cwd=place,
                env={**os.environ, "LORA_TUNE_STORAGE": sqlite_url(place / f"{name}.db")},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def runs(self, name: str) -> Counter[str]:
        """How often each attempt's program began, by folder, according to the file server."""
        logs = (self.root / "brick" / name).glob("trials/*/*/job.log")
        return Counter(
            {str(log.parent.relative_to(log.parents[3])): log.read_text().count("run_start") for log in logs}
        )


def double_starts(place: NetworkFolder, count: int) -> str:
    """In how many of ``count`` double starts exactly one driver worked, and the one trial ran once."""
    good = 0
    for number in range(count):
        name = f"double{number}"
        drivers = [place.driver(host, name) for host in HOSTS]
        codes = sorted(driver.wait(300) for driver in drivers)
        runs = place.runs(name)
        if list(runs.values()) == [1] and codes[0] in (0, 4) and codes[1] == REFUSED:
            good += 1
        else:
            print(f"double start {number}: exit codes {codes}, runs {dict(runs)}", file=sys.stderr)
    return f"{good} of {count}"


def taken_over(place: NetworkFolder, name: str, *, frozen: bool) -> dict[str, object]:
    """Kill a driver, or freeze its host for longer than a lease; seconds until the other host's driver works."""
    first = place.driver(HOSTS[0], name, "--parallel", "1")
    lock = place.root / "brick" / name / "driver.lock"
    wait_for(lambda: place.runs(name), 120, "the first trial")
    owner = json.loads(lock.read_text())["host"]
    os.killpg(first.pid, signal.SIGSTOP if frozen else signal.SIGKILL)
    since = time.monotonic()
    (place.root / f"host-{HOSTS[1]}").mkdir(exist_ok=True)
    copied(*(place.root / f"host-{host}" / f"{name}.db" for host in HOSTS))
    second = place.driver(HOSTS[1], name, "--parallel", "1", "--standby")
    wait_for(lambda: _owner(lock) == HOSTS[1], 10 * LEASE_SECONDS, "the other host to take over")
    seconds = round(time.monotonic() - since, 1)
    if frozen:
        os.killpg(first.pid, signal.SIGCONT)
    code = first.wait(120)
    second.terminate()
    second.wait(120)
    twice = [folder for folder, times in place.runs(name).items() if times > 1]
    return {"owner before": owner, "seconds": seconds, "its exit code": code, "attempts that ran twice": twice}


def copied(database: Path, to: Path) -> None:
    """Copy the records to the other host, including the write-ahead log, as an administrator would."""
    with contextlib.closing(sqlite3.connect(database)) as records, contextlib.closing(sqlite3.connect(to)) as copy:
        records.backup(copy)


def _owner(lock: Path) -> str:
    try:
        return str(json.loads(lock.read_text())["host"])
    except (OSError, ValueError, KeyError):
        return ""


def _said(*argv: str) -> bool:
    return subprocess.run(argv, capture_output=True, check=False, timeout=60).returncode == 0


def _run(*argv: str) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr or done.stdout}")


def inside(starts: int) -> None:
    """The measurement, in the namespaces."""
    result: dict[str, object] = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}",
        "file system": subprocess.run(["glusterfs", "--version"], capture_output=True, text=True).stdout.split("\n")[0],
    }
    with tempfile.TemporaryDirectory(prefix="network-folder-") as name:
        place = NetworkFolder(Path(name))
        place.start()
        try:
            result["double starts with exactly one driver"] = double_starts(place, starts)
            result["kill -9 of a driver"] = taken_over(place, "killed", frozen=False)
            result["a driver frozen for longer than its lease"] = taken_over(place, "frozen", frozen=True)
        except AssertionError:
            for host in HOSTS:
                print((place.root / f"host-{host}" / "errors.txt").read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            for host in HOSTS:
                subprocess.run(["umount", "-l", str(place.mount(host))], check=False)
    print(json.dumps(result, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=10)
    options = parser.parse_args()
    if missing := [
        program for program in ("glusterd", "gluster", "glusterfs", "ip", "unshare") if not shutil.which(program)
    ]:
        sys.exit(
            f"{', '.join(missing)} not found: apt-get install glusterfs-server glusterfs-client iproute2 util-linux"
        )
    if os.environ.get(INSIDE):
        inside(options.starts)
        return
    apart = ["unshare", "--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
    words = [sys.executable, "-m", "benchmarks.network_folder", "--starts", str(options.starts)]
    sys.exit(subprocess.run([*apart, *words], env={**os.environ, INSIDE: "1"}, check=False).returncode)


if __name__ == "__main__":
    main()
