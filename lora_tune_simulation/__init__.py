"""Simulated trials: a surface turns parameters and a seed into the log of a job, on a virtual clock.

A surface is any callable ``function(parameters: Mapping, seed: int) -> Iterable[tuple[float, str]]`` that yields
(virtual seconds since the job's processes started, log line) until the job ends. An optional attribute
``expected_score(parameters) -> float`` is the ground truth for judging recommendations.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, cast

from lora_tune.base.errors import InputError


class SurfaceFunction(Protocol):
    """The callable that a study's ``surface`` key names."""

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterable[tuple[float, str]]:
        """The job's log lines with the virtual second at which each appears, in order."""
        ...


SHIPPED = {
    "h100": "h100.py:function",
    "h100_time": "h100.py:time_to_target",
    "h100_switches": "h100.py:with_switches",
    "h100x64": "h100.py:sixty_four_nodes",
    "gb200x72": "h100.py:gb200x72",
    "lora_tiny": "lora_tables.py:tiny",
    "lora_small": "lora_tables.py:small",
}
"""Short names of the surfaces in this package."""


def load(name: str, folder: Path = Path()) -> SurfaceFunction:
    """The surface of ``"path/or/module.py:function"`` (path relative to ``folder``) or a shipped name.

    Raises InputError if the file or the function does not exist, or is not callable.
    """
    home = folder
    if name in SHIPPED:
        name, home = SHIPPED[name], Path(__file__).parent
    file, _, function = name.rpartition(":")
    path = home / file
    if not file or not path.is_file():
        known = ", ".join(sorted(SHIPPED))
        raise InputError(f"surface {name!r}: no file {path}; give 'path/to/file.py:function' or one of {known}")
    spec = importlib.util.spec_from_file_location(f"lora_tune_surface_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    surface = getattr(module, function, None)
    if not callable(surface):
        raise InputError(f"surface {name!r}: {path} has no function {function!r}; define it or name another")
    return cast(SurfaceFunction, surface)
