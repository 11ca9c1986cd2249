"""How the packs of a job find each other where they share one base (``FSDP=1``): a folder on their node."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from lora_tune.base.errors import InputError
from lora_tune.base.files import read_json, write_json
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune_recipes.knobs import Knobs

OF_BASE = (
    "MODEL",
    "DTYPE",
    "LOAD_IN_4BIT",
    "ATTN",
    "RECOMPUTE_GRANULARITY",
    "CUDA_GRAPH",
    "TORCH_COMPILE",
    "THREADS",
    "FSDP",
    "FSDP_STRATEGY",
    "FSDP_WRAP",
    "FSDP_SHARDS",
    "FSDP_OFFLOAD",
)
"""Variables that say what the base is, and how it lies over the packs."""
PAUSE = 0.2


class Together(NamedTuple):
    """Pack ``rank`` of ``world`` that meet in ``folder``."""

    folder: Path
    rank: int
    world: int

    @property
    def store(self) -> Path:
        """Where they exchange their addresses."""
        return self.folder / "store"

    @property
    def base_knobs(self) -> dict[str, str]:
        """The variables of their base."""
        return {name: str(value) for name, value in (read_json(_knobs_in(self.folder)).content or {}).items()}


@contextlib.contextmanager
def meeting_place(pack: PackFolder, idle: float) -> Iterator[Path | None]:
    """A folder for the packs of this job where the first trial asks for one base; None where it asks for none.

    Waits at most ``idle`` seconds for that trial.
    """
    base = _shared_base(pack, idle)
    if base is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="packs-") as folder:
        write_json(_knobs_in(Path(folder)), base)
        yield Path(folder)


def _shared_base(pack: PackFolder, idle: float) -> dict[str, str] | None:
    end = time.monotonic() + idle
    while (request := next(pack.open_requests(), None)) is None:
        if time.monotonic() > end:
            return None
        time.sleep(PAUSE)
    return _base_of(request.knobs) if _sharded(request.knobs) else None


def _sharded(knobs: Mapping[str, str]) -> bool:
    try:
        return Knobs(knobs).switch("FSDP", default=False)
    except InputError:  # the pack that takes the trial says so
        return False


def _base_of(knobs: Mapping[str, str]) -> dict[str, str]:
    """Of a trial's knobs those of the base: another one's length or rate must not decide whether it can be loaded."""
    return {name: knobs[name] for name in OF_BASE if name in knobs} | {"SEQ": "2"}


def _knobs_in(folder: Path) -> Path:
    return folder / "base.json"
