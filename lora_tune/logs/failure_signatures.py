"""The failure texts that are recognised in logs: one table, most telling first, and the noise of healthy logs.

Where several appear in a log, ``failure_evidence`` weighs them: by where in the log they stand, by their ``Weight``,
and then by their place in this table. No signature may appear in the run of a successful log; many frightening lines
do (``NCCL WARN ... Failed to execute operation Close``, ``PMIX ERROR: ERROR in file gds_...``, ``gdrcopy open
failed``), so patterns are as narrow as the known texts allow.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum, StrEnum


class FailureKind(StrEnum):
    """What a failure says about the trial's parameters, and so what is done about it."""

    INFEASIBLE = "infeasible"
    """These parameters cannot run here, as far as one attempt can tell."""
    FLAKY = "flaky"
    """Comes and goes: the same attempt again, elsewhere."""
    INFRASTRUCTURE = "infrastructure"
    """A node, the network, a disk, the container: says nothing about the parameters."""
    CONFIGURATION = "configuration"
    """Every trial would fail like this until the user fixes it."""
    PREEMPTED = "preempted"
    """The cluster wanted the nodes back."""
    HELD = "held"
    """Somebody held the job back in the queue until it was given up."""
    DRAINED = "drained"
    """The nodes that it could run on were drained, down or reserved until it was given up."""
    UNSATISFIABLE = "unsatisfiable"
    """The cluster accepted the job and can never run it."""
    DIVERGED = "diverged"
    """The loss is no number any more."""
    CLOCK = "clock"
    """The log's time stamps cannot be true: it is measured again."""
    FOREIGN = "foreign"
    """The log, or a record beside it, is another attempt's: it is run again."""
    MISMATCH = "mismatch"
    """The log announces other hyperparameters than the trial was given."""
    IMPLAUSIBLE = "implausible"
    """The log states a loss that no loss can be."""
    UNREAD = "unread"
    """Nothing in its log is what the study says its evals look like."""
    UNKNOWN = "unknown"
    NONE = ""
    """It did not fail."""


class Weight(IntEnum):
    """How much a failure text says of the cause; the smaller, the more."""

    VERDICT = 0
    """The scheduler's own statement why the job ended."""
    CAUSE = 1
    """Names the cause itself: no memory, a faulty GPU, a refused value, an uncaught exception about a missing file."""
    CONSEQUENCE = 2
    """What the other ranks print when one of them broke."""
    EXCEPTION = 3
    """Any other exception of Python."""
    REMARK = 4
    """What a shell or a tool remarks while its script goes on."""
    ENDED = 5
    """Somebody or something ended the processes; the reason is elsewhere."""


@dataclass(frozen=True, slots=True)
class Signature:
    """One failure text. ``anchor`` is literal text that every matching line holds: only lines with it are tried.

    certain: the same values fail again, wherever they run.
    """

    name: str
    kind: FailureKind
    anchor: bytes
    pattern: re.Pattern[bytes]
    remedy: str
    weight: Weight = Weight.CAUSE
    certain: bool = False


def _signature(
    name: str,
    kind: FailureKind,
    anchor: str,
    pattern: str,
    remedy: str,
    weight: Weight = Weight.CAUSE,
    *,
    certain: bool = False,
) -> Signature:
    return Signature(name, kind, anchor.encode(), re.compile(pattern.encode()), remedy, weight, certain)


_I, _F, _S = FailureKind.INFEASIBLE, FailureKind.FLAKY, FailureKind.INFRASTRUCTURE
_C, _P, _D = FailureKind.CONFIGURATION, FailureKind.PREEMPTED, FailureKind.DIVERGED
_U = FailureKind.UNKNOWN


