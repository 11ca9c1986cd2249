"""Checks of an exported config: its sidecar, its changes, and whether all its variables take effect."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_tune.base.errors import InputError
from lora_tune.config.study import Study
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import UNRUN, Recommended
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import Trial
from lora_tune.workloads.base import Workload
from lora_tune.workloads.base_config import Difference, differences, equal
from lora_tune.workloads.config_file import value_text
from lora_tune.workloads.implementation import sourced, sourced_file
from lora_tune.workloads.script_needs import source_files

SIDECAR_VERSION = 1
"""Incremented when a key of the sidecar changes its meaning."""


def sidecar(
    study: Study, trial: Trial, config: str, usage: str, lines: Iterable[str], recommended: Recommended | None = None
) -> dict[str, Any]:
    """The exported config as plain data: settings, results and origin.

    config: the exported file's name. lines: its provenance. recommended: its estimate, if it is the recommendation.
    Seconds and samples; unknown results are omitted.
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
        "version": SIDECAR_VERSION,
        "config": config,
        "usage": usage,
        "study": {
            "name": study.name,
            "hash": study.digest,
            "division": study.division,
            "workload": study.workload.kind,
        },
        "trial": {"seed": trial.seed} | ({} if trial.number == UNRUN else {"number": trial.number}),
        **({} if recommended is None else {"recommended": _recommendation(recommended)}),
        "parameters": dict(trial.parameters),
        "tuned": dict(trial.tuned),
        "result": {name: value for name, value in result.items() if value is not None},
        "provenance": list(lines),
    }


def _recommendation(recommended: Recommended) -> dict[str, Any]:
    """The estimate of the recommendation (seconds, or samples/s), and the best single run."""
    return {
        "objective": recommended.objective,
        "low": recommended.low,
        "high": recommended.high,
        "runs": recommended.runs,
        "confirmed": recommended.confirmed,
        "best_run": recommended.best_run.number,
        "best_run_objective": recommended.best_run.objective,
    }


_TOLD = ("crossing_samples", "crossing_low", "crossing_high", "samples_per_second", "seconds_per_eval", "node_hours")


def toml_text(data: Mapping[str, Any]) -> str:
    """A mapping of values, lists and mappings of these as TOML, which tomllib reads back unchanged."""
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
        # JSON's escapes are valid in TOML; only DEL, which JSON leaves unescaped, needs one.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + " }"
    assert isinstance(value, list | tuple), value
    return "[" + ", ".join(_toml(v) for v in value) + "]"


def sourced_beside(config: Path, folder: Path | None = None, root: Path | None = None) -> dict[str, str]:
    """Variables that ``config`` exports in a clean bash when sourced in ``folder``.

    ``folder`` is not written to: a temporary folder links to all entries of ``root``, which contains ``folder`` (None:
    ``folder`` itself). Raises SetupError with bash's message if it cannot be sourced.
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


def _link(source: Path, folder: Path, without: str) -> None:
    for entry in source.iterdir():
        if entry.name != without:
            (folder / entry.name).symlink_to(entry.resolve())


def changed_against(base: Path, config: Path, workload: Workload | None = None) -> list[Difference]:
    """Variables that ``config`` sets differently from the current ``base``, each sourced in its own folder.

    If the sweep recorded the base's values, they are used instead of the file. A missing base is also looked up in the
    implementation's folder, as ``workload.base`` is. Raises InputError if it does not exist.
    """
    scripts = workload.scripts_folder() if workload is not None else None
    if scripts is not None and not base.is_absolute() and not base.exists():
        base = scripts / base
    if workload is not None and (recorded := workload.recorded_values(base)) is not None:
        return differences(recorded, {**recorded, **_changed_lines(config, recorded)})
    if not base.is_file():
        raise InputError(f"--diff {base}: there is no such file; name the site's present config_*.sh")
    file = base.resolve()
    if workload is not None and (now := workload.values_of(file)) is not None:
        return differences(now, exported_by(config, workload))
    return differences(source_files([file]).values, sourced_beside(config, file.parent))


def _changed_lines(config: Path, recorded: Mapping[str, str]) -> dict[str, str]:
    """Values after sourcing ``config`` on top of ``recorded``, which replaces the files that it sources."""
    exports = (f"export {name}={shlex.quote(value)}" for name, value in recorded.items())
    own = (line for line in config.read_text(encoding="utf-8").splitlines() if not line.startswith("source "))
    return sourced("\n".join((*exports, *own)) + "\n", config.name)


def exported_by(config: Path, workload: Workload) -> dict[str, str]:
    """Variables that ``config`` exports where its users source it. Raises SetupError if it cannot be sourced."""
    return sourced_beside(config, workload.config_folder(), workload.scripts_folder())


def effective(parameters: Mapping[str, Any], exported: Mapping[str, str]) -> list[str]:
    """Parameters that a sourced config sets to another value than the trial had, as sentences.

    Only names that the config sets are compared; a workload may rename a parameter.
    """
    return [
        f"{name} is {exported[name]!r}, the trial had {value_text(value)!r}"
        for name, value in parameters.items()
        if name in exported and not equal(exported[name], value_text(value))
    ]
