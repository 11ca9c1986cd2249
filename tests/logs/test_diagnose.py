"""Why attempts fail: every known failure text gets its class, and no successful log has any."""

from __future__ import annotations

import gzip
import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.launchers.base import JobState
from lora_tune.logs import failures as evidence
from lora_tune.logs import failures as module
from lora_tune.logs.failures import SIGNATURES, Diagnosis, FailureKind, FailureScanner, diagnose, most_telling, redact
from lora_tune.logs.guess import guess
from lora_tune.logs.lines import is_eval_line
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Eval, RunLog, TrainPoint
from tests import prologs

FAILURES = [
    # The scheduler.
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2025-04-21T14:07:43 DUE TO PREEMPTION ***", "preempted"),
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2025-04-21T14:07:43 DUE TO JOB REQUEUE ***", "preempted"),
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2025-04-21T14:07:43 DUE TO NODE FAILURE ***", "infrastructure"),
    ("lora-tune: its job was started a second time; the first run did not end by itself", "infrastructure"),
    (
        "slurmstepd: error: *** STEP 513.21 ON n2 CANCELLED AT 2025-04-21T14:07:43 DUE TO TIME LIMIT ***",
        "configuration",
    ),
    ("slurmstepd: error: *** JOB 17 ON n1 CANCELLED AT 2025-04-21T14:07:43 ***", "infrastructure"),
    ("State=NODE_FAIL", "infrastructure"),
    ("srun: error: Unable to confirm allocation for job 2: Invalid job id specified", "infrastructure"),
    ("srun: error: Unable to confirm allocation for job 1: Job is pending execution", "infrastructure"),
    ("srun: error: n12: tasks 24-27: Terminated", "infrastructure"),
    ("/opt/run.sub: line 88: 4711 Terminated              srun -l bash", "infrastructure"),
    ("./run_and_time.sh: line 70: 12345 Killed   torchrun train.py", "infrastructure"),
    # Our own recipes.
    ("nemo_lora: TP=3 PP=1 CP=1: allowed is a product that divides the 8 processes", "infeasible"),
    ("nemo_lora: MBS=2: allowed is a divisor of MINIBS=3", "infeasible"),
    ("bridge_lora: CP=8: allowed is a divisor of the 4 key-value heads of a tensor-parallel rank", "infeasible"),
    (
        "bridge_lora: FP4=1 needs a GPU of compute capability 10.0 (Blackwell) or newer; NVIDIA H200 has 9.0",
        "configuration",
    ),
    ("nemo_lora: TP_COMM_OVERLAP=1: allowed is 0 unless TP is at least 2 and SP=1", "infeasible"),
    ("nemo_lora: DATADIR='data': allowed is an existing folder", "configuration"),
    ("peft_lora: /data/train.npy: row 1 has no input_ids", "configuration"),
    ("packed_lora: LR='much': allowed is a number above 0 and at most 10", "configuration"),
    ("packed_lora: LOAD_IN_4BIT=nf4: this pack has nothing; trials of one pack share it", "configuration"),
    ("packed_lora: SEQ=1024: allowed is at most the model's 512 positions", "infeasible"),
    ("packed_lora: TP=2: a trial in a pack has one process; allowed is 1", "infeasible"),
    ("packed_lora: raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "infeasible"),
    ("packed_lora: raised torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "flaky"),
    ("nemo_lora: FP8=1 needs Transformer Engine, which cannot be imported here; install it", "configuration"),
    ("LORA_TUNE_WORKER='/tmp/w.sock': the worker died; its trials died with it", "infrastructure"),
    (
        "nemo_lora: rank 0: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
        "infrastructure",
    ),
    ("nemo_lora: rank 2: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "infeasible"),
    # Limits and services of a site, and what is no lack of the host's memory.
    (
        "n3:1:2 [7] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_create_cq failed with error Cannot allocate memory",
        "infrastructure",
    ),
    (
        "n3:1:2 [0] misc/ibvwrap.cc:222 NCCL WARN Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        "infrastructure",
    ),
    ("n3:1:2 [0] include/alloc.h:190 NCCL WARN Cuda failure 'out of memory'", "infeasible"),
    ("n3:1:2 [0] include/alloc.h:190 NCCL WARN Cuda failure 2 'out of memory'", "infeasible"),
    (
        "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: "
        "https://huggingface.co/api",
        "infrastructure",
    ),
    (
        """requests.exceptions.ReadTimeout: (ReadTimeoutError("HTTPSConnectionPool(host='huggingface.co', port=443): """
        """Read timed out. (read timeout=10)"), '(Request ID: 1)')""",
        "infrastructure",
    ),
    (
        "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])",
        "configuration",
    ),
    ("OSError: [Errno 24] Too many open files: '/data/x.bin'", "configuration"),
    ("bash: fork: retry: Resource temporarily unavailable", "infrastructure"),
    (
        "OpenBLAS blas_thread_init: pthread_create failed for thread 12 of 64: Resource temporarily unavailable",
        "infrastructure",
    ),
    (
        "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update it",
        "infrastructure",
    ),
    ("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version", "infrastructure"),
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
        "NumCudaDevices() that might have already set an error? Error 802: system not yet initialized",
        "infrastructure",
    ),
    ("cp: Fehler beim Schreiben von 'x': Auf dem Gerät ist kein Speicherplatz mehr verfügbar", "infrastructure"),
    ("cp: Fehler beim Schreiben von 'x': Der zugewiesene Plattenplatz (Quota) ist überschritten", "infrastructure"),
    ("cp: erreur d'écriture de 'x': Aucun espace disponible sur le périphérique", "infrastructure"),
    ("cp: erreur d'écriture de 'x': Débordement du quota d'espace disque", "infrastructure"),
    # Full disks and quotas, as other languages, libraries and errno say it.
    ("OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar: '/data/x'", "infrastructure"),
    ("OSError: [Errno 122] Débordement du quota d'espace disque", "infrastructure"),
    ("cp: error al escribir 'x': No queda espacio en el dispositivo", "infrastructure"),
    ("cp: error al escribir 'x': Se ha excedido la cuota de disco", "infrastructure"),
    ("cp: errore scrivendo 'x': Spazio esaurito sul dispositivo", "infrastructure"),
    ("cp: errore scrivendo 'x': Quota disco superata", "infrastructure"),
    ("cp: erro de escrita em 'x': Não há espaço disponível no dispositivo", "infrastructure"),
    ("cp: 写入'x' 时出错: 设备上没有空间", "infrastructure"),
    ("cp: 写入'x' 时出错: 超出磁盘限额", "infrastructure"),
    ("cp: 'x' の書き込みエラー: デバイスに空き領域がありません", "infrastructure"),
    ("cp: ошибка записи 'x': На устройстве не осталось свободного места", "infrastructure"),
    ("cp: błąd zapisu 'x': Brak miejsca na urządzeniu", "infrastructure"),
    ("cp: fout bij schrijven van 'x': Geen ruimte meer over op apparaat", "infrastructure"),
    (
        "RuntimeError: [enforce fail at inline_container.cc:603] . PytorchStreamWriter failed writing file data/7: "
        "file write failed",
        "infrastructure",
    ),
    (
        "safetensors_rust.SafetensorError: Error while serializing: I/O error: Disk quota exceeded (os error 122)",
        "infrastructure",
    ),
    ("RuntimeError: Not enough disk space. Needed: 12.00 GiB (download: 6.00 GiB)", "infrastructure"),
    # Locked memory.
    (
        "[1745:n3] ib_md.c:309 UCX ERROR ibv_reg_mr(address=0x7f, length=8192) failed: Cannot allocate "
        "memory : Please set max locked memory (ulimit -l) to 'unlimited' (current: 8192 kbytes)",
        "infrastructure",
    ),
    (
        "The OpenFabrics (openib) BTL failed to initialize while trying to allocate some locked memory.",
        "infrastructure",
    ),
    (
        "n3:1:2 [0] NCCL WARN NET/OFI Unable to register memory (type = 2) for device 0. RC: -12, Error: "
        "Cannot allocate memory",
        "infrastructure",
    ),
    (
        "/dvs/nvshmem/src/modules/transport/ibgda/ibgda.cpp:1234: non-zero status: 12 Unable to register "
        "memory, errno 12: Cannot allocate memory",
        "infrastructure",
    ),
    # NCCL.
    ("ncclUnhandledCudaError: Call to CUDA function failed. Last error: Cuda failure 'out of memory'", "infeasible"),
    ("Cuda failure 2 'out of memory'", "infeasible"),
    ("n3:1:2 [0] include/alloc.h:185 NCCL WARN Cuda failure 802 'system not yet initialized'", "infrastructure"),
    (
        "n3:1:2 [0] init.cc:416 NCCL WARN Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'",
        "infrastructure",
    ),
    (
        "n3:1:2 [0] misc/shmutils.cc:72 NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes, "
        "error: No space left on device (28)",
        "infrastructure",
    ),
    # Model hubs.
    (
        "huggingface_hub.utils._errors.HfHubHTTPError: 503 Server Error: Service Temporarily Unavailable for "
        "url: https://huggingface.co/api/models/x",
        "infrastructure",
    ),
    (
        "requests.exceptions.HTTPError: 504 Server Error: Gateway Time-out for url: https://huggingface.co/api/x",
        "infrastructure",
    ),
    (
        "'HTTP Error 429 thrown while requesting GET https://huggingface.co/x/resolve/main/config.json'",
        "infrastructure",
    ),
    (
        "huggingface_hub.errors.HfHubHTTPError: 429 Too Many Requests: you have reached your 'api' rate limit.",
        "infrastructure",
    ),
    (
        "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='cas-bridge.xethub.hf.co', port=443): "
        'Max retries exceeded with url: /x (Caused by NameResolutionError("Failed to resolve"))',
        "infrastructure",
    ),
    ("httpx.ConnectTimeout: [Errno 110] Connection timed out", "infrastructure"),
    ("httpx.ReadTimeout: The read operation timed out", "infrastructure"),
    (
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file, couldn't find it in the "
        "cached files",
        "configuration",
    ),
    ("ConnectionError: Couldn't reach 'tatsu-lab/alpaca' on the Hub (ConnectTimeout)", "infrastructure"),
    (
        "urllib3.exceptions.MaxRetryError: HTTPSConnectionPool(host='modelscope.cn', port=443): Max retries "
        "exceeded with url: /x",
        "infrastructure",
    ),
    ("socket.gaierror: [Errno -3] Temporary failure in name resolution", "infrastructure"),
    # Trackers.
    ("wandb.errors.UsageError: No API key configured. Use `wandb login` to log in.", "configuration"),
    ("wandb.errors.CommError: Run initialization has timed out after 90.0 sec.", "infrastructure"),
    (
        "wandb.errors.errors.AuthenticationError: API key verification failed. Make sure your API key is valid.",
        "configuration",
    ),
    ("neptune.exceptions.NeptuneMissingApiTokenException: ", "configuration"),
    ("ValueError: Comet.ml requires an API key. Please provide as the first argument", "configuration"),
    # Tasks.
    (
        "ValueError: You set `--ntasks=4` in your SLURM bash script, but this variable is not supported. "
        "HINT: Use `--ntasks-per-node=4` instead.",
        "configuration",
    ),
    (
        "ValueError: You set `devices=8` in Lightning, but the number of tasks per node configured in SLURM "
        "`--ntasks-per-node=1` does not match. HINT: Set `devices=1`.",
        "configuration",
    ),
    (
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1, 2, 3] "
        "But your machine only has: [0]",
        "configuration",
    ),
    (
        "RuntimeError: You set `num_nodes=2` in Lightning, but the number of nodes configured in SLURM "
        "`--nodes=1` does not match.",
        "configuration",
    ),
    # Limits of processes and files.
    ("RuntimeError: can't start new thread", "infrastructure"),
    ("BlockingIOError: [Errno 11] Resource temporarily unavailable", "infrastructure"),
    ("libgomp: Thread creation failed: Resource temporarily unavailable", "infrastructure"),
    ("OMP: Error #34: System unable to allocate necessary resources for OMP thread:", "infrastructure"),
    ("  what():  Resource temporarily unavailable", "infrastructure"),
    ("bash: fork: retry: Die Ressource ist zur Zeit nicht verfügbar", "infrastructure"),
    ("bash: fork: retry: Ressource temporairement non disponible", "infrastructure"),
    (
        "RuntimeError: unable to open shared memory object </torch_1_2> in read-write mode: Too many open files (24)",
        "configuration",
    ),
    ("RuntimeError: received 0 items of ancdata", "configuration"),
    ("OSError: [Errno 24] Zu viele offene Dateien: '/data/x.bin'", "configuration"),
    ("accept: Trop de fichiers ouverts", "configuration"),
    # Prologs, launches.
    ("srun: error: Task launch for StepId=5.0 failed on node n1: Job prolog failed", "infrastructure"),
    ("srun: error: Application launch failed: Invalid job credential", "infrastructure"),
    ("slurmstepd: error: TaskProlog failed status=256", "infrastructure"),
    ("srun: error: task launch for StepId=12.0 failed on node n2: Communication connection failure", "infrastructure"),
    ("srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1", "infrastructure"),
    ("srun: error: Timed out waiting for job step to complete", "infrastructure"),
    ("slurmstepd: error: Munge decode failed: Expired credential", "infrastructure"),
    ("srun: error: Aborting, io error and missing step on node 0", "infrastructure"),
    # Drivers.
    (
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 804: forward compatibility was "
        "attempted on non supported HW",
        "infrastructure",
    ),
    ("Failed to initialize NVML: Driver/library version mismatch", "infrastructure"),
    (
        "nvidia-container-cli: requirement error: unsatisfied condition: cuda>=12.9, please update your "
        "driver to a newer version",
        "configuration",
    ),
    ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", "infrastructure"),
    ("RuntimeError: CUDA driver initialization failed, you might not have a CUDA gpu.", "infrastructure"),
    ("RuntimeError: CUDA error: initialization error 3: cudaErrorSystemNotReady", "infrastructure"),
    # Other languages of what a shell says.
    ("mkdir: das Verzeichnis '/results' kann nicht angelegt werden: Keine Berechtigung", "configuration"),
    ("bash: Zeile 3: torchrun: Kommando nicht gefunden", "configuration"),
    ("bash: torchrun : commande introuvable", "configuration"),
    ("run.sh: Zeile 7:  4711 Speicherzugriffsfehler  python train.py", "flaky"),
    ("FileNotFoundError: [Errno 2] Datei oder Verzeichnis nicht gefunden: '/data/train.npy'", "configuration"),
    # Memory.
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", "infeasible"),
    ("RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB", "infeasible"),
    ("torch.OutOfMemoryError: HIP out of memory. Tried to allocate 2.00 GiB", "infeasible"),
    ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "infeasible"),
    ("slurmstepd: error: Detected 2 oom-kill event(s) in step 3756240.batch cgroup.", "host memory"),
    (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0. Some of the step tasks have been OOM Killed.",
        "host memory",
    ),
    ("OSError: [Errno 12] Cannot allocate memory", "host memory"),
    # Parameters and study.
    (
        "ValueError: `val_check_interval` (192) must be less than or equal to the number of the training batches (9).",
        "configuration",
    ),
    ("AssertionError: world size (8) is not divisible by tensor parallel size (3)", "infeasible"),
    ("ValueError: num_query_groups (8) must be divisible by tensor parallel size (16) parallel", "infeasible"),
    ("userbuffers.cu:123 in function create_communicator: CUDA Error: operation not supported", "infeasible"),
    ("RuntimeError: CUDA error: operation not supported", "infrastructure"),
    ("srun: spank.c:1154: _do_option_cb(): Assertion (arg) failed.", "configuration"),
    ("/mnt/run.sub: line 22: CONT: CONT not set", "configuration"),
    ("run.sub: line 24: DGXSYSTEM: parameter null or not set", "configuration"),
    ("config_common.sh: line 7: WALLTIME_RUNANDTIME: unbound variable", "configuration"),
    ("RuntimeError: mount check failed: /data/train.npy missing", "configuration"),
    ("<84-95,180-191> is invalid", "configuration"),
    ("srun: error: Unable to satisfy cpu bind request", "configuration"),
    ("srun: error: CPU binding outside of job step allocation, allocated CPUs are: 0x0F.", "configuration"),
    ("PMI2_Init failed to intialize.  Return code: 14", "configuration"),
    ("[n1:123] OPAL ERROR: Unreachable in file ext3x_client.c at line 112: PMIx client", "configuration"),
    (
        "srun: error: (null) [0] mpi_pmix.c:193: pmixp_abort_propagate: MPI: Cannot create context for mpi/pmix",
        "configuration",
    ),
    ("srun: error: Couldn't find the specified plugin name for mpi/pmix looking at all files", "configuration"),
    ("srun: error: Invalid MPI type 'pmix', --mpi=list for acceptable types", "configuration"),
    ("srun: error: Unable to allocate resources: Invalid generic resource (gres) specification", "configuration"),
    ("sbatch: error: Batch job submission failed: Requested node configuration is not available", "configuration"),
    # Missing things.
    ("slurmstepd: error: pyxis: couldn't start container", "configuration"),
    ("slurmstepd: error: pyxis: failed to import docker image", "configuration"),
    ("srun: unrecognized option '--container-image=nvcr.io/x.sqsh'", "configuration"),
    ("nvidia-container-cli: initialization error: nvml error: driver not loaded", "configuration"),
    ("OSError: [Errno 28] No space left on device", "infrastructure"),
    ("tee: /home/u/log: Disk quota exceeded", "infrastructure"),
    ("ModuleNotFoundError: No module named 'nemo'", "configuration"),
    ("/usr/bin/python: No module named torch.distributed.run", "configuration"),
    ("ImportError: libcudart.so.12: cannot open shared object file", "configuration"),
    ("huggingface_hub.errors.GatedRepoError: 401 Client Error.", "configuration"),
    ("RuntimeError: Error(s) in loading state_dict for LlamaForCausalLM:", "configuration"),
    ("safetensors_rust.SafetensorError: Error while deserializing header: HeaderTooLarge", "configuration"),
    ("megatron.core.dist_checkpointing.core.CheckpointingException: Object shard x not found", "configuration"),
    ("KeyError: 'input_ids'", "configuration"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/data/train.npy'", "configuration"),
    ("slurmstepd: error: execve(): /bin/run_and_time.sh: No such file or directory", "configuration"),
    ("run.sub: line 100: nvidia-smi: command not found", "configuration"),
    ("PermissionError: [Errno 13] Permission denied: '/results'", "configuration"),
    ("mkdir: cannot create directory '/results': Permission denied", "configuration"),
    ("sudo: a password is required", "configuration"),
    ("train.py: error: unrecognized arguments: --lora_rnak 16", "configuration"),
    ("SyntaxError: invalid syntax", "configuration"),
    ("EOFError: EOF when reading a line", "configuration"),
    # The GPU.
    ("[ 12.3] NVRM: Xid (PCI:0000:9d:00): 79, pid=1234, GPU has fallen off the bus.", "infrastructure"),
    ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "infrastructure"),
    ("RuntimeError: No CUDA GPUs are available", "infrastructure"),
    ("RuntimeError: Found no NVIDIA driver on your system.", "infrastructure"),
    ("RuntimeError: CUDA error: no kernel image is available for execution on the device", "configuration"),
    (
        "n1:1:2 [0] init.cc:943 NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 7000",
        "configuration",
    ),
    ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", "flaky"),
    ("RuntimeError: CUDA error: unspecified launch failure", "flaky"),
    # The loss.
    ("RuntimeError: Rank 3, node n1, found NaN in local grad norm in backward pass", "diverged"),
    ("Loss is nan, stopping training", "diverged"),
    # Consequences.
    (
        "[rank3]:[E602 ProcessGroupNCCL.cpp:632] [Rank 3] Watchdog caught collective operation timeout: Work",
        "infrastructure",
    ),
    (
        "[rank0]: torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2, remote process exited",
        "infrastructure",
    ),
    ("ncclSystemError: System call (e.g. socket, malloc) or external library call failed", "infrastructure"),
    ("torch.distributed.DistNetworkError: The server socket has failed to listen: EADDRINUSE", "infrastructure"),
    ("OSError: [Errno 116] Stale file handle: '/lustre/x'", "infrastructure"),
    ("OSError: [Errno 5] Input/output error", "infrastructure"),
    ("srun: error: n1: task 0: Segmentation fault (core dumped)", "flaky"),
    ("traceback : Signal 11 (SIGSEGV) received by PID 4711", "flaky"),
    ("srun: error: n1: task 3: Bus error", "flaky"),
    ("traceback : Signal 6 (SIGABRT) received by PID 4711", "flaky"),
    # Errors of the system by their numbers, which every language shares, and by the words of tools.
    ("OSError: [Errno 12] Nicht genügend Hauptspeicher verfügbar", "host memory"),
    ("cp: Nicht genügend Hauptspeicher verfügbar", "host memory"),
    ("bash: fork: Impossible d'allouer de la mémoire", "host memory"),
    ("java.lang.OutOfMemoryError: Java heap space", "host memory"),
    ("java.lang.OutOfMemoryError: unable to create new native thread", "infrastructure"),
    ("BlockingIOError: [Errno 11] Ressource temporairement non disponible", "infrastructure"),
    ("fork: Die Ressource ist zur Zeit nicht verfügbar", "infrastructure"),
    ("fork: Ressource temporairement non disponible", "infrastructure"),
    ("bash: fork: retry: No child processes", "infrastructure"),
    ("OpenBLAS blas_thread_init: RLIMIT_NPROC 4096 current, 4096 max", "infrastructure"),
    (
        "called `Result::unwrap()` on an `Err` value: Os { code: 11, kind: WouldBlock, message: "
        '"Resource temporarily unavailable" }',
        "infrastructure",
    ),
    ("OSError: [Errno 23] Trop de fichiers ouverts dans le système", "infrastructure"),
    ("accept: Too many open files in system", "infrastructure"),
    ("OSError: [Errno 30] Das Dateisystem ist nur lesbar", "configuration"),
    ("PermissionError: [Errno 13] Permission non accordée: '/results'", "configuration"),
    ("OSError: [Errno 5] Eingabe-/Ausgabefehler", "infrastructure"),
    ("OSError: [Errno 116] Veraltete Dateizugriffsnummer (file handle)", "infrastructure"),
    ("tar: x: Eingabe-/Ausgabefehler", "infrastructure"),
    ("tar: x: erreur de lecture: Erreur d'entrée/sortie", "infrastructure"),
    ("TimeoutError: [Errno 110] Connexion terminée par expiration du délai d'attente", "infrastructure"),
    ("OSError: [Errno 101] Das Netzwerk ist nicht erreichbar", "infrastructure"),
    ("cp: Fehler beim Schreiben von 'x': Débordement du quota d’espace disque", "infrastructure"),
    ("mmfs: write failed: Quota exceeded", "infrastructure"),
    ("run.sh: Zeile 3:  4711 Getötet                python train.py", "infrastructure"),
    ("run.sh : ligne 3 :  4711 Processus arrêté      python train.py", "infrastructure"),
    # Locked memory, memory of the GPU and of the host, in the words of other libraries.
    ("NCCL WARN Call to ibv_create_cq failed with error Nicht genügend Hauptspeicher verfügbar", "infrastructure"),
    ("NCCL WARN Call to ibv_modify_qp failed with error Connection timed out", "infrastructure"),
    ("Last error: Failed to CUDA calloc async 608 bytes", "infeasible"),
    ("n3:1:2 [0] NCCL WARN Failed to CUDA malloc 4194304 bytes", "infeasible"),
    ("n3:1:2 [0] NCCL WARN Failed to CUDA host alloc 4096 bytes", "host memory"),
    ("n3:1:2 [0] NCCL WARN HIP failure 'out of memory'", "infeasible"),
    ("NVSHMEM: cudaMalloc failed: out of memory", "infeasible"),
    ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory allocating 1234 bytes", "infeasible"),
    # Drivers, launches, services.
    (
        "ERROR: This container was built for NVIDIA Driver Release 570.00 or later, but version 535.104.05 was "
        "detected and compatibility mode is UNAVAILABLE.",
        "infrastructure",
    ),
    ("CUDA driver error: CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "infrastructure"),
    ("cuInit(0) failed: CUDA_ERROR_SYSTEM_NOT_READY", "infrastructure"),
    ("hipErrorNoDevice: no ROCm-capable device is detected", "infrastructure"),
    ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "infrastructure"),
    ("srun: error: Unable to create step for job 17: Job/step already completing or completed", "infrastructure"),
    ("srun: error: Unable to create step for job 17: Required node not available (down)", "infrastructure"),
    ("srun: error: Node failure on n1", "infrastructure"),
    ("srun: error: slurm_receive_msgs: [[n1]:6818] failed: Socket timed out on send/recv", "infrastructure"),
    ("slurmstepd: error: job_container/tmpfs: unable to mount", "infrastructure"),
    ("ORTE was unable to reliably start one or more daemons.", "infrastructure"),
    ("aiohttp.client_exceptions.ServerDisconnectedError: Server disconnected", "infrastructure"),
    ("requests.exceptions.ProxyError: HTTPSConnectionPool(host='huggingface.co', port=443)", "infrastructure"),
    ("wandb.errors.errors.CommError: returned error 403 Forbidden: permission denied", "configuration"),
    ("MissingConfigError: It seems ClearML is not configured on this machine!", "configuration"),
    ("termios.error: (25, 'Inappropriate ioctl for device')", "configuration"),
    ("ValueError: environment variable RANK expected, but not set", "configuration"),
    ("ValueError: environment variable WORLD_SIZE expected, but not set", "configuration"),
    ("ValueError: environment variable MASTER_ADDR expected, but not set", "configuration"),
    # Anything else.
    ("ValueError: the training went wrong", "unknown"),
    ("some.package.ConfigException: wrong", "unknown"),
]


