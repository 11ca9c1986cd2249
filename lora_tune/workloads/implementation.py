"""An MLPerf implementation's folder: which variables it reads, and what its configs set.

The folder holds ``run.sub``, ``run_and_time.sh``, ``config_common.sh`` (there or in ``configs/``) and the training's
own files. Nothing here changes it.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tune.errors import SurroundingsError

COMMON = ("config_common.sh", "configs/config_common.sh")
"""Where the exports that all configs share lie; the first that exists."""

LIBRARY_PREFIXES = ("NCCL_", "NVTE_", "CUDA_", "CUDNN_", "CUBLAS_", "TORCH_", "PYTORCH_", "UCX_", "OMP_", "HYDRA_")
"""Variables that libraries inside the container read: no file of the implementation needs to name them."""

_SHELL = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
_DEFAULT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):?[-=]")
_PYTHON = re.compile(r"""(?i:env)\w*\s*[\[(.][^\n"']*["']([A-Z][A-Z0-9_]*)["']""")
_YAML = re.compile(r"\benv:\s*([A-Za-z_][A-Za-z0-9_]*)")
_PATTERNS = {
    ".sh": _SHELL,
    ".sub": _SHELL,
    ".bash": _SHELL,
    ".py": _PYTHON,
    ".yaml": _YAML,
    ".yml": _YAML,
}
_SKIPPED_FOLDERS = frozenset({".git", "results", "logs", "api_logs", "data_index", "__pycache__"})
_LARGEST_SOURCE = 2_000_000  # bytes; what is larger is data

_SHELLS_OWN = frozenset({"PATH", "HOME", "PWD", "OLDPWD", "SHLVL", "_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """What was read of an implementation's folder.

    common: the shared config files, relative to ``folder``, in the order in which a config sources them.
    reads: names of the variables that some file reads. defaults: those of them that some script has a value for where
    nobody sets them. values: what the common files export, by name.
    """

    folder: Path
    common: tuple[str, ...]
    reads: frozenset[str]
    values: Mapping[str, str]
    defaults: frozenset[str] = frozenset()

    def knows(self, name: str) -> bool:
        """Whether setting ``name`` can have an effect."""
        return name in self.reads or name.startswith(LIBRARY_PREFIXES)


def read_implementation(
    folder: Path, script: str, also: Iterable[str] = (), before: Iterable[str] = ()
) -> Implementation:
    """Read ``folder``. ``also`` names further common files beside the first, e.g. ``config_common_fp8attn.sh``.

    before: files that a user sources before the config, such as ``env.sh``; then there need be no common file.

    Raises SurroundingsError naming what is missing.
    """
    folder = folder.expanduser().resolve()
    if not folder.is_dir():
        raise SurroundingsError(
            f"the MLPerf implementation's folder {folder} does not exist; give workload.implementation, or export "
            "LORA_TUNE_IMPLEMENTATION; --study tiny runs without it"
        )
    first = next((name for name in COMMON if (folder / name).is_file()), None)
    before = tuple(before)
    if first is None and not before:
        raise SurroundingsError(f"{folder} holds neither {' nor '.join(COMMON)}; is it the implementation's folder?")
    common = () if first is None else (first, *(str(Path(first).parent / name) for name in also))
    for name in (script, *before, *common):
        if not (folder / name).is_file():
            raise SurroundingsError(f"{folder} holds no {name}; is it the implementation's folder?")
    lines = "\n".join(f"source {shlex.quote(str(folder / name))}" for name in (*before, *common))
    return Implementation(
        folder=folder,
        common=common,
        reads=frozenset(variables_read(folder)),
        values=sourced(lines, "config_x.sh"),
        defaults=frozenset(_defaults(folder)),
    )


def variables_read(folder: Path) -> Iterator[str]:
    """Names of the environment variables that the files under ``folder`` read.

    In shell files every expansion counts, in Python every capital name looked up in
    something called ``...env...``, in YAML every ``oc.env:NAME``. An
    assignment does not: what configs only export has no effect.
    """
    for path in _sources(folder):
        pattern = _PATTERNS[path.suffix]
        yield from pattern.findall(path.read_text(encoding="utf-8", errors="replace"))


def _defaults(folder: Path) -> Iterator[str]:
    """Names of the variables that a shell file gives a value where they have none: ``${NAME:=value}``, ``${NAME-}``."""
    for path in _sources(folder):
        if _PATTERNS[path.suffix] is _SHELL:
            yield from _DEFAULT.findall(path.read_text(encoding="utf-8", errors="replace"))


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in _SKIPPED_FOLDERS:
                yield from _sources(path)
        elif path.suffix in _PATTERNS and path.is_file() and path.stat().st_size <= _LARGEST_SOURCE:
            yield path


def sourced(text: str, name: str = "config.sh") -> dict[str, str]:
    """The variables that a config's ``text`` exports, by sourcing it as a file called ``name`` in a clean bash.

    Raises SurroundingsError with bash's words when it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / name
        file.write_text(text, encoding="utf-8")
        return sourced_file(file)


def sourced_file(file: Path) -> dict[str, str]:
    """The variables that the config ``file`` exports, sourced where it lies."""
    program = 'set -e; source "$1" >&2; exec env -0'
    done = subprocess.run(
        ["/bin/bash", "--noprofile", "--norc", "-c", program, "bash", str(file)],
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/nonexistent"},
        capture_output=True,
        timeout=30,
        check=False,
    )
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit {done.returncode}"]
        raise SurroundingsError(f"{file} cannot be sourced: {words[-1]}")
    pairs = (item.partition("=") for item in done.stdout.decode(errors="replace").split("\0") if item)
    return {name: value for name, _, value in pairs if name not in _SHELLS_OWN}
