"""Real Slurm on this one machine: a controller, several virtual nodes with GPU gres, accounting if wanted.

Needs root, neither systemd nor munge. Everything lives in one folder; ports and node names are the cluster's own,
so that several clusters, and several test runs, stand side by side. What is started here is stopped with it: by
:meth:`Cluster.stop`, and by a keeper process when the starting process dies in whatever way.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster import texts

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun", "sinfo")
ACCOUNTING_PROGRAMS = ("slurmdbd", "sacctmgr", "sacct", "mariadbd", "mariadb-install-db", "mariadb")
# Debian keeps daemons in sbin, which is not on every user's PATH.
SEARCH_PATH = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"


class ClusterError(RuntimeError):
    """The cluster did not come up, or did not do what was asked, within its bound; carries the daemons' last lines."""


def missing(*, accounting: bool) -> str:
    """Why the cluster cannot run here, or "" if it can."""
    if os.geteuid() != 0:
        return "the test cluster's slurmd needs root"
    wanted = PROGRAMS + (ACCOUNTING_PROGRAMS if accounting else ())
    absent = [program for program in wanted if shutil.which(program, path=SEARCH_PATH) is None]
    if absent:
        return f"not installed: {' '.join(absent)} (Debian packages: tests/packages.txt; make test installs them)"
    return ""


def wait_until(
    condition: Callable[[], bool], seconds: float, what: str, instead: Callable[[], str] | None = None
) -> None:
    """Return as soon as ``condition`` holds; after ``seconds`` raise ClusterError with ``what`` and what is instead."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise ClusterError(f"not within {seconds:g} s: {what}\n{instead() if instead else ''}")
        time.sleep(0.02)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the cluster looks like to its users. Times in seconds.

    gpus: of each node; 0: the cluster knows no GPUs. min_job_age: how long ended jobs stay visible in squeue.
    slurmd_timeout: silence after which a node is DOWN.
    kill_wait: between SIGTERM and SIGKILL. accounting: slurmdbd and MariaDB, hence a working sacct. cloud: further
    nodes, of partition ``cloud``, that the program ``resume`` in the cluster's folder makes when a job wants them.
    lines: of slurm.conf, with ``{folder}`` for the cluster's; files: of that folder, by name; programs.
    """

    nodes: int = 4
    gpus: int = 8
    accounting: bool = False
    min_job_age: int = 86400
    slurmd_timeout: int = 10
    kill_wait: int = 2
    cloud: int = 0
    lines: str = ""
    files: Mapping[str, str] = field(default_factory=dict)