def test_an_interval_beyond_the_training_is_cured_by_what_the_closed_division_leaves_free() -> None:
    (row,) = [signature for signature in SIGNATURES if signature.name == "val_check_interval"]
    assert row.remedy.startswith("raise MINIBS")


@pytest.mark.parametrize(("line", "kind"), FAILURES)
def test_each_failure_text_has_its_class(line: str, kind: str) -> None:
    log = f"0: [NeMo I 2025-04-21 14:07:43] starting\n0: {line}\n"
    found = diagnose(log, exit_code=1)
    assert found.kind == kind, found
    assert found.line == redact(line).strip()
    assert found.remedy


@pytest.mark.parametrize("prolog", [prologs.DGX, prologs.OTHER], ids=["DGX", "another machine"])
@pytest.mark.parametrize(("line", "kind"), FAILURES)
def test_no_prolog_hides_why_the_run_failed(prolog: str, line: str, kind: str) -> None:
    log = f"{prolog}{prologs.RUN_BEGINS}0: starting\n0: {line}\n{prologs.RUN_ENDS}"
    found = diagnose(log, exit_code=0)
    assert (found.kind, found.line) == (kind, redact(line).strip())


@pytest.mark.parametrize("prolog", [prologs.DGX, prologs.OTHER], ids=["DGX", "another machine"])
class TestPrologs:
    """Evidence begins where the run begins: what the scripts print before it is shown, and never the cause."""

    def test_a_healthy_run_behind_a_prolog_has_no_failure(self, prolog: str) -> None:
        run = RunLog(run_start_ms=0, evals=(Eval(8, 0.95, 1.0),))
        assert diagnose(prolog + prologs.RUN_BEGINS + "0: training\n", run=run).kind == ""

    @pytest.mark.parametrize("state", [JobState.TIME_LIMIT, JobState.CANCELLED, JobState.LOST, JobState.HOST_MEMORY])
    def test_the_schedulers_verdict_is_not_hidden(self, prolog: str, state: JobState) -> None:
        found = diagnose(prolog + prologs.RUN_BEGINS + "0: training\n", state=state.value, reason="its words")
        assert found.line == "its words"

    @pytest.mark.parametrize(("line", "kind"), FAILURES)
    def test_a_run_without_any_text_of_its_own_is_unknown(self, prolog: str, line: str, kind: str) -> None:
        """Whatever the prolog printed: the run began after it."""
        found = diagnose(f"{prolog}{line}\n{prologs.RUN_BEGINS}0: loading the model\n", exit_code=0)
        assert (found.kind, found.line) == ("unknown", "0: loading the model")

    def test_what_the_prolog_printed_is_told_as_second_reason(self, prolog: str) -> None:
        missing = "RuntimeError: mount check failed: /data missing"
        assert diagnose(f"{prolog}{missing}\n{prologs.RUN_BEGINS}0: loading\n").also == missing

    @pytest.mark.parametrize(
        ("line", "kind"),
        [
            ("sudo: a password is required", "configuration"),
            ("RuntimeError: mount check failed: /data missing", "configuration"),
            ("slurmstepd: error: pyxis: couldn't start container", "configuration"),
            ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "infrastructure"),
            ("tee: /home/u/log: Disk quota exceeded", "infrastructure"),
        ],
    )
    def test_what_ends_the_script_before_its_run_is_the_cause(self, prolog: str, line: str, kind: str) -> None:
        log = f"{prolog}{line}\nsrun: error: n1: task 0: Exited with exit code 1\n"
        log += "/bin/bash: line 1: enroot: command not found\n"  # the clean-up in its trap
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.line) == (kind, line)

    def test_the_next_of_several_runs_begins_anew(self, prolog: str) -> None:
        """NEXP=2: what the first run died of says nothing of the second."""
        begins = "Beginning trial 2 of 2\nsudo: a password is required\n" + prologs.RUN_BEGINS
        log = prolog + prologs.RUN_BEGINS + "0: torch.OutOfMemoryError: CUDA out of memory\n" + prologs.RUN_ENDS
        assert (
            diagnose(log + begins + "0: RuntimeError: CUDA error: uncorrectable ECC error\n").kind == "infrastructure"
        )


