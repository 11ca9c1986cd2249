"""The test cluster's configuration files, as pure functions from (folder, shape, ports) to text."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.cluster.cluster import Shape

CLUSTER_NAME = "testcluster"
MARK = "LORA_TUNE_TEST_CLUSTER"
"""The variable by which the daemons' processes are recognised as this cluster's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """TCP ports that were free a moment ago."""

    controller: int
    accounting: int
    database: int
    nodes: tuple[int, ...]
    cloud: tuple[int, ...] = ()

    @classmethod
    def free(cls, nodes: int, cloud: int = 0) -> Dependencies:
        with contextlib.ExitStack() as stack:
            ports = []
            for _ in range(nodes + cloud + 3):
                s = stack.enter_context(socket.socket())
                s.bind(("127.0.0.1", 0))
                ports.append(int(s.getsockname()[1]))
        every = tuple(ports[3:])
        return cls(
            controller=ports[0], accounting=ports[1], database=ports[2], nodes=every[:nodes], cloud=every[nodes:]
        )


def node_names(ports: Dependencies) -> tuple[str, ...]:
    """Names that no other cluster on this machine has: slurmd names its control groups after them."""
    return tuple(f"c{ports.controller}n{i + 1}" for i in range(len(ports.nodes)))


def cloud_names(ports: Dependencies) -> tuple[str, ...]:
    """The names of the nodes that are made when a job wants them."""
    return tuple(f"c{ports.controller}x{i + 1}" for i in range(len(ports.cloud)))


SOCKET_BYTES = 107
"""The longest path of a socket that Linux takes (unix(7))."""


def longest_socket(folder: Path, nodes: int) -> Path:
    """The longest path that slurmstepd makes for a socket, of a cluster of so many nodes in ``folder``."""
    name = f"c65535n{nodes}"
    return folder / "spool" / name / f"{name}_99999.4294967291"


def configuration(folder: Path, shape: Shape, ports: Dependencies, *, cgroups: bool) -> Mapping[str, str]:
    """File name -> text of everything that the daemons read in ``folder``."""
    files = {
        "slurm.conf": _slurm(folder, shape, ports, cgroups=cgroups),
        "gres.conf": _gres(folder, shape, ports),
        # The plugin is named even where it is not used: auto-detection may fail in a container.
        "cgroup.conf": "CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n",
    }
    if shape.accounting:
        files["slurmdbd.conf"] = _slurmdbd(folder, ports)
    return files


def _slurm(folder: Path, shape: Shape, ports: Dependencies, *, cgroups: bool) -> str:
    host = socket.gethostname().split(".", 1)[0]
    accounting = (
        "AccountingStorageType=accounting_storage/slurmdbd\nAccountingStorageHost=127.0.0.1\n"
        f"AccountingStoragePort={ports.accounting}\nAccountingStoreFlags=job_comment"
        if shape.accounting
        else "AccountingStorageType=accounting_storage/none"
    )
    nodes = "\n".join(
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=16000 "
        f"{f'Gres=gpu:h100:{shape.gpus} ' if shape.gpus else ''}State=UNKNOWN"
        for name, port in zip(node_names(ports), ports.nodes, strict=True)
    )
    # cred_expire: or a requeued job waits 120 s. sched_*: start jobs at once, look again every second.
    return f"""ClusterName={CLUSTER_NAME}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports.controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/{"cgroup" if cgroups else "pgid"}
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
{accounting}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={shape.slurmd_timeout}
KillWait={shape.kill_wait}
MessageTimeout=5
MinJobAge={shape.min_job_age}
SchedulerParameters=batch_sched_delay=0,sched_min_interval=100000,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
{"GresTypes=gpu" if shape.gpus else ""}
{nodes}
{_cloud(folder, ports, host)}{shape.lines.format(folder=folder)}
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP DefMemPerCPU=500 PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP DefMemPerCPU=500 PriorityTier=2
"""


def _cloud(folder: Path, ports: Dependencies, host: str) -> str:
    """The partition ``cloud``: its nodes are made by the program ``resume`` in ``folder``, which a test writes."""
    if not ports.cloud:
        return ""
    nodes = [
        f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=16 RealMemory=16000 State=CLOUD"
        for name, port in zip(cloud_names(ports), ports.cloud, strict=True)
    ]
    parts = f"PartitionName=cloud Nodes={','.join(cloud_names(ports))} MaxTime=INFINITE State=UP DefMemPerCPU=500"
    power = (
        f"ResumeProgram={folder}/resume\nSuspendProgram=/bin/true\nSuspendTime=86400\nResumeTimeout=30\n"
        "SuspendExcParts=gpu,urgent\nSuspendTimeout=1\n"
    )
    return "\n".join([*nodes, parts, power])


def _gres(folder: Path, shape: Shape, ports: Dependencies) -> str:
    if not shape.gpus:
        return ""
    files = f"{folder}/gpu[0-{shape.gpus - 1}]" if shape.gpus > 1 else f"{folder}/gpu0"
    lines = [f"NodeName={name} Name=gpu Type=h100 File={files}" for name in node_names(ports)]
    return "\n".join(["AutoDetect=off", *lines, ""])


def _slurmdbd(folder: Path, ports: Dependencies) -> str:
    return f"""AuthType=auth/none
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={ports.accounting}
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={ports.database}
StorageUser=root
StoragePass=x
StorageLoc=slurm_acct
CommitDelay=1
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
"""


def mariadb_command(folder: Path, ports: Dependencies) -> list[str]:
    """A small, private MariaDB: no grants, no durability; its data is worth nothing after the test."""
    return [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={folder}/mysql",
        f"--socket={folder}/run/m.sock",
        f"--pid-file={folder}/run/mysqld.pid",
        "--bind-address=127.0.0.1",
        f"--port={ports.database}",
        "--skip-grant-tables",
        "--innodb-buffer-pool-size=32M",
        "--innodb-flush-log-at-trx-commit=0",
        "--performance-schema=OFF",
    ]
