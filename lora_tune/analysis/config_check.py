"""What makes an exported config trustworthy: its twin for programs, what it changes, whether all of it counts."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune.config.study import Study
from lora_tune.objectives import objective_of
from lora_tune.search.recommendation import UNRUN, Recommended
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import Trial
from lora_tune.workloads.base import Workload
from lora_tune.workloads.base_config import Difference, differences, equal, read_base
from lora_tune.workloads.config_file import value_text
from lora_tune.workloads.implementation import LIBRARY_PREFIXES, files_reading, sourced, sourced_file
from lora_tune.workloads.mlperf import MlperfWorkload
from lora_tune.workloads.mlperf_export import export_place
from lora_tune.workloads.recipe import RecipeWorkload
from lora_tune.workloads.sandbox import source_files

TWIN_VERSION = 1
"""Grows when a key of the twin changes its meaning."""

_BY_THE_SITE = frozenset({"DGXSYSTEM", "DGXNNODES", "DGXNGPU", "WALLTIME", "WALLTIME_RUNANDTIME"})
"""What launch scripts and sbatch read, not the training."""

_LAUNCH = "sbatch and the launch script"


def twin(
    study: Study, trial: Trial, config: str, usage: str, lines: Iterable[str], believed: Recommended | None = None
) -> dict[str, Any]:
    """The exported config as plain data: what it sets, what it reached, where it comes from.

    config: the exported file's name. lines: its provenance. believed: what is believed of it, where it is what the
    sweep recommends. Seconds and samples; absent where unknown.
    """
    metrics = as_mapping(trial.metrics)
    result = {
        "objective": metrics.get("objective"),
        "score": study.objective.score,
        "target_eval_loss": study.objective.target if objective_of(study).has_target else None,
        "seconds": trial.seconds,
        "samples": trial.samples,
        **{name: metrics.get(name) for name in _TOLD},
    }
    return {
        "version": TWIN_VERSION,
        "config": config,
        "usage": usage,
        "study": {
            "name": study.name,
            "hash": study.digest,
            "division": study.division,
            "workload": study.workload.kind,
        },
        "trial": {"seed": trial.seed} | ({} if trial.number == UNRUN else {"number": trial.number}),
        **({} if believed is None else {"recommended": _believed(believed)}),
        "parameters": dict(trial.parameters),
        "tuned": dict(trial.tuned),
        "result": {name: value for name, value in result.items() if value is not None},
        "provenance": list(lines),
    }


def _believed(found: Recommended) -> dict[str, Any]:
    """What is believed of the recommended configuration: seconds, or samples/s; the best single run beside it."""
    return {
        "objective": found.objective,
        "low": found.low,
        "high": found.high,
        "runs": found.runs,
        "confirmed": found.confirmed,
        "best_run": found.luckiest.number,
        "best_run_objective": found.luckiest.objective,
    }


_TOLD = ("crossing_samples", "crossing_low", "crossing_high", "samples_per_second", "seconds_per_eval", "node_hours")


def toml_text(data: Mapping[str, Any]) -> str:
    """A mapping of values, lists of texts and mappings of values, as TOML. tomllib reads it back unchanged."""
    lines = [f"{_key(name)} = {_toml(v)}" for name, v in data.items() if not isinstance(v, Mapping)]
    for name, table in data.items():
        if isinstance(table, Mapping):
            lines += ["", f"[{_key(name)}]", *(f"{_key(k)} = {_toml(v)}" for k, v in table.items())]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which JSON leaves bare.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, list), value
    return "[" + ", ".join(_toml(v) for v in value) + "]"


def sourced_beside(config: Path, folder: Path | None = None, root: Path | None = None) -> dict[str, str]:
    """What ``config`` exports in a clean bash, sourced as if it lay in ``folder``, beside what it sources.

    Nothing is written there: a temporary folder stands in, with links to all that lies in ``root``, of which ``folder``
    is a part; None: ``folder`` alone. Raises SetupError with bash's own words when it cannot be sourced.
    """
    if folder is None:
        return sourced_file(config)
    root = root or folder
    with tempfile.TemporaryDirectory() as scratch:
        here, source = Path(scratch), root
        for part in folder.relative_to(root).parts:
            _link(source, here, part)
            here, source = here / part, source / part
            here.mkdir()
        _link(source, here, config.name)
        copy = here / config.name
        copy.write_bytes(config.read_bytes())
        return source_files([copy]).values


def _link(source: Path, here: Path, without: str) -> None:
    for entry in source.iterdir():
        if entry.name != without:
            (here / entry.name).symlink_to(entry.resolve())


def changed_against(base: Path, config: Path, workload: Workload | None = None) -> list[Difference]:
    """What ``config`` sets other than the site's present ``base``, each sourced where it belongs.

    A base of which the workload knows what a sweep has recorded counts as recorded, whatever its file says now. One
    that is not there may be named relative to the implementation's folder, as ``workload.base`` is. Raises InputError
    when it is nowhere.
    """
    if isinstance(workload, MlperfWorkload) and not base.is_absolute() and not base.exists():
        base = workload.implementation.folder / base
    if isinstance(workload, MlperfWorkload) and workload.is_recorded(base):
        assert workload.base is not None
        recorded = workload.base.lasting
        return differences(recorded, {**recorded, **_changed_lines(config, recorded)})
    if not base.is_file():
        raise InputError(f"--diff {base}: there is no such file; name the site's present config_*.sh")
    file = base.resolve()
    if isinstance(workload, MlperfWorkload) and file.is_relative_to(root := workload.implementation.folder):
        before = read_base(root, str(file.relative_to(root)), workload.settings.before).values
        return differences(before, exported_by(config, workload))
    return differences(source_files([file]).values, sourced_beside(config, file.parent))


def _changed_lines(config: Path, recorded: Mapping[str, str]) -> dict[str, str]:
    """What the exported ``config`` makes of ``recorded``, the values that the files which it sources had."""
    given = (f"export {name}={shlex.quote(value)}" for name, value in recorded.items())
    own = (line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("source "))
    return sourced("\n".join((*given, *own)) + "\n", config.name)


def home(workload: Workload) -> Path | None:
    """The folder in which this workload's configs are sourced; None: anywhere."""
    if isinstance(workload, MlperfWorkload):
        return workload.implementation.folder / export_place(workload)
    return None


