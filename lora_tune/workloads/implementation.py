"""An MLPerf implementation's folder: the variables that it reads, and the values that its configs set.

The folder holds a launch script such as ``run.sub``, configs (there or in ``configs/``), usually with a shared one, and
the training code, unless that is in the container. This module never changes it.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_tune.base.errors import InputError, SetupError
from lora_tune.config.parameters import Value
from lora_tune.workloads.config_file import source_lines
from lora_tune.workloads.record import ALIASES, NEUTRAL, Record
from lora_tune.workloads.script_needs import code_of, source_files, sourced_configs

# Folders whose launch script no workload supports: what starts their training, and what they need.
#
# Such a folder starts a container on each node by hand, or ranks by ``mpirun`` within a cloud's job, and takes its
# config from the image or from a fixed name. Recognised in the scripts, without comments.


DRIVEN = {"run.sub": "mlperf", "run_with_docker.sh": "mlperf_docker"}
"""Launch scripts of public rounds, and the workload that supports each."""

_CONTAINER = re.compile(r"^\s*(?:exec\s+)?(?:sudo\s+)?(?:docker|podman|nerdctl)\s+(?:run|exec)\b", re.MULTILINE)
_RANKS = re.compile(r"^\s*(?:exec\s+)?(?:mpirun|mpiexec|orterun)\b", re.MULTILINE)
_CONFIG_OPTION = re.compile(r"--config\w*[= ]\s*[\"']?(\S*config_\S*?\.sh)")
_TRAINS = re.compile(r"\btrain\.py\b")
_BY_COMMAND = 'workload.kind = "command" can drive it (docs/mlperf.md shows how)'


def other_starters(folder: Path) -> str:
    """What starts the training in ``folder``, and what a study needs to run it; "" if nothing is recognised."""
    driven = [
        f'{name} is there: workload.kind = "{kind}"' for name, kind in DRIVEN.items() if (folder / name).is_file()
    ]
    scripts = {file: code_of(file) for file in sorted(folder.glob("*.sh")) if not file.name.startswith("config")}
    starts = [sentence for script, code in scripts.items() for sentence in _about(script, code)]
    trains = [
        f"{script.name} trains in a container that runs already, with the variables of its shell; {_BY_COMMAND}"
        for script, code in scripts.items()
        if _TRAINS.search(code)
    ]
    return "; ".join(driven or starts or trains)


def _about(script: Path, code: str) -> Iterator[str]:
    """What one script starts, and why a trial's config would not reach it."""
    option = _CONFIG_OPTION.search(code)
    if _CONTAINER.search(code):
        takes = f"takes {option[1]} from the image" if option else "passes on only the variables that it names"
        yield f"{script.name} starts a container by itself, on each node by hand, and {takes}; {_BY_COMMAND}"
    elif _RANKS.search(code):
        yield f"{script.name} starts ranks by mpirun, within a job that something else has begun; {_BY_COMMAND}"
    if fixed := ", ".join(sourced_configs(script)):
        yield f"{script.name} sources {fixed} itself: what that sets, no trial can; export a trial's behind it"


CONFIG_FOLDERS = ("", "configs")
"""Folders of configs, relative to the implementation's folder."""

COMMON = "config_common.sh"
"""The usual name of the exports that all configs share; else a single ``config_*common*.sh``."""

TRAINED_WITH = frozenset({"LR", "LEARNING_RATE", "MAX_STEPS"})
"""Variables that training code reads; if no file of a folder reads any, the code is in the container."""

LIBRARY_PREFIXES = ("NCCL_", "NVTE_", "CUDA_", "CUDNN_", "CUBLAS_", "TORCH_", "PYTORCH_", "UCX_", "OMP_", "HYDRA_")
"""Variables that libraries in the container read, so that no file of the implementation needs to."""