SIGNATURES = (
    # The scheduler's own words.
    _signature(
        "preempted",
        _P,
        "CANCELLED",
        r"CANCELLED AT .{1,40} DUE TO (?:PREEMPTION|JOB REQUEUE)",
        "nothing to fix: it is run again",
        Weight.VERDICT,
    ),
    _signature(
        "node failure",
        _S,
        "NODE",
        r"DUE TO NODE FAILURE|NODE_FAIL",
        "run it on another node and report this one",
        Weight.VERDICT,
    ),
    _signature(
        "time limit",
        _C,
        "CANCELLED",
        r"CANCELLED AT .{1,40} DUE TO TIME LIMIT",
        "raise budget.trial_minutes, or WALLTIME",
        Weight.VERDICT,
    ),
    # Our own recipes: they name the variable, what came and what is allowed.
    _signature(
        "refused layout",
        _I,
        "_lora: ",
        r"(?:nemo|bridge|peft)_lora: "
        r"(?:(?:TP|PP|VP|CP|SP|MBS|MINIBS|SEQ|MAX_SEQLEN|MAX_STEPS|WARMUP_STEPS|GLOBAL_BATCH_SIZE)=\S+ ?)+: |"
        r"(?:nemo|bridge|peft)_lora: (?:TP_COMM_OVERLAP|MCORE_CUDA_GRAPH|CPU_OFFLOADING|DDP_OVERLAP_PARAM_GATHER)=",
        "these values do not go together: exclude them from the space",
        certain=True,
    ),
    _signature(
        "refused by the recipe",
        _C,
        "_lora: ",
        r"(?:nemo|bridge|peft)_lora: (?!rank \d)",
        "the line says what is allowed: fix the study, its data or its model",
    ),
    _signature("warm worker", _S, "LORA_TUNE_WORKER", r"the worker died", "start the warm worker of this node again"),
    # Memory.
    _signature(
        "GPU memory",
        _I,
        "emory",
        r"(?:CUDA|HIP) out of memory|OutOfMemoryError|CUDA error: out of memory",
        "more TP or CP, a smaller MBS, or activation recomputing; else this layout does not fit",
    ),
    _signature(
        "GPU memory",
        _I,
        "_STATUS_",
        r"CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
        "more TP or CP: the GPU's memory is full",
    ),
    _signature(
        "host memory",
        _I,
        "oom",
        r"oom[-_]kill|oom_reaper|OOM [Kk]illed",
        "ask for more host memory (--mem=0), or use fewer data workers",
    ),
    _signature(
        "host memory",
        _I,
        "emory",
        r"Cannot allocate memory",
        "ask for more host memory (--mem=0), or use fewer data workers",
    ),
    # What the parameters or the study get wrong.
    _signature(
        "val_check_interval",
        _C,
        "must be less than or equal",
        r"val_check_interval.{1,80}must be less than or equal",
        "lower VAL_CHECK_INTERVAL: it must not exceed the number of training batches",
        certain=True,
    ),
    _signature(
        "layout",
        _I,
        "divisible",
        r"(?i)(?:world.?size|batch|heads|query.?groups|layers|sequence|hidden.?size|parallel)"
        r".{0,120}(?:not|must be|should be|has to be) divisible",
        "this combination of TP, PP, CP and batch size does not divide: exclude it from the space",
        certain=True,
    ),
    _signature(
        "userbuffers",
        _I,
        "peration not supported",
        r"(?i)(?:userbuffers|\bub_|multicast|comm.gemm).{0,200}operation not supported"
        r"|operation not supported.{0,200}(?:userbuffers|multicast|comm.gemm)",
        "TP overlap needs multicast, which is not there: set UB_SKIPMC=1 or TP_COMM_OVERLAP=False",
    ),
    _signature(
        "unsupported",
        _S,
        "peration not supported",
        r"(?i)(?:CUDA|NCCL|error).{0,120}operation not supported",
        "driver or fabric lack this feature: compare the node with one that works (nvidia-smi, fabric manager)",
    ),
    _signature(
        "spank",
        _C,
        "_do_option_cb",
        r"_do_option_cb\(\): Assertion",
        "give GPU resources explicitly to srun: SLURM_GRES (for example gpu:8) in the site's environment",
    ),
    _signature(
        "variable not set",
        _C,
        " not set",
        r": [A-Za-z_]\w*: [A-Za-z_]\w* not set|parameter null or not set",
        "set this variable in the site's environment or in config_common.sh",
        certain=True,
    ),
    _signature(
        "unbound variable",
        _C,
        "unbound variable",
        r"\w: unbound variable",
        "set this variable in the site's environment or in config_common.sh",
        certain=True,
    ),
    _signature(
        "mount check",
        _C,
        "rror",
        r"(?i)RuntimeError.{0,80}\bmount|mount.?check.{0,200}RuntimeError",
        "data or model are not where run.sub looks: check DATADIR and MODEL (python -m lora_tune.doctor)",
    ),
    _signature(
        "CPU binding",
        _C,
        "> is invalid",
        r"<[\d,:-]+> is invalid",
        "the node dedicates CPUs: set SLURM_CPU_BIND=none in the site's environment, or bind to CPUs that are there",
    ),
    _signature(
        "CPU binding",
        _C,
        "rror",
        r"CPU binding outside of job step allocation",
        "set SLURM_CPU_BIND=none in the site's environment",
    ),
    _signature(
        "CPU binding",
        _C,
        "rror",
        r"[Uu]nable to satisfy cpu bind request",
        "set SLURM_CPU_BIND=none in the site's environment",
    ),
    _signature(
        "MPI start-up",
        _C,
        "PMI",
        r"PMI2?_Init failed|PMIX?_Init.{0,40}(?:fail|error)|PMI2? (?:server|client) .{0,40}(?:fail|error)"
        r"|pmix_server_init|PMIx_server_init|OPAL ERROR.{0,80}PMI|PMI.{0,40}not (?:supported|available|found)",
        "choose the other MPI type: SLURM_MPI_TYPE=pmix or pmi2 in the site's environment (srun --mpi=list shows them)",
    ),
    _signature(
        "MPI type",
        _C,
        "rror",
        r"MPI: Cannot create context|[Ii]nvalid MPI type|error: MPI:|MPI_INIT was called|PMPI_Init",
        "choose another MPI type: SLURM_MPI_TYPE in the site's environment (srun --mpi=list shows them)",
    ),
    _signature(
        "MPI type",
        _C,
        "rror",
        r"error: .{0,80}plugin name for mpi/|error: mpi/\w+",
        "choose another MPI type: SLURM_MPI_TYPE in the site's environment (srun --mpi=list shows them)",
    ),
    # What is missing.
    _signature(
        "container",
        _C,
        "rror",
        r"pyxis: (?:failed to import|couldn't start|child \d+ failed|container start failed)",
        "check CONT: the image must be readable on the node, and enroot's folders have space",
    ),
    _signature(
        "container",
        _C,
        "unrecognized option",
        r"unrecognized option .{0,4}--container-",
        "this node lacks pyxis: srun --help must show --container-image",
    ),
    _signature("container", _C, "rror", r"nvidia-container-cli: .{0,200}error", "driver and container do not fit"),
    _signature(
        "disk full", _S, "No space left", r"No space left on device", "free space on the node or on the shared disk"
    ),
    _signature("disk full", _S, "quota exceeded", r"quota exceeded", "free space: the quota is used up"),
    _signature(
        "module missing",
        _C,
        "No module named",
        r"Error: No module named|: No module named \S",
        "install this module in the trial's container or environment",
    ),
    _signature(
        "import",
        _C,
        "rror",
        r"^(?:\[rank\d{1,5}\]: ?)?ImportError: .",
        "the container's libraries do not fit together: check CONT",
    ),
    _signature(
        "model access",
        _C,
        "rror",
        r"GatedRepoError|RepositoryNotFoundError|LocalEntryNotFoundError|OfflineModeIsEnabled|40[13] Client Error",
        "the model cannot be fetched: download it first and name its folder, or give a token",
    ),
    _signature(
        "checkpoint",
        _C,
        "rror",
        r"Error\(s\) in loading state_dict|SafetensorError|invalid header or archive is corrupted",
        "the checkpoint does not fit the model or is damaged: check MODEL",
    ),
    _signature(
        "checkpoint",
        _C,
        "xception",
        r"Checkpoint(?:ing)?Exception: .",
        "the checkpoint does not fit the model or is damaged: check MODEL",
    ),
    _signature(
        "data keys",
        _C,
        "rror",
        r"KeyError: .",
        "data or configuration lack this key: check DATADIR and the format of the data",
        Weight.EXCEPTION,
    ),
    _signature(
        "file missing",
        _C,
        "o such file",
        r"FileNotFoundError|(?:python\d?|torchrun|execve\(\)|srun): .{0,300}No such file or directory",
        "this file is not there as the node sees it: check the study's paths and the mounts",
    ),
    _signature(
        "file missing",
        _C,
        "o such file",
        r"(?:line \d+|bash|sh): .{0,300}No such file or directory",
        "this file is not there as the node sees it: check the study's paths and the mounts",
        Weight.REMARK,
    ),
    _signature(
        "command missing",
        _C,
        "ommand not found",
        r": command not found",
        "this command is not on the node's PATH",
        Weight.REMARK,
    ),
    _signature(
        "permission",
        _C,
        "ermission denied",
        r"PermissionError|(?:tee|execve\(\)): .{0,300}Permission denied",
        "the user may not do this there: check owner and mode as the node sees them",
    ),
    _signature(
        "permission",
        _C,
        "ermission denied",
        r"(?:line \d+|bash|mkdir|touch): .{0,300}Permission denied",
        "the user may not do this there: check owner and mode as the node sees them",
        Weight.REMARK,
    ),
    _signature(
        "permission",
        _C,
        "a password is required",
        r"sudo: a password is required",
        "let sudo run without a password on the nodes, or switch its steps off: CLEAR_CACHES=0, VBOOST_VALUE=0",
        Weight.REMARK,
    ),
    _signature(
        "arguments", _C, "rror", r"\w\.py: error: \S", "the trial's program refuses its command line", certain=True
    ),
    _signature(
        "Slurm request",
        _C,
        "rror",
        r"(?:srun|sbatch|salloc): error: .{0,120}(?:[Ii]nvalid|Unable to (?:allocate|create)|not available"
        r"|not permitted|Requested node)",
        "the cluster refuses what was asked for: check the site's partition, account, gres and time",
    ),
    _signature(
        "kernel image",
        _C,
        "rror",
        r"no kernel image is available",
        "the container does not know this GPU: take one that was built for it",
    ),
    _signature(
        "duplicate GPU",
        _C,
        "Duplicate GPU",
        r"Duplicate GPU detected",
        "more tasks than GPUs on a node: check --ntasks-per-node and DGXNGPU",
    ),
    # The GPU.
    _signature("GPU hardware", _S, "NVRM", r"NVRM: Xid", "report the node: its driver logged a GPU fault (dmesg)"),
    _signature(
        "GPU hardware",
        _S,
        "rror",
        r"[Uu]ncorrectable (?:ECC|NVLink) error|cudaErrorECCUncorrectable|CUDA error: hardware",
        "report the node: its GPU or GPU memory is faulty",
    ),
    _signature("GPU hardware", _S, "NVRM", r"fallen off the bus", "report the node: it lost a GPU"),
    _signature(
        "no GPU",
        _S,
        "rror",
        r"No CUDA GPUs are available|no CUDA-capable device",
        "the job sees no GPU: check --gres, and the driver on this node",
    ),
    _signature("no GPU", _S, "rror", r"Found no NVIDIA driver", "this node has no working GPU driver"),
    _signature(
        "CUDA",
        _F,
        "rror",
        r"CUDA error: (?:an illegal memory access|unspecified launch|device-side assert|misaligned|unknown)"
        r"|cudaError(?:IllegalAddress|LaunchFailure)|CUDNN_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR)"
        r"|CUBLAS_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|NOT_INITIALIZED)",
        "run it again; if it comes back with the same layout, exclude the layout",
    ),
    # The loss.
    _signature(
        "NaN",
        _D,
        "rror",
        r"(?i)found NaN in|NaN or Inf (?:found|detected)|NaN (?:loss|detected)|(?:loss|grad norm) is NaN",
        "lower the learning rate, or warm up for longer",
    ),
    _signature(
        "NaN",
        _D,
        "nan",
        r"(?i)(?:loss|grad norm|gradients?) (?:is|are|was|became) nan|nan (?:loss|detected)",
        "lower the learning rate, or warm up for longer",
    ),
    # Consequences: something else broke, or nobody said why.
    _signature(
        "NCCL timeout",
        _S,
        "ollective operation timeout",
        r"caught collective operation timeout",
        "a rank hung: run it on another node",
        Weight.CONSEQUENCE,
    ),
    _signature(
        "NCCL",
        _S,
        "rror",
        r"DistBackendError|NCCL error|nccl(?:System|Remote|Internal|UnhandledCuda)Error|ncclInvalidUsage",
        "a rank lost the others: run it on another node; the NCCL test should show above 300 GB/s",
        Weight.CONSEQUENCE,
    ),
    _signature(
        "lost peer",
        _S,
        "onnection closed by peer",
        r"gloo.*Connection closed by peer",
        "a rank died: its own lines say why; else run it on another node",
        Weight.CONSEQUENCE,
    ),
    _signature(
        "rendezvous",
        _S,
        "rror",
        r"Rendezvous(?:Timeout|Connection|Closed)Error|DistStoreError|DistNetworkError|EADDRINUSE",
        "the ranks did not find each other; another job may hold their port on this node: run it elsewhere",
        Weight.CONSEQUENCE,
    ),
    _signature(
        "file system",
        _S,
        "tale file handle",
        r"Stale file handle",
        "the shared disk failed on this node: run it elsewhere and report the node",
    ),
    _signature(
        "file system",
        _S,
        "rror",
        r"Input/output error",
        "a disk failed on this node: run it elsewhere and report the node",
    ),
    _signature(
        "crash",
        _F,
        "egmentation fault",
        r"Segmentation fault",
        "run it on another node; if it comes back, container and layout do not fit",
    ),
    _signature("crash", _F, "SIG", r"SIGSEGV", "run it on another node"),
    _signature("crash", _F, "rror", r"\bBus error\b", "raise /dev/shm or --mem, or run it on another node"),
    _signature("crash", _F, "SIG", r"SIGBUS", "raise /dev/shm or --mem, or run it on another node"),
    _signature(
        "crash",
        _F,
        "SIG",
        r"SIGABRT",
        "run it on another node",
        Weight.ENDED,
    ),
    _signature("crash", _C, "rror", r"Illegal instruction", "the container was not built for this CPU"),
    # Any other exception of Python: its own words say most.
    _signature(
        "exception",
        FailureKind.UNKNOWN,
        "rror",
        r"^(?:\[rank\d+\]: ?)?(?:[a-zA-Z_][\w.]{0,100}\.)?[A-Z]\w{0,60}Error(?:: .|\s*$)",
        "read the lines above this one in the job's log",
        Weight.EXCEPTION,
    ),
    _signature(
        "exception",
        FailureKind.UNKNOWN,
        "xception",
        r"^(?:\[rank\d+\]: ?)?(?:[a-zA-Z_][\w.]{0,100}\.)?(?:[A-Z]\w{0,60})?Exception(?:: .|\s*$)",
        "read the lines above this one in the job's log",
        Weight.EXCEPTION,
    ),
    # Somebody or something ended it.
    _signature(
        "killed",
        _S,
        "Killed",
        r"(?:^|\s)Killed(?:\s|$)",
        "by the kernel for memory, or by hand: see dmesg",
        Weight.ENDED,
    ),
    _signature(
        "killed",
        _S,
        "SIG",
        r"SIGKILL",
        "by the kernel for memory, or by hand: see the node's dmesg",
        Weight.ENDED,
    ),
    _signature(
        "terminated",
        _S,
        "Terminated",
        r"(?:^|[\s:])Terminated(?:\s|$)",
        "somebody ended it: run it again",
        Weight.ENDED,
    ),
    _signature(
        "terminated",
        _S,
        "SIG",
        r"signal.{0,20}SIGTERM|SIGTERM.{0,20}signal",
        "somebody ended it",
        Weight.ENDED,
    ),
    _signature(
        "cancelled",
        _S,
        "CANCELLED",
        r"\*\*\* (?:JOB|STEP) .{1,60} CANCELLED AT",
        "somebody cancelled it",
        Weight.ENDED,
    ),
)
"""The most telling first. A line is matched without its ``srun -l`` label, its first 4,096 bytes."""

NOISE = re.compile(
    rb"/etc/(?:dgx|os)-release: No such file"  # every machine that is not a DGX
    rb"|enroot: (?:command )?not found"  # the clean-up of containers on a node that has none
    rb"|modprobe: (?:FATAL|ERROR|WARNING)"
    rb"|/(?:sys|proc)/\S+: (?:No such file|Permission denied)"  # what describes a system tries many places
)
"""Lines that healthy launch scripts print and go on: never evidence, wherever they stand."""
