"""Queries by Slurm's commands, with timeouts and without environment variables that would change the answers."""

from __future__ import annotations

import atexit
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence

from lora_tune.base.errors import LauncherError
from lora_tune.base.host import send_signal
from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.base.text import names_secret
from lora_tune.config.tables import Site

ANSWER_SECONDS = 30.0
"""Timeout of a Slurm command in seconds; without a controller the client itself gives up after about 9 s."""


def ask(*command: str, cluster: str = "") -> str:
    """The standard output of a Slurm command. Raises LauncherError if it is missing, fails or does not answer.

    cluster: to query; "" for the one that SLURM_CONF names.
    """
    done = run_bounded(command, ANSWER_SECONDS, clean_environment(cluster), name=command[0])
    if done.returncode:
        raise LauncherError(f"{command[0]} failed: {_last_line(done.stderr) or f'exit {done.returncode}'}")
    return done.stdout


def run_bounded(
    command: Sequence[str], seconds: float, environment: Mapping[str, str] | None, *, name: str
) -> subprocess.CompletedProcess[str]:
    """Run a command and return its result. Raises LauncherError if it is missing or takes more than ``seconds``.

    After a timeout, and when this program exits, the command is killed with its children, as a site's wrappers of
    Slurm's commands have children. name: for the message.
    """
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError as error:
        raise LauncherError(f"{name} is not on PATH; run this where Slurm's commands are") from error
    with process:
        _running.add(process)
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            raise LauncherError(f"{name} did not answer in {seconds:g} s; the jobs go on") from error
        finally:
            _running.discard(process)
            _end(process)
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


_running: set[subprocess.Popen[str]] = set()


def _end(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        # It leads a session and is not reaped yet, so its id is not reused.
        send_signal(process.pid, signal.SIGKILL, group=True)


@atexit.register
def _end_all() -> None:
    for process in tuple(_running):
        _end(process)


def cluster_of(site: Site) -> str:
    """The cluster to which ``site.sbatch_args`` submits; "" for the one that SLURM_CONF names."""
    named = [option.value for option in sbatch_options(site.sbatch_args) if option.name == "clusters"]
    return named[-1] if named else ""


def clean_environment(cluster: str = "") -> dict[str, str]:
    """This process's environment without variables that change a command's answer; times as epoch seconds.

    cluster: as in :func:`ask`.
    """
    meddling = ("SLURM_", "SBATCH_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_")
    kept = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith(meddling)}
    of_cluster = {"SLURM_CLUSTERS": cluster} if cluster else {}
    return {**kept, **of_cluster, "SLURM_TIME_FORMAT": "%s", "LC_ALL": "C.UTF-8"}


def _last_line(text: str) -> str:
    """The last line that a command printed, without the hint at its help."""
    lines = (line.strip() for line in reversed(text.splitlines()))
    return next((line for line in lines if line and not line.startswith('Try "')), "")


# Variables that a job inherits from the shell of its sweep: paths of software, caches and services.
#
# All others are dropped: a config sourced in that shell would leak into every trial, and ``SLURM_*`` or ``SBATCH_*`` of
# an enclosing job would change the submission. Secrets are dropped as well: a study names them.


_SHELL = (
    *("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "LC_ALL", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "BASH_ENV"),
    *("LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "MODULEPATH", "ENROOT_CONFIG_PATH", "SLURM_CONF"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
_SOFTWARE = (
    *("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT", "CUDNN_HOME", "NCCL_HOME", "ROCM_PATH", "ROCM_HOME", "MPI_HOME"),
    *("CPATH", "LIBRARY_PATH", "MODULESHOME", "LOADEDMODULES", "_LMFILES_", "SPACK_ROOT", "EASYBUILD_PREFIX"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "XDG_CACHE_HOME", "XDG_DATA_HOME"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NLTK_DATA", "MPLCONFIGDIR"),
    *("PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONPYCACHEPREFIX", "APPTAINER_CACHEDIR", "SINGULARITY_CACHEDIR"),
    *(f"WANDB_{name}" for name in ("MODE", "DISABLED", "DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR", "BASE_URL")),
    *("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_SILENT", "WANDB_CONSOLE"),
)
_FAMILIES = re.compile(r"(?:HF|TRANSFORMERS|CONDA|MAMBA|_CE|LMOD|__LMOD|MODULES|__MODULES)_\w+")
"""Variables of Hugging Face libraries, conda and environment modules: their paths and network use."""

_FUNCTIONS = re.compile(
    r"BASH_FUNC_(_?module\w*|ml|switchml|_ml|scl|spack|_spack\w*|conda|mamba|micromamba|__(?:conda|mamba)\w*)(?:%%|\(\))"
)
"""Functions of modules, Spack and conda, as bash exports them (``export -f``)."""


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables and exported functions of a shell's ``environment`` that its jobs inherit."""
    return {name: value for name, value in environment.items() if _is_handed_on(name)}


def functions_of(environment: Mapping[str, str]) -> list[str]:
    """Names of the exported functions that jobs inherit."""
    return sorted(match[1] for name in environment if (match := _FUNCTIONS.fullmatch(name)))


def inherited_variables(environment: Mapping[str, str]) -> str:
    """What jobs inherit from a shell's ``environment``, for display."""
    plain = {*_SHELL}
    names = sorted(name for name in handed_on(environment) if name not in plain and not _FUNCTIONS.fullmatch(name))
    functions = functions_of(environment)
    also = [*names, *(f"the function {name}" for name in functions)]
    return f"jobs take from this shell its own settings (PATH, HOME, proxies, ...){', ' * bool(also)}{', '.join(also)}"


def withheld_secrets(environment: Mapping[str, str]) -> list[str]:
    """Secrets of known services in a shell's ``environment``; jobs get them only through the study's
    [site.environment]."""
    known = re.compile(r"(?:HF|HUGGING_?FACE|WANDB|COMET|NEPTUNE|MLFLOW)_\w+")
    return sorted(name for name in environment if known.match(name) and names_secret(name))


def _is_handed_on(name: str) -> bool:
    if name in _SHELL or _FUNCTIONS.fullmatch(name):
        return True
    return not names_secret(name) and (name in _SOFTWARE or _FAMILIES.fullmatch(name) is not None)