PYXIS = "slurmstepd: error: pyxis: "
START_FAILED = f"{PYXIS}couldn't start container"
REASONS = [
    f"{PYXIS}    [ERROR] URL https://registry.example/v2/x/manifests/1 returned error code: 404 Not Found",
    f"{PYXIS}    /usr/lib/enroot/docker.sh: line 337: 4711 Killed                  mksquashfs",
    f"{PYXIS}    mkdir: cannot create directory '/run/enroot': Permission denied",
    f"{PYXIS}    Write failed because No space left on device",
    f"{PYXIS}    enroot-mount: failed to mount: /data at /data: No such file or directory",
    f"{PYXIS}    FATAL ERROR:Failed to write to output filesystem",
    "[ERROR] URL https://registry.example/v2/x/manifests/1 returned error code: 401 Unauthorized",
    "/usr/lib/enroot/docker.sh: line 337: 4711 Killed                  mksquashfs",
]
AROUND = [f"{PYXIS}    [INFO] Fetching image manifest", f"{PYXIS}    Parallel mksquashfs: Using 2 processors"]


@pytest.mark.parametrize("prolog", ["", prologs.DGX, prologs.OTHER], ids=["no prolog", "DGX", "another machine"])
@pytest.mark.parametrize("reason", REASONS, ids=range(len(REASONS)))
def test_why_enroot_did_not_start_the_container_is_in_the_sentence(reason: str, prolog: str) -> None:
    """Whether its log comes before what pyxis says of it or after, and whatever else that log holds."""
    shown = " ".join(redact(reason).removeprefix(PYXIS).split())
    enroots = [AROUND[0], reason, f"{PYXIS}    FATAL ERROR:Failed to write to output filesystem", AROUND[1]]
    for lines in ([*enroots, START_FAILED], [START_FAILED, *enroots], [START_FAILED, *enroots, START_FAILED]):
        found = diagnose(prolog + "".join(f" 0: {line}\n" for line in lines), exit_code=1)
        assert shown in " ".join(found.line.split()), found
        assert "couldn't start container" in found.sentence
        assert " ".join(found.sentence.split()).count(shown) == 1, "told once"


