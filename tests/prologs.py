"""What run.sub prints around a training on two kinds of machine, for tests of what is evidence and what is not.

Written anew from the facts of the public scripts of v4.1 to v5.1: which steps they run, and what those programs print.
"""

from __future__ import annotations

_STEPS = """PROLOG_START 1760000000
+ : /images/lora.sqsh
using MASTER_ADDR "n1" of list "n1"
{cleanup}{host}
pyxis: importing docker image: /images/lora.sqsh
[INFO] Fetching image manifest list
[INFO] Extracting squashfs filesystem...
pyxis: imported docker image: /images/lora.sqsh
{fabric}
gpu_name, gpu_bus_id, vbios_version
NVIDIA H100 80GB HBM3, 00000000:1B:00.0, 96.00.89.00.01
NCCL_TEST = 1
# nThread 1 nGpus 1 minBytes 65011712 maxBytes 65011712 step: 1048576(bytes) warmup iters: 5 iters: 20 validation: 1
#  Rank  0 Group  0 Pid   4711 on         n1 device  0 [0x1b] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
    65011712      32505856      half     sum      -1    341.2  190.56  333.48      0    339.1  191.74  335.55    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 334.5
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

DGX = _STEPS.format(
    cleanup="",
    host="++ echo 'DGX OS 6 / NVIDIA DGX H100 6.1.0'",
    fabric="HCA list:\n    mlx5_0\n    mlx5_1\n"
    "\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\tPXB\t0-55,112-167\t0\n0:     CliqueId : 0",
    nccl="",
    sysjson=':::SYSJSON {"submitter":"x","division":"closed","host_processor_model_name":"Intel(R) Xeon(R) 8480C"}',
    caches="Clearing cache on n1\nvm.drop_caches = 3",
)
"""A machine where every step does what its author saw."""

OTHER = _STEPS.format(
    cleanup="/bin/bash: line 1: enroot: command not found\n",
    host="/usr/bin/bash: line 2: /etc/dgx-release: No such file or directory",
    fabric="Failed to get IB devices list: Function not implemented\n"
    "slurmstepd: error: execve(): ibv_devinfo: No such file or directory\n"
    "srun: error: n1: task 0: Exited with exit code 2\n"
    "/usr/bin/bash: line 1: nvidia-smi: command not found\nmodprobe: FATAL: Module nvidia_peermem not found.",
    nccl="n1:1:2 [0] misc/ibvwrap.cc:199 NCCL WARN Call to ibv_open_device failed\n"
    "slurmstepd: error: *** STEP 17.5 ON n1 CANCELLED AT 2025-10-09T08:54:10 DUE TO TIME LIMIT ***\n"
    "srun: error: n1: task 0: Terminated\n"
    "all_reduce_perf_mpi: Test NCCL failure common.cu:958 'unhandled cuda error'\n",
    sysjson="/usr/local/bin/mlperf-sysjson.sh: line 51: /sys/devices/virtual/dmi/id/product_name: Permission denied\n"
    "/usr/local/bin/mlperf-sysjson.sh: line 60: ibstat: command not found\n"
    'ls: cannot access "/proc/driver/nvidia": No such file or directory\n:::SYSJSON {"submitter":"x"}',
    caches="sudo: a terminal is required to read the password\nsudo: a password is required",
)
"""Any other machine, rented and half set up, whose run.sub goes on in spite of everything."""