_SHELL = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)")
_DEFAULT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*):?[-=]")
_PYTHON = re.compile(r"""(?i:env)\w*\s*[\[(.][^\n"']*["']([A-Z][A-Z0-9_]*)["']""")
_YAML = re.compile(r"(?:\benv:\s*|\$\{(?=[A-Z][A-Z0-9_]*:))([A-Za-z_][A-Za-z0-9_]*)")  # OmegaConf's, Primus'
_EXPORT = re.compile(r"^\s*export\s+([A-Za-z_][A-Za-z0-9_]*)=", re.MULTILINE)
_PATTERNS = {
    ".sh": _SHELL,
    ".sub": _SHELL,
    ".bash": _SHELL,
    ".py": _PYTHON,
    ".yaml": _YAML,
    ".yml": _YAML,
}
_LITERALS = (
    ((".yaml", ".yml"), re.compile(r"\boc\.env:\s*([A-Za-z_]\w*)\s*,\s*([^\s{}$,]+)\s*\}")),
    ((".sh", ".sub"), re.compile(r"\$\{([A-Za-z_]\w*):?[-=]([^\s{}$\"']*)\}")),
    (
        (".py",),
        re.compile(r"""(?:getenv|environ\.get)\(\s*["']([A-Z][A-Z0-9_]*)["']\s*,\s*["']?([^\s"'(),]+)["']?\s*\)"""),
    ),
)
_PACKAGED = ("setup.py", "pyproject.toml")
_SKIPPED_FOLDERS = frozenset({".git", "results", "logs", "api_logs", "data_index", "__pycache__"})
_LARGEST_SOURCE = 2_000_000  # bytes; larger files are data


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """The content of an implementation's folder.

    common: the shared config files, relative to ``folder``, in the order in which a config sources them.
    reads: variables that some file reads. defaults: those for which some script has a default. literals: default values
    in files, by name (``stated_defaults``). values: exports of the common files, by name. exported: names that some
    config exports. in_container: the training code is not in the folder, so it may read anything.
    """

    folder: Path
    common: tuple[str, ...]
    reads: frozenset[str]
    values: Mapping[str, str]
    defaults: frozenset[str] = frozenset()
    literals: Mapping[str, str] = field(default_factory=dict)
    exported: frozenset[str] = frozenset()
    in_container: bool = False

    def reads_name(self, name: str) -> bool:
        """Whether setting ``name`` can have an effect, as far as is known."""
        return self.in_container or name in self.reads or name.startswith(LIBRARY_PREFIXES)

    def mentions(self, *names: str) -> bool:
        """Whether a file reads one of these, or a config exports it for the container."""
        return not {*names}.isdisjoint(self.reads | (self.exported if self.in_container else frozenset()))

    def spelling(self, names: Sequence[str]) -> str | None:
        """The first of several names for one thing that a file reads, or else a config exports for the container.

        None if setting it under any of them has no effect.
        """
        reader = next((name for name in names if name in self.reads or name.startswith(LIBRARY_PREFIXES)), None)
        if reader is None and self.in_container:
            return next((name for name in names if name in self.exported), names[0])
        return reader


def read_implementation(
    folder: Path,
    script: str,
    also: Iterable[str] = (),
    before: Iterable[str] = (),
    reads: str | Sequence[str] | None = None,
    base: Mapping[str, str] | None = None,
) -> Implementation:
    """Read ``folder``. ``also`` names further common files after the first, e.g. ``config_common_fp8attn.sh``.

    before: files that a user sources before the config, such as ``env.sh``. reads: ``"container"`` if the training code
    is there, ``"folder"`` if it is all here, or further names that it reads; None: detected (``TRAINED_WITH``).

    base: exports of the machine's own config, which sources common files itself; None: trials build on those.

    Raises SetupError with what is missing.
    """
    before, common = tuple(before), _common_files(folder, tuple(also)) if base is None else ()
    for name in (script, *before, *common):
        if not (folder / name).is_file():
            raise SetupError(f"{folder} holds no {name}; {_instead(folder) if name == script else _WHOSE}")
    lines = "\n".join(source_lines([folder / name for name in (*before, *common)]))
    named = () if reads is None or isinstance(reads, str) else tuple(reads)
    texts = _texts(folder)
    # Configs may read variables that they export, but are no training code.
    training = {n for path, text in texts.items() if not path.name.startswith("config") for n in _names(path, text)}
    shell = (text for path, text in texts.items() if _PATTERNS[path.suffix] is _SHELL)
    configs = (texts.get(path, "") for path in config_files(folder))
    return Implementation(
        folder=folder,
        common=common,
        reads=frozenset(_readers(folder, texts)) | frozenset(named),
        values=sourced(lines, "config_x.sh") if base is None else base,
        defaults=frozenset(name for text in shell for name in _DEFAULT.findall(text)),
        literals=stated_defaults(folder, texts),
        exported=frozenset(name for text in configs for name in _EXPORT.findall(text)),
        in_container=reads == "container" or (reads is None and not TRAINED_WITH & training),
    )


_WHOSE = "is it the implementation's folder?"