class Cluster:
    """One Slurm cluster in ``folder``; a context manager.

    ``environment`` is what a client needs (SLURM_CONF, PATH), ``nodes`` the node names. Partitions: ``gpu`` (default,
    jobs there are cancelled by preemption) and ``urgent`` (preempts ``gpu``).
    """

    def __init__(self, folder: Path, shape: Shape | None = None) -> None:
        self.folder = folder
        self.shape = shape or Shape()
        self.nodes: tuple[str, ...] = ()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._keeper: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SEARCH_PATH}

    def __enter__(self) -> Cluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- start and stop

    def start(self) -> None:
        """Bring everything up and wait until all nodes are idle. Another process may take a port: three tries.

        ClusterError where the folder's path is so long that every job would be cancelled as soon as it is started.
        """
        longest = texts.longest_socket(self.folder, self.shape.nodes)
        if (over := len(os.fsencode(longest)) - texts.SOCKET_BYTES) > 0:
            raise ClusterError(
                f"{self.folder}: slurmstepd could not make {longest}, since a socket's path may have "
                f"{texts.SOCKET_BYTES} bytes; take a folder whose path is {over} shorter (tmp_path_factory.mktemp)"
            )
        for last in (False, False, True):
            try:
                self._start_once()
                return
            except ClusterError:
                self.stop()
                if last:
                    raise
            except BaseException:
                self.stop()
                raise

    def _start_once(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("state", "log", "spool", "run"):
            (self.folder / name).mkdir(parents=True)
        ports = texts.Dependencies.free(self.shape.nodes, self.shape.cloud)
        self.nodes = texts.node_names(ports)
        self._make_gpus()
        for name, text in texts.configuration(self.folder, self.shape, ports, cgroups=_cgroup_v1()).items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o600 if name == "slurmdbd.conf" else 0o644)
        for name, text in self.shape.files.items():
            (self.folder / name).write_text(text)
            (self.folder / name).chmod(0o755)
        self._keeper = _start_keeper(self.folder)
        if self.shape.accounting:
            self._start_accounting(ports)
        self.start_controller()
        for node in self.nodes:
            self.start_slurmd(node)
        wait_until(lambda: self.state_counts() == {"idle": len(self.nodes)}, 30, "all nodes idle", self.last_lines)

    def _make_gpus(self) -> None:
        # Slurm wants distinct device files for gres; character devices that read as /dev/null do.
        for i in range(self.shape.gpus):
            os.mknod(self.folder / f"gpu{i}", stat.S_IFCHR | 0o666, os.makedev(1, 3))

    def _start_accounting(self, ports: texts.Dependencies) -> None:
        data = self.folder / "mysql"
        install = ["mariadb-install-db", "--no-defaults", "--user=root", f"--datadir={data}", "--skip-test-db"]
        self.run(*install, timeout=120)
        self._spawn("mariadbd", texts.mariadb_command(self.folder, ports))
        mariadb = ("mariadb", "--no-defaults", "-S", str(self.folder / "run" / "m.sock"), "-e", "select 1")
        wait_until(lambda: self.succeeds(*mariadb), 60, "MariaDB answers", self.last_lines)
        self._spawn("slurmdbd", ["slurmdbd", "-D"])
        wait_until(lambda: self.succeeds("sacctmgr", "-n", "list", "cluster"), 60, "slurmdbd answers", self.last_lines)
        self.run("sacctmgr", "-i", "add", "cluster", texts.CLUSTER_NAME)

    def stop(self) -> None:
        """Stop every daemon and end every job's processes; never raises for what is gone already."""
        for name in [*(f"slurmd.{n}" for n in self.nodes), "slurmctld", "slurmdbd", "mariadbd"]:
            self._end(name, signal.SIGTERM)
        end_processes_of(self.folder)
        remove_control_groups(self.folder)
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()
            self._keeper.wait(30)
            self._keeper = None

    # -- daemons, one at a time

    def start_controller(self) -> None:
        self._spawn("slurmctld", ["slurmctld", "-D"])
        wait_until(self.answers, 30, "slurmctld answers", self.last_lines)

    def stop_controller(self, *, kill: bool = False) -> None:
        """End slurmctld: in order, its state saved, or (``kill``) at once, forgetting what it had not yet saved."""
        self._end("slurmctld", signal.SIGKILL if kill else signal.SIGTERM)

    def restart_controller(self) -> None:
        self.stop_controller()
        self.start_controller()

    def rename(self, name: str) -> None:
        """Give the cluster another name, as an administrator does: in slurm.conf and in what slurmctld remembers."""
        self.stop_controller()
        conf = self.folder / "slurm.conf"
        first, rest = conf.read_text().split("\n", 1)
        assert first.startswith("ClusterName="), first
        conf.write_text(f"ClusterName={name}\n{rest}")
        (self.folder / "state" / "clustername").unlink(missing_ok=True)
        self.start_controller()

    def join(self, first: Cluster, name: str) -> None:
        """Become the cluster ``name`` of the accounting of ``first``, which reaches it by ``--clusters`` then."""
        self.stop_controller()
        conf, kind = self.folder / "slurm.conf", "AccountingStor"
        accounting = [x for x in (first.folder / "slurm.conf").read_text().splitlines() if x.startswith(kind)]
        own = [x for x in conf.read_text().splitlines() if not x.startswith(("ClusterName=", kind))]
        conf.write_text("\n".join([f"ClusterName={name}", *accounting, *own, ""]))
        (self.folder / "state" / "clustername").unlink(missing_ok=True)
        first.run("sacctmgr", "-i", "add", "cluster", name)
        self.start_controller()
        known = ("sacctmgr", "-n", "-P", "show", "cluster", f"names={name}", "format=controlport")
        wait_until(lambda: first.run(*known).strip() not in ("", "0"), 30, "the accounting knows it", self.last_lines)
        wait_until(lambda: self.state_counts() == {"idle": len(self.nodes)}, 30, "all nodes idle", self.last_lines)

    def start_slurmd(self, node: str) -> None:
        self._spawn(f"slurmd.{node}", ["slurmd", "-D", "-N", node])

    def kill_slurmd(self, node: str) -> None:
        """SIGKILL the node's daemon only: its jobs' processes live on, as on a node that hangs."""
        self._end(f"slurmd.{node}", signal.SIGKILL)

    def kill_node(self, node: str) -> None:
        """End the daemon and everything on the node, as a power cut does, and mark it DOWN as a health check does.

        Slurm would notice by itself, after SlurmdTimeout and its own ping interval: half a minute.
        """
        self.kill_slurmd(node)
        self.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=power cut")
        end_processes_of(self.folder, node)

    def pid_of(self, node: str) -> int:
        """The process id of the node's daemon."""
        return self._processes[f"slurmd.{node}"].pid

    # -- administration

    def drain(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=DRAIN", "Reason=test")

    def resume(self, node: str) -> None:
        self.run("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def clear(self) -> None:
        """Cancel all jobs and wait until all nodes are idle, so that the next test finds an empty cluster."""
        for user in ("root", "nobody"):
            self.run("scancel", f"--user={user}")
        for node in self.nodes:
            if self._processes[f"slurmd.{node}"].poll() is not None:
                self.start_slurmd(node)
        wait_until(self._idle_again, 60, "all nodes idle again", self.state_lines)

    def _idle_again(self) -> bool:
        counts = self.state_counts()
        if any(state.startswith(("down", "drain", "drng")) for state in counts):
            for node in self.nodes:
                self.succeeds("scontrol", "update", f"NodeName={node}", "State=RESUME")
        return counts == {"idle": len(self.nodes)} and not self.run("squeue", "-h", "--all")

    # -- questions

    def run(self, *argv: str, timeout: float = 30, environment: Mapping[str, str] | None = None) -> str:
        """The standard output of a client command; ClusterError with its standard error where it fails."""
        try:
            done = subprocess.run(
                argv,
                env={**os.environ, **self.environment, **(environment or {})},
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{argv[0]} did not answer in {timeout:g} s") from error
        if done.returncode:
            raise ClusterError(f"{' '.join(argv)}: exit {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def succeeds(self, *argv: str) -> bool:
        try:
            self.run(*argv, timeout=10)
        except ClusterError:
            return False
        return True

    def answers(self) -> bool:
        """Whether slurmctld answers now."""
        return "is UP" in self.run("scontrol", "ping", timeout=10) if self.succeeds("scontrol", "ping") else False

    def state_counts(self) -> dict[str, int]:
        """Node state -> how many nodes are in it."""
        counts: dict[str, int] = {}
        for state in self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%t").split():
            counts[state] = counts.get(state, 0) + 1
        return counts

    def job_state(self, job_id: str) -> str:
        """Slurm's long state name of a job, "" when squeue no longer knows it."""
        try:
            return self.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%T").strip()
        except ClusterError:
            return ""

    def state_lines(self) -> str:
        """Nodes and jobs as they are now, for messages."""
        return self.run("sinfo", "-N", "-o", "%N %T %E") + self.run("squeue", "-t", "all", "-o", "%A %j %T %r %N")

    def last_lines(self) -> str:
        """The end of every daemon's output, for messages."""
        parts = []
        for log in sorted((self.folder / "log").glob("*")):
            parts.append(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-8:]))
        return "\n".join(parts)

    # -- processes

    def _spawn(self, name: str, argv: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("ab") as output:
            self._processes[name] = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**_without_slurm(os.environ), **self.environment, texts.MARK: str(self.folder)},
            )

    def _end(self, name: str, sig: signal.Signals) -> None:
        process = self._processes.get(name)
        if process is None or process.poll() is not None:
            return
        process.send_signal(sig)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def ask_for_a_second(folder: Path) -> None:
    """Make an attempt's record say that its job asked for one second, so that a limit moved to now is its own.

    Limits are whole minutes; moving the end saves the wait. A limit below what was asked for is an operator's.
    """
    record = folder / "slurm.json"
    record.write_text(re.sub(r'"--time=\d+"', '"--time=0:01"', record.read_text()))


def _without_slurm(environment: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in environment.items() if not k.startswith(("SLURM_", "SBATCH_", "SLURMD_"))}


def _cgroup_v1() -> bool:
    """Whether the freezer of cgroup v1 can be used: it alone leaks no stubborn descendants of a job."""
    return os.access("/sys/fs/cgroup/freezer", os.W_OK)


def processes_of(folder: Path, node: str = "") -> set[int]:
    """Process ids of the cluster in ``folder``: daemons, step daemons, jobs and whatever was given its SLURM_CONF.

    With ``node``, only jobs and step daemons on that node.
    """
    marks = {f"SLURM_CONF={folder}/slurm.conf".encode(), f"{texts.MARK}={folder}".encode()}
    logs = str(folder / "log" / (f"slurmd.{node}.log" if node else "slurmd."))
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it ended meanwhile, or is a zombie
            if not entry.name.isdigit():
                continue
            variables = set((entry / "environ").read_bytes().split(b"\0"))
            ours = bool(marks & variables) and (not node or f"SLURMD_NODENAME={node}".encode() in variables)
            # slurmstepd overwrites its environment with its title, but keeps its node's log open.
            is_step_daemon = (entry / "comm").read_text().startswith("slurmstepd")
            if ours or (is_step_daemon and any(str(fd.readlink()).startswith(logs) for fd in (entry / "fd").iterdir())):
                found.add(int(entry.name))
    return found - _ancestors()


def end_processes_of(folder: Path, node: str = "") -> None:
    """SIGKILL what :func:`processes_of` finds, until nothing is found."""

    def none_left() -> bool:
        pids = processes_of(folder, node)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(none_left, 20, f"the processes of {folder} {node} end")


def remove_control_groups(folder: Path) -> None:
    """slurmd leaves its (now empty) control groups behind, one tree a node; deepest first, as rmdir wants it."""
    for node in (folder / "spool").glob("*"):
        root = Path("/sys/fs/cgroup/freezer") / f"slurm_{node.name}"
        for path in (*sorted((p for p in root.rglob("*") if p.is_dir()), reverse=True), root):
            with contextlib.suppress(OSError):
                path.rmdir()


def _ancestors() -> set[int]:
    """This process and those above it, which carry the mark when SLURM_CONF was exported to a whole test run."""
    found, pid = {os.getpid()}, os.getpid()
    while pid > 1:
        text = Path("/proc", str(pid), "stat").read_text()
        pid = int(text.rsplit(")", 1)[1].split()[1])
        found.add(pid)
    return found


def _start_keeper(folder: Path) -> subprocess.Popen[bytes]:
    """A process that ends the cluster when this process is gone: it waits for the end of a pipe that only we hold."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.keeper", str(folder)],
        stdin=subprocess.PIPE,
        start_new_session=True,
        cwd=Path(__file__).resolve().parents[2],
    )