def exported_by(config: Path, workload: Workload) -> dict[str, str]:
    """What ``config`` exports where this workload's users source it. Raises SetupError when it cannot be sourced."""
    root = workload.implementation.folder if isinstance(workload, MlperfWorkload) else None
    return sourced_beside(config, home(workload), root)


def readers(names: Iterable[str], workload: Workload) -> dict[str, str]:
    """Who reads each variable, in words; "" for nobody. Empty where nobody can know (another's command)."""
    if isinstance(workload, RecipeWorkload):
        known = _recipe_variables()
        return {n: "the recipe" if n in known else _LAUNCH if n in _BY_THE_SITE else "" for n in names}
    if not isinstance(workload, MlperfWorkload):
        return {}
    found, by_file = workload.implementation, files_reading(workload.implementation.folder)

    def reader(name: str) -> str:
        if name in by_file:
            more = f" and {len(by_file[name]) - 1} more" if len(by_file[name]) > 1 else ""
            return f"{by_file[name][0]}{more}"
        if name in _BY_THE_SITE:
            return _LAUNCH
        if name.startswith(LIBRARY_PREFIXES):
            return "a library in the container, as its name says"
        if found.in_container:
            return "only the container can tell: the training code is not here"
        return "no file here; the config that it sources sets it" if name in found.values else ""

    return {name: reader(name) for name in names}


def known_variables(workload: Workload) -> Callable[[str], bool] | None:
    """Which variables have an effect on this workload's trials; None where nobody can know (another's command)."""
    if isinstance(workload, MlperfWorkload):
        implementation = workload.implementation
        return lambda name: implementation.knows(name) or name in implementation.values or name in _BY_THE_SITE
    if isinstance(workload, RecipeWorkload):
        names = _recipe_variables()
        return lambda name: name in names or name in _BY_THE_SITE
    return None


def _recipe_variables() -> frozenset[str]:
    """Every capital name that our recipes' sources quote. Read as text: importing them would import torch."""
    found: set[str] = set()
    waiting = [resources.files("lora_tune.recipes")]
    while waiting:
        for entry in waiting.pop().iterdir():
            if entry.is_dir():
                waiting.append(entry)
            elif entry.name.endswith(".py"):
                found |= set(re.findall(r"\"([A-Z][A-Z0-9_]+)\"", entry.read_text(encoding="utf-8")))
    return frozenset(found)


def without_effect(config: Path, workload: Workload) -> list[str] | None:
    """The variables of an exported config that its implementation never reads; None where that cannot be known.

    Sources it in a clean bash as its user would. Raises SetupError when it cannot be sourced.
    """
    exported = exported_by(config, workload)
    known = known_variables(workload)
    return None if known is None else sorted(name for name in exported if not known(name))


def effective(parameters: Mapping[str, Any], exported: Mapping[str, str]) -> list[str]:
    """Parameters that a sourced config sets to another value than the trial had, as sentences. Empty: all agree.

    Only names that the config sets are compared; a workload may spell a parameter under another name.
    """
    return [
        f"{name} is {exported[name]!r}, the trial had {value_text(value)!r}"
        for name, value in parameters.items()
        if name in exported and not equal(exported[name], value_text(value))
    ]