def _instead(folder: Path) -> str:
    """A hint on what the folder has in place of the launch script."""
    if candidates := sorted(p.name for p in folder.glob("*.sub") if p.name != "run.sub"):
        return f"{_WHOSE} workload.script may be one of {', '.join(candidates)}"
    return other_starters(folder) or _WHOSE


def implementation_folder(named: Path | None, benchmark: str) -> Path:
    """The study's folder, or the variable LORA_TUNE_IMPLEMENTATION, or a folder with the benchmark's name.

    Raises SetupError, with the line for the study if the working folder looks like an implementation.
    """
    path = named or os.environ.get("LORA_TUNE_IMPLEMENTATION") or benchmark
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise SetupError(
            f"the MLPerf implementation's folder {folder} does not exist; give workload.implementation, or export "
            f"LORA_TUNE_IMPLEMENTATION{_present_folder()}; --study tiny runs without it"
        )
    return folder


def _present_folder() -> str:
    """A hint that the working folder is an implementation by its files, and what to write in a study; "" if not."""
    current_folder = Path.cwd()
    scripts = launch_scripts(current_folder)
    configs = [file.relative_to(current_folder) for file in config_files(current_folder) if "common" not in file.name]
    if not scripts or not configs:
        return ""
    return (
        f" (this folder holds {_some(scripts)} and {_some(list(map(str, configs)))}: "
        f'LORA_TUNE_IMPLEMENTATION=. with workload.script = "{scripts[0]}" and workload.base = "{configs[0]}")'
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def launch_scripts(folder: Path) -> list[str]:
    """The batch scripts in a folder, ``run.sub`` first."""
    return sorted((file.name for file in folder.glob("*.sub")), key=lambda name: (name != "run.sub", name))


def config_files(folder: Path) -> list[Path]:
    """The configs in an implementation's folder, by name."""
    return [file for place in CONFIG_FOLDERS for file in sorted((folder / place).glob("config_*.sh"))]


def _common_files(folder: Path, also: tuple[str, ...]) -> tuple[str, ...]:
    """The shared configs, relative to ``folder``; empty if there is none.

    Raises SetupError if there are several and the study names none of them.
    """
    shared = [str(f.relative_to(folder)) for f in config_files(folder) if "common" in f.name]
    first = (
        [name for name in shared if Path(name).name == COMMON] or [n for n in shared if Path(n).name in also] or shared
    )
    if not first:
        return tuple(also)
    if len(first) > 1 and Path(first[0]).name != COMMON and Path(first[0]).name not in also:
        raise SetupError(
            f"{folder} holds {', '.join(first)} and no {COMMON}; name those that every config sources in "
            "workload.common, in order"
        )
    place = Path(first[0]).parent
    return tuple(dict.fromkeys((first[0], *(str(place / name) for name in also))))


def files_reading(folder: Path) -> dict[str, list[str]]:
    """The files under ``folder`` that read each variable, relative to it, by the variable's name.

    In shell files every expansion counts, in Python every capital name looked up in something called ``...env...``, in
    YAML every ``oc.env:NAME`` and ``${NAME:default}``. Assignments do not: a variable that is only exported has no
    effect.
    """
    return _readers(folder, _texts(folder))


def _readers(folder: Path, texts: Mapping[Path, str]) -> dict[str, list[str]]:
    readers: dict[str, list[str]] = {}
    for path, text in texts.items():
        for name in dict.fromkeys(_names(path, text)):
            readers.setdefault(name, []).append(str(path.relative_to(folder)))
    return readers


def _names(path: Path, text: str) -> list[str]:
    """The variables that a file reads, with repetitions."""
    return _PATTERNS[path.suffix].findall(text)


def _texts(folder: Path) -> dict[Path, str]:
    """The folder's scripts, code and settings files, each read once."""
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in _sources(folder)}


def stated_defaults(folder: Path, texts: Mapping[Path, str]) -> dict[str, str]:
    """The defaults of variables in the implementation's files: the first literal one, by name.

    YAML's ``${oc.env:NAME,default}`` takes precedence over the shell's ``${NAME:-default}`` and ``${NAME:=default}``,
    and these over Python's ``getenv("NAME", default)``. Libraries contained in the folder, such as NeMo, are skipped,
    because their scripts are not this training's.
    """
    libraries = {path.parent for name in _PACKAGED for path in folder.rglob(name)} - {folder}
    defaults: dict[str, str] = {}
    for suffixes, pattern in _LITERALS:
        for path, text in texts.items():
            config = path.suffix == ".sh" and path.name.startswith("config")
            if path.suffix in suffixes and not config and libraries.isdisjoint(path.parents):
                for name, literal in pattern.findall(text):
                    defaults.setdefault(name, literal)
    return defaults


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name not in _SKIPPED_FOLDERS:
                yield from _sources(path)
        elif path.suffix in _PATTERNS and path.is_file() and path.stat().st_size <= _LARGEST_SOURCE:
            yield path