def test_what_enroot_printed_is_no_failure_where_the_container_started() -> None:
    scanner = FailureScanner()
    scanner.feed("".join(f"{line}\n" for line in (REASONS[0], REASONS[6])).encode())
    assert most_telling(scanner.hits(), begun=False) == []
    died = "0: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
    assert diagnose(f"{REASONS[0]}\n{died}", exit_code=1).sentence == died[3:].strip()


def test_scripts_without_marks_of_their_own_are_read_by_those_of_run_and_time() -> None:
    """v4.0's run.sub and run_with_docker.sh print neither PROLOG_START nor RUNANDTIME_START."""
    log = "/usr/bin/bash: line 2: /etc/dgx-release: No such file or directory\nBeginning trial 1 of 1\n"
    log += "sudo: a password is required\nSTARTING TIMING RUN AT 2025-10-09 08:54:10 AM\n"
    log += "0: RuntimeError: CUDA error: uncorrectable ECC error\n1: STARTING TIMING RUN AT 2025-10-09 08:54:11 AM\n"
    assert diagnose(log).kind == "infrastructure"


@pytest.mark.parametrize(
    ("line", "certain"),
    [
        ("nemo_lora: TP=3 PP=1 CP=1: allowed is a product that divides the 8 processes", True),
        ("AssertionError: batch size 9 is not divisible by world size 8", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has", False),
    ],
)
def test_only_what_memory_decides_may_end_otherwise_on_another_node(line: str, certain: bool) -> None:
    found = diagnose(line, exit_code=1)
    assert (found.kind, found.certain) == ("infeasible", certain)


def test_each_failure_text_is_found_behind_labels_colours_and_progress_bars() -> None:
    for line, kind in FAILURES:
        for dressed in (f" 7: {line}", f"\x1b[31m{line}\x1b[0m", f"50%|###   |\r{line}", f"{line}\r"):
            assert diagnose(f"a\n{dressed}\nb\n", exit_code=1).kind == kind, dressed


def test_a_failure_is_found_with_a_link_or_a_cursors_movement_in_its_middle() -> None:
    text = "AssertionError: batch size 9 is not {}divisible by world size 8"
    for escape in ("\x1b]8;;https://a.b/c\x1b\\", "\x1b[2K", "\x1b[1!p", "\x1b(B", "\x1b[1m"):
        assert diagnose(text.format(escape), exit_code=1).kind == "infeasible", escape


def test_each_signature_is_shown_by_a_failure_text() -> None:
    shown = set()
    for line in (*(text for text, _ in FAILURES), *REASONS):
        scanner = FailureScanner()
        scanner.feed(line.encode() + b"\n")
        shown |= {hit.signature.name for hit in scanner.hits()}
    assert {signature.name for signature in SIGNATURES} <= shown


@pytest.mark.public_data
def test_no_log_of_a_successful_run_has_a_signature(public_data: Path) -> None:
    """1,049 successful logs hold thousands of warnings; the one that hit its time limit is told from them."""
    failed = []
    for log in sorted((public_data / "logs").rglob("*.txt.gz")):
        text = gzip.decompress(log.read_bytes())
        scanner, reader = FailureScanner(), MllogReader()
        scanner.feed(text)
        reader.feed(text)
        found = diagnose(scanner, exit_code=0, run=reader.run())
        if most_telling(scanner.hits(), begun=scanner.begun()) or found.kind:
            failed.append((log.parent.name, log.name, found.kind.value, found.line[-22:]))
    assert failed == [("9xXE9712x4GB200", "result_9.txt.gz", "configuration", " DUE TO TIME LIMIT ***")]


@pytest.mark.parametrize("step", ["import", "fabric", "clocks", "nccl"])
@pytest.mark.parametrize("machine", ["dgx", "other"])
class TestPrograms:
    """What enroot, nvidia-smi and the NCCL test print is evidence of nothing, wherever a script starts them.

    Some scripts ask nvidia-smi in run_and_time.sh, behind RUNANDTIME_START, and scripts of one's own print no marks.
    """

    def test_no_line_is_a_failure_text(self, step: str, machine: str) -> None:
        scanner = FailureScanner()
        scanner.feed(prologs.printed(step, machine).encode())
        assert [hit.line for hit in scanner.hits()] == []

    def test_no_line_looks_like_an_eval_or_like_a_log_to_read(self, step: str, machine: str) -> None:
        text = prologs.printed(step, machine)
        assert [line for line in text.splitlines() if is_eval_line(line)] == []
        assert guess(text.encode()) is None


FRIGHTENING = [
    "3: GPU-3:1:2 [3] proxy.cc:1521 NCCL WARN [Proxy Service 3] Failed to execute operation Close from rank 3",
    "2: [n1:9] PMIX ERROR: ERROR in file gds_ds12_lock_pthread.c at line 168",
    "gdrcopy open failed",
    "0: [W9 socket.cpp:752] [c10d] The client socket has failed to connect to [n9]:29500 (errno: 22 - Invalid",
    "sys:1: ResourceWarning: unclosed <socket.socket fd=9>",
    "srun: warning: can't run 1 processes on 9 nodes, setting nnodes to 1",
    "+ srun --ntasks=9 bash -c 'echo CONT not set; false || echo CUDA out of memory, Killed'",
    "++ : 'CONT: CONT not set'",
    "/usr/bin/bash: line 1: nvidia-smi: command not found",
    "/usr/local/bin/mlperf-sysjson.sh: line 60: ibstat: command not found",
    "0: loss 1.25 nan iterations: 0 | number of skipped iterations: 0 | lm loss: 1.2",
]


@pytest.mark.parametrize("line", FRIGHTENING)
def test_frightening_lines_of_healthy_runs_are_no_failures(line: str) -> None:
    scanner = FailureScanner()
    scanner.feed(line.encode() + b"\n")
    assert scanner.hits() == ()


STEP = ':::MLLOG {"time_ms": 1, "event_type": "POINT_IN_TIME", "key": "train_loss", "value": 1.3}\n'


class TestChoice:
    """Which of several texts is the cause, and what the cluster and the measurements add."""

    def test_a_job_that_was_killed_in_its_prolog_did_not_die_of_what_the_prolog_printed(self) -> None:
        log = "PROLOG_START\nrun.sub: line 100: ibstat: command not found\n+ echo NCCL_TEST = 1\n"
        assert diagnose(log, exit_code=1).kind is FailureKind.CONFIGURATION
        assert diagnose(log, exit_code=137).kind is FailureKind.INFRASTRUCTURE

    def test_an_error_that_the_training_survived_is_not_the_cause_and_is_shown_as_second_reason(self) -> None:
        log = "torch.OutOfMemoryError: CUDA out of memory; retrying with a smaller cache\n" + STEP * 5
        log += "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.also[:22]) == ("infrastructure", "torch.OutOfMemoryError")
        assert found.sentence.startswith(
            "RuntimeError: CUDA error: uncorrectable ECC error encountered (also in its log: "
        )

    def test_a_line_or_two_of_another_rank_do_not_show_that_it_was_survived(self) -> None:
        log = STEP * 9 + "3: torch.OutOfMemoryError: CUDA out of memory\n" + STEP * 2 + "0: NCCL error: remote exited\n"
        assert diagnose(log, exit_code=1).kind == "infeasible"

    def test_an_error_whose_buffered_progress_came_late_is_still_the_cause(self) -> None:
        log = "torch.OutOfMemoryError: CUDA out of memory\n" + STEP * 30
        assert diagnose(log, exit_code=1).kind == "infeasible"

    def test_what_a_shell_remarks_yields_to_any_exception(self) -> None:
        remark = "./run_and_time.sh: line 12: /opt/site/hooks: No such file or directory\n"
        for line, kind in [("ncclSystemError: lost", "infrastructure"), ("ValueError: what", "unknown")]:
            found = diagnose(f"{line}\n{remark}", exit_code=1)
            assert (found.kind, found.also) == (kind, remark.strip())
        assert diagnose(remark, exit_code=1).kind == "configuration"
        assert diagnose(remark, run=RunLog(evals=(Eval(8, 0.95, 1.0),))).kind == "", (
            "it measured, and nothing else is wrong"
        )

    def test_the_last_exception_beats_an_earlier_one(self) -> None:
        found = diagnose("ValueError: no fused kernel here, using another\n\nKeyError: 'train'\n", exit_code=1)
        assert found.line == "KeyError: 'train'"

    @pytest.mark.parametrize("state", [JobState.TIME_LIMIT, JobState.CANCELLED, JobState.LOST, JobState.HOST_MEMORY])
    def test_the_schedulers_verdict_beats_a_general_text_and_yields_to_a_specific_one(self, state: JobState) -> None:
        general, specific = "KeyError: 'x'\n", "RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
        found = diagnose(general, state=state.value, reason="its words")
        assert (found.line, found.also) == ("its words", "KeyError: 'x'")
        assert diagnose(specific, state=state.value, reason="its words").kind == "infrastructure"

    def test_memory_on_one_rank_is_the_cause_of_broken_connections_on_the_others(self) -> None:
        log = "1: torch.distributed.DistBackendError: NCCL error: remote process exited\n"
        log += "Traceback (most recent call last):\n0: torch.OutOfMemoryError: CUDA out of memory.\n"
        log += "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2025-04-21T14:07:43 ***\n"
        found = diagnose(log, exit_code=1)
        assert (found.kind, found.line) == ("infeasible", "torch.OutOfMemoryError: CUDA out of memory.")

    def test_a_training_that_failed_in_a_job_that_reads_completed(self) -> None:
        """`set +e` and `tee` lose the exit code: the log decides."""
        assert diagnose("torch.OutOfMemoryError: CUDA out of memory.\n", exit_code=0).kind == "infeasible"

    def test_a_run_that_ended_by_itself_did_not_fail(self) -> None:
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="aborted", evals=(Eval(8, 0.95, 1.0),))
        assert diagnose("Segmentation fault\n", exit_code=0, run=run) == Diagnosis()
        assert diagnose("", exit_code=0, run=RunLog(evals=(Eval(8, 0.95, 1.0),))) == Diagnosis()

    @pytest.mark.parametrize("code", [0, 1])
    def test_a_training_that_ended_before_its_first_eval_says_so_whatever_the_script_did_after_it(self, code) -> None:
        """The script's clean-up has an exit code and a last line of its own, which say nothing of the training."""
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="aborted")
        found = diagnose("+ srun --ntasks-per-node=1 /bin/bash -c cleanup\n", exit_code=code, run=run)
        assert found.kind == "configuration"
        assert "ended by itself before its first eval" in found.line
        memory = diagnose("torch.OutOfMemoryError: CUDA out of memory.\n", exit_code=code, run=run)
        assert memory.kind == "infeasible"
        assert diagnose("", exit_code=137, run=run).kind != "configuration"

    def test_a_faked_success_without_evals_is_not_one(self) -> None:
        run = RunLog(run_start_ms=0, run_stop_ms=9, status="success")
        assert diagnose("RESULT,LLM_FINETUNING\n", exit_code=0, run=run).kind == "unknown"

    @pytest.mark.parametrize(
        ("state", "kind"),
        [
            (JobState.NODE_FAILED, "infrastructure"),
            (JobState.PREEMPTED, "preempted"),
            (JobState.HOST_MEMORY, "host memory"),
            (JobState.DISPLACED, "displaced"),
            (JobState.TIME_LIMIT, "configuration"),
            (JobState.CANCELLED, "infrastructure"),
            (JobState.LOST, "infrastructure"),
        ],
    )
    def test_what_the_cluster_says(self, state: JobState, kind: str) -> None:
        found = diagnose("training\n", state=state.value, reason="as it says")
        assert (found.kind, found.line) == (kind, "as it says")
        assert diagnose("", state=state.value).line == f"the cluster says: {state.value}"

    def test_every_state_in_which_a_job_can_end_is_known(self) -> None:
        known = {"ended", *module._STATES_ABOVE_LOG, *module._STATES_BELOW_LOG}
        assert known == {state.value for state in JobState if not state.alive}

    def test_a_node_that_died_outranks_what_its_ranks_printed(self) -> None:
        assert diagnose("ncclSystemError: x\n", state="node failed").kind == "infrastructure"
        assert diagnose("CUDA out of memory\n", state="preempted").kind == "preempted"

    def test_a_hang_after_a_memory_failure_is_a_memory_failure(self) -> None:
        assert diagnose("torch.OutOfMemoryError: CUDA out of memory\n", state="time limit").kind == "infeasible"
        assert diagnose("ValueError: x\n", state="time limit").kind == "configuration"

    @pytest.mark.parametrize(
        "run",
        [
            RunLog(train=(TrainPoint(8, 1.0, 1.0), TrainPoint(16, math.nan, 2.0))),
            RunLog(evals=(Eval(8, math.inf, 1.0),), run_stop_ms=1),
        ],
    )
    def test_a_loss_that_is_no_number_is_divergence(self, run: RunLog) -> None:
        found = diagnose("ncclRemoteError: x\n", exit_code=0, run=run)
        assert found.kind == "diverged"
        assert found.line.startswith("loss ")

    def test_a_loss_that_recovered_is_not(self) -> None:
        run = RunLog(train=(TrainPoint(8, math.nan, 1.0), TrainPoint(16, 1.0, 2.0)), evals=(Eval(8, 0.9, 1.0),))
        assert diagnose("", exit_code=0, run=run).kind == ""

    @pytest.mark.parametrize(
        ("code", "kind", "words"),
        [
            (-11, "flaky", "segmentation fault"),
            (139, "flaky", "segmentation fault"),
            (137, "infrastructure", "killed"),
            (-15, "infrastructure", "terminated"),
            (127, "configuration", "command not found"),
            (3, "unknown", "exit code 3"),
            (255, "unknown", "exit code 255"),
        ],
    )
    def test_without_any_text_the_exit_code_speaks(self, code: int, kind: str, words: str) -> None:
        found = diagnose("starting\nworking\n\n", exit_code=code)
        assert found.kind == kind
        assert words in found.line
        assert "last line: working" in found.line

    def test_what_the_programs_runner_says_is_not_its_last_line(self) -> None:
        """The job of a program that failed ended with "Exiting after successful completion"."""
        runner = "submitit INFO (2026-11-23 15:32:25,243) - Exiting after successful completion\n"
        assert "last line: working" in diagnose(f"starting\nworking\n{runner}", exit_code=1).line
        silent = f"{runner}lora-tune: attempt 06b364043db8 of sweep b1b8a27a\n{runner}"
        assert diagnose(silent, exit_code=1).line == "exit code 1; last line: none"

    def test_a_log_that_says_nothing(self) -> None:
        assert diagnose(b"", exit_code=0) == Diagnosis(FailureKind.UNKNOWN, "the log is empty", "read the job's log")
        assert diagnose("only this", exit_code=0).line == "only this"


