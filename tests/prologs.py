"""What run.sub prints around a training on two kinds of machine, for tests of what is evidence and what is not.

Written anew from the facts of the public scripts of v4.1 to v5.1: which steps they run, and what those programs print.
The programs' own words are those of the stand-in's ``prolog.sh``; here stand the script's, and a few worse faults.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

_PROGRAMS = Path(__file__).parent / "standin" / "prolog.sh"


def printed(step: str, machine: str) -> str:
    """What a step of the prolog prints, both streams in order, on a machine of that kind ("dgx" or "other")."""
    environment = {"CONT": "/images/lora.sqsh", "STANDIN_MACHINE": machine, "STANDIN_NCCL_BANDWIDTH": "334.5"}
    environment["PATH"] = "/usr/bin:/bin"
    done = subprocess.run(
        ["bash", str(_PROGRAMS), step], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    return done.stdout.decode()


_STEPS = """PROLOG_START 1760000000
+ : /images/lora.sqsh
using MASTER_ADDR "n1" of list "n1"
{cleanup}{host}
{import_}{fabric}{clocks}NCCL_TEST = 1
{nccl}Mount verification passed
PROLOG_STOP 1760000060
EXPERIMENT_START 1760000060
Beginning trial 1 of 1
:::DLPAL /images/lora.sqsh 17 1 n1 unknown DGXH100_1x8x4xtp4pp1cp1
{sysjson}
:::GITCOMMITID 0123456 89abcde
{caches}
"""

RUN_BEGINS = "RUNANDTIME_START 1760000070\n"
RUN_ENDS = """RUNANDTIME_STOP 1760001700
Traceback (most recent call last):
FileNotFoundError: [Errno 2] No such file or directory: '/results/compliance_run.out'
EXPERIMENT_STOP 1760001701
"""


def _prolog(machine: str, *, cleanup: str, host: str, nccl: str, sysjson: str) -> str:
    """The whole prolog of a machine of that kind; given is what the script's own steps add to the programs' words."""
    return _STEPS.format(
        cleanup=cleanup,
        host=host,
        import_=printed("import", machine),
        fabric=printed("fabric", machine),
        clocks=printed("clocks", machine),
        nccl=printed("nccl", machine) + nccl,
        sysjson=f"{sysjson}:::SYSJSON {printed('sysjson', machine)}",
        caches=printed("caches", machine),
    )


DGX = _prolog("dgx", cleanup="", host="++ echo 'DGX OS 6 / NVIDIA DGX H100 6.1.0'", nccl="", sysjson="")
"""A machine where every step does what its author saw."""

OTHER = _prolog(
    "other",
    cleanup="/bin/bash: line 1: enroot: command not found\n",
    host="/usr/bin/bash: line 2: /etc/dgx-release: No such file or directory\n"
    "slurmstepd: error: execve(): ibv_devinfo: No such file or directory\n"
    "srun: error: n1: task 0: Exited with exit code 2",
    nccl="slurmstepd: error: *** STEP 17.5 ON n1 CANCELLED AT 2025-10-09T08:54:10 DUE TO TIME LIMIT ***\n"
    "srun: error: n1: task 0: Terminated\n"
    "all_reduce_perf_mpi: Test NCCL failure common.cu:958 'unhandled cuda error'\n",
    sysjson='ls: cannot access "/proc/driver/nvidia": No such file or directory\n'
    "srun: error: n1: task 0: Exited with exit code 1\n",
)
"""Any other machine, rented and half set up, whose run.sub goes on in spite of everything."""