def sourced(text: str, name: str = "config.sh") -> dict[str, str]:
    """The variables that a config's ``text`` exports when sourced as a file called ``name`` in a clean bash.

    Raises SetupError with bash's message if it fails.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / name
        file.write_text(text, encoding="utf-8")
        return sourced_file(file)


def sourced_file(file: Path) -> dict[str, str]:
    """The variables that the config ``file`` exports when sourced at its place; the first failing command ends it.

    Raises SetupError with bash's message, also if it does not end.
    """
    return source_files([file], strict=True).values


# Combinations of values, and their names in the folder.


PROBE_STEPS = 16
"""Optimizer steps of each of a probe's two blocks; the second is warm."""

PROBE_TRAINS = 2 * PROBE_STEPS
"""Optimizer steps in a probe's config, whatever its trial proposes."""


def spelled(values: Mapping[str, Value], implementation: Implementation) -> dict[str, Value]:
    """``values`` under the names that the implementation reads.

    Raises InputError for a value that it does not read, because such a parameter has no effect.
    """
    exports: dict[str, Value] = {}
    for name, value in values.items():
        known = implementation.spelling((name, *ALIASES.get(name, ())))
        follows = name == "GBS" and not implementation.mentions("GBS", *ALIASES["GBS"])  # from MINIBS
        if known is not None and not follows:
            exports[known] = value
        elif name == "WARMUP_STEPS" and implementation.reads_name("WARMUP_RATIO"):
            exports["WARMUP_RATIO"] = warmup_ratio(int(value), int(values["MAX_STEPS"]))
        elif name == "MINIBS" and implementation.reads_name("GLOBAL_BATCH_SIZE"):
            continue  # the batch is set as a whole
        elif name != "GBS" and NEUTRAL.get(name) != value:
            candidates = difflib.get_close_matches(name, sorted(implementation.reads), n=3)
            hint = f"; it reads {', '.join(candidates)}" if candidates else ""
            raise InputError(
                f"space.{name}: no file in {implementation.folder} reads {name}, so setting it has no effect{hint}; "
                "remove it or name the variable that it reads"
            )
    return exports


def probe_values(gbs: int, warmup: Value | None = None, *, in_steps: bool = False) -> dict[str, Value]:
    """The values of a probe: two short blocks, each followed by an eval, and a step limit.

    warmup: the trial's warm-up steps, cut to one block, because schedulers reject a warm-up as long as training.
    in_steps: the implementation counts VAL_CHECK_INTERVAL in optimizer steps, not in samples.
    """
    kept: dict[str, Value] = {} if warmup is None else {"WARMUP_STEPS": min(int(warmup), PROBE_STEPS)}
    return kept | {
        "VAL_CHECK_INTERVAL": PROBE_STEPS if in_steps else PROBE_STEPS * gbs,
        "SKIP_EVALS": 0,
        "MAX_STEPS": PROBE_TRAINS,
    }


def refuse_illegal(record: Record, exports: Mapping[str, Value]) -> None:
    """Raise InputError for combinations that NVIDIA's code rejects or silently ignores (v4.0 to v5.1).

    record: of the trial. exports: the trial's own settings. A folder's own config may enable both precisions, as those
    of v6.0's Primus folders do.
    """

    def on(name: str) -> bool:
        return str(record.get(name, "")).lower() in ("1", "true")

    if on("FP8") and on("FP4") and exports.keys() & {"FP8", "FP4"}:
        raise InputError("FP8 and FP4 are both on; the implementation allows one of them")
    if str(record.get("CP_EVAL", "")) not in ("", "1"):
        raise InputError(f"CP_EVAL={record['CP_EVAL']}; only 1 or unset works")


def warmup_ratio(warmup: int, steps: int) -> float:
    """The shortest decimal that gives ``warmup`` of ``steps``, whether an implementation rounds or truncates."""
    for digits in range(1, 17):
        scale = 10**digits
        ratio: float = -(-warmup * scale // steps) / scale
        if int(ratio * steps) == round(ratio * steps) == warmup:
            return ratio
    return warmup / steps