class TestScanner:
    def test_the_last_line_of_a_signature_counts(self) -> None:
        scanner = FailureScanner()
        scanner.feed(b"KeyError: 'handled'\nKeyError: 'fatal'\n")
        assert {hit.line for hit in scanner.hits()} == {"KeyError: 'fatal'"}

    def test_an_unfinished_last_line_counts(self) -> None:
        scanner = FailureScanner()
        scanner.feed(b"x\nKey")
        scanner.feed(b"Error: 'a'")
        assert scanner.hits()[0].line == "KeyError: 'a'"
        assert scanner.last_line() == "KeyError: 'a'"

    def test_lines_are_shown_short_and_without_secrets(self) -> None:
        scanner = FailureScanner()
        scanner.feed(
            b"RuntimeError: \x1b[31mcannot fetch https://me:hunter2@host/x with HF_TOKEN=hf_abcdefghijklmnopqrst\n"
        )
        assert [hit.line for hit in scanner.hits()] == [
            "RuntimeError: cannot fetch https://***@host/x with HF_TOKEN=***"
        ]
        scanner.feed(b"KeyError: '" + b"x" * 3000 + b"'\n")
        assert {len(hit.line) for hit in scanner.hits()} == {evidence.SHOWN_CHARACTERS}

    def test_a_gigabyte_without_newline_takes_bounded_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evidence, "SCANNED_BYTES", 4 << 20)
        scanner = FailureScanner()
        for _ in range(64):
            scanner.feed(b"x" * (1 << 20))
            assert sys.getsizeof(scanner._held) <= 4 * evidence.TAIL_BYTES
        scanner.feed(b"\nKeyError: 'late'\n")
        assert scanner.hits()[0].line == "KeyError: 'late'", "the end of a flood is scanned"

    def test_a_text_that_very_many_lines_hold_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(evidence, "MAX_TRIED", 100)
        scanner = FailureScanner()
        scanner.feed(b"0: some error\n" * 200 + b"RuntimeError: x\nSegmentation fault\n")
        assert [hit.signature.name for hit in scanner.hits()] == ["crash"]

    def test_a_flood_of_lines_that_look_like_errors_is_read_in_seconds(self) -> None:
        scanner = FailureScanner()
        begin = time.process_time()
        for _ in range(16):
            scanner.feed(b"0: some error, not an Exception, SIG, not set, emory\n" * 20_000)
        assert time.process_time() - begin < 60
        assert scanner.hits() == ()

    def test_a_flood_without_line_ends_costs_little_more_than_other_text(self) -> None:
        """Patterns tried all of each 4 KB: a look at 8 MB took 7 s of processor."""
        spent = []
        for text in (b"loss of the step is 0.51, ", b"RuntimeError: CUDA error, "):
            scanner, begin = FailureScanner(), time.process_time()
            scanner.feed(text * 80_000)
            spent.append(time.process_time() - begin)
        assert spent[1] < 8 * spent[0]

    @pytest.mark.parametrize("before", [0, 700, 3_000, 9_000])
    def test_a_failure_text_is_found_wherever_it_stands_in_a_long_line(self, before: int) -> None:
        scanner = FailureScanner()
        scanner.feed(b"loss 0.5, " * (before // 10) + b"Segmentation fault (core dumped) " + b"x" * 5_000 + b"\n")
        assert [hit.signature.name for hit in scanner.hits()] == ["crash"]

    @settings(max_examples=200, deadline=None)
    @given(
        st.lists(
            st.sampled_from([line.encode() + b"\n" for line, _ in FAILURES])
            | st.sampled_from([b"\n", b"\r", b"+ ", b"0: ", b"x" * 4000, b"Error: ", b"\xff"]),
            max_size=8,
        ),
        st.lists(st.integers(0, 20_000), max_size=8),
    )
    def test_any_split_of_the_bytes_finds_the_same(self, pieces: list[bytes], cuts: list[int]) -> None:
        log = b"".join(pieces)
        whole, split = FailureScanner(), FailureScanner()
        whole.feed(log)
        for begin, end in pairwise([0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]):
            split.feed(log[begin:end])
        assert split.hits() == whole.hits()
        assert split.last_line() == whole.last_line()

    @settings(max_examples=200, deadline=None)
    @given(st.binary(max_size=300))
    def test_no_bytes_raise(self, log: bytes) -> None:
        assert isinstance(diagnose(log, exit_code=1), Diagnosis)


SECRETS = [
    ("+ export HF_TOKEN={}", "+ export HF_TOKEN=***"),
    ("+ HF_TOKEN='{} x'", "+ HF_TOKEN=***"),
    ("++ export 'WANDB_API_KEY={}'", "++ export 'WANDB_API_KEY=***'"),
    ('declare -x MYSQL_PWD="{}"', "declare -x MYSQL_PWD=***"),
    ("PGPASSWORD={} psql -h db", "PGPASSWORD=*** psql -h db"),
    ("AWS_SECRET_ACCESS_KEY={}", "AWS_SECRET_ACCESS_KEY=***"),
    ("AWS_ACCESS_KEY_ID={}", "AWS_ACCESS_KEY_ID=***"),
    ("SLURM_JWT={}", "SLURM_JWT=***"),
    ('{{"hf_token": "{}", "lr": 1}}', '{"hf_token": ***, "lr": 1}'),
    ("{{'password': '{} y', 'b': 1}}", "{'password': ***, 'b': 1}"),
    ("python x.py --hf-token {} --n 3", "python x.py --hf-token *** --n 3"),
    ("python x.py --api-key={}", "python x.py --api-key=***"),
    ("curl -u me:{} https://x", "curl -u me:*** https://x"),
    ("docker login -u me -p {} nvcr.io", "docker login -u me -p *** nvcr.io"),
    ("git clone https://me:{}@host/x.git", "git clone https://***@host/x.git"),
    ("postgresql+psycopg://me:{}@db:5432/optuna", "postgresql+psycopg://***@db:5432/optuna"),
    ("+ curl -H 'Authorization: Bearer {}' x", "+ curl -H 'Authorization: Bearer ***' x"),
    ("password is {}", "password is ***"),
    (
        "wandb: Paste an API key from your profile and hit enter: {}",
        "wandb: Paste an API key from your profile and hit enter: ***",
    ),
    ("\x1b[31mHF_TO\x1b[0mKEN={}", "HF_TOKEN=***"),
]


class TestRedact:
    @pytest.mark.parametrize(("line", "shown"), SECRETS)
    def test_secrets_are_hidden(self, line: str, shown: str) -> None:
        assert redact(line.format("s3cr3t+/=Value")) == shown

    @pytest.mark.parametrize(
        "token",
        [
            "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
            "nvapi-abcdefghijklmnopqrstuvwxyz0123456789",
            "ghp_abcdefghijklmnopqrstuvwxyz0123456789",
            "glpat-abcdefghijklmnopqrst",
            "AKIAIOSFODNN7EXAMPLE",
            "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
        ],
    )
    def test_tokens_of_known_forms_are_hidden_anywhere(self, token: str) -> None:
        assert redact(f"using {token}, ok") == "using ***, ok"

    def test_long_logins_are_hidden_whole(self) -> None:
        assert redact(f"https://me:{'x' * 600}://{'y' * 600}@host/x") == "https://***@host/x"

    def test_private_keys_are_hidden_whole(self) -> None:
        key = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"
        assert redact(f"a\n{key}\nb") == "a\n***\nb"

    @pytest.mark.parametrize(
        "text",
        [
            "tokenizer: /models/llama tokens=8192 num_tokens: 5 max_tokens 3",
            "eos_token='</s>' bos_token_id=1 pad_token: <pad>",
            "https://host:8080/path?x=1 and user@host",
            "Permission denied (publickey,password).",
            "sudo: a password is required",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB",
            ':::MLLOG {"namespace": "", "time_ms": 1, "key": "seed", "value": 3}',
            "KEY=value MONKEY=5 keyboard: us",
            "two\nlines\tand a tab",
        ],
    )
    def test_what_is_no_secret_stays(self, text: str) -> None:
        assert redact(text) == text

    def test_terminal_escapes_and_control_characters_go(self) -> None:
        assert redact("\x1b]0;title\x07a\x1b[2Jb\x1b(Bc\x00d\x9b31me\x7f\n") == "abcde\n"

    @settings(max_examples=200, deadline=None)
    @given(st.text(max_size=200) | st.sampled_from([line.format("abcdefgh") for line, _ in SECRETS]))
    def test_redacting_twice_changes_nothing(self, text: str) -> None:
        assert redact(redact(text)) == redact(text)

    @pytest.mark.parametrize(
        "text", ["token", "token=", "-" * 5, "a:", "://", "\x1b[", "'", "-----BEGIN PRIVATE KEY-----", "login "]
    )
    def test_long_hostile_text_is_read_in_seconds(self, text: str) -> None:
        begin = time.process_time()
        redact(text * (200_000 // len(text)))
        assert time.process_time() - begin < 20


def test_errors_of_code_that_a_training_evaluates_hide_no_fault_of_the_machine() -> None:
    fault = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    log = f"sample 3: SyntaxError: invalid syntax\nsample 4: EOFError: EOF when reading a line\n{fault}\n"
    assert diagnose(log, exit_code=1).kind is FailureKind.INFRASTRUCTURE
