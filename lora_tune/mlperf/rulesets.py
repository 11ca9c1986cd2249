"""The rulesets of the installed ``mlperf_logging`` and the paths of their files, without importing the package."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lora_tune.base.errors import InputError

_FOLDER = re.compile(r"training_(\d+(?:\.\d+){1,3})")
_NAME = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?")


@cache
def package() -> Path:
    """The folder of the installed ``mlperf_logging``."""
    spec = find_spec("mlperf_logging")
    assert spec is not None, "mlperf-logging is a dependency of lora_tune"
    assert spec.submodule_search_locations, "mlperf_logging is a package"
    return Path(next(iter(spec.submodule_search_locations)))


def order(ruleset: str) -> tuple[int, ...]:
    """The version as numbers, for sorting: ``"5.1.0"`` is ``(5, 1, 0)``."""
    return tuple(int(part) for part in ruleset.split("."))


@cache
def rulesets() -> tuple[str, ...]:
    """Every installed Training ruleset, oldest first."""
    folders = (package() / "compliance_checker").glob("training_*")
    names = {m[1] for f in folders if (m := _FOLDER.fullmatch(f.name)) and (f / "common.yaml").is_file()}
    return tuple(sorted(names, key=order))


def as_ruleset(name: str) -> str:
    """The installed ruleset of a round: ``5.1``, ``v5.1`` and ``5.1.0`` are the same.

    Raises InputError with the installed ones.
    """
    match = _NAME.fullmatch(name.strip())
    full = ".".join((match[1], match[2], match[3] or "0")) if match else name
    if full not in rulesets():
        raise InputError(
            f"ruleset {name!r} is not in the installed mlperf_logging, which has {', '.join(rulesets())}; "
            "name one of these, or install a newer mlperf-logging"
        )
    return full


def known_to_checkers(ruleset: str) -> str:
    """The newest ruleset, at or below this one, that the package's code supports.

    The checkers list rulesets in code; one that was added only as files is checked by the code of the one before.
    """
    folder = package() / "compliance_checker" / "mlp_parser"
    known = [r for r in rulesets() if (folder / f"ruleset_{r.replace('.', '')}.py").is_file()]
    return next((r for r in reversed(known) if order(r) <= order(ruleset)), known[0])


def rules_file(ruleset: str, name: str) -> Path:
    """Path of a YAML file of a ruleset, such as ``closed_llama31_8b``; it may not exist."""
    return package() / "compliance_checker" / f"training_{ruleset}" / f"{name}.yaml"


def convergence_file(ruleset: str, benchmark: str) -> Path:
    """Path of the JSON file with a benchmark's reference convergence points; it may not exist."""
    return package() / "rcp_checker" / f"training_{ruleset}" / f"rcps_{benchmark}.json"


@cache
def benchmarks_of(ruleset: str) -> tuple[str, ...]:
    """Names of the closed division's benchmarks in a ruleset."""
    files = rules_file(ruleset, "common").parent.glob("closed_*.yaml")
    return tuple(sorted({f.stem.removeprefix("closed_") for f in files} - {"common"}))


def rulesets_with(benchmark: str) -> tuple[str, ...]:
    """The rulesets that have a benchmark, oldest first."""
    return tuple(r for r in rulesets() if benchmark in benchmarks_of(r))


def newest_with(benchmark: str) -> str:
    """The newest ruleset that has a benchmark. Raises InputError with the nearest names."""
    if having := rulesets_with(benchmark):
        return having[-1]
    raise InputError(unknown_benchmark(benchmark, {name for r in rulesets() for name in benchmarks_of(r)}))


def unknown_benchmark(name: str, known: Collection[str]) -> str:
    """The message for an unknown benchmark, with the nearest known name."""
    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"no installed ruleset has a benchmark {name!r}{hint}; the benchmarks are {', '.join(sorted(known))}"
