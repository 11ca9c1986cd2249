"""Files of a trial: its checkpoint when its pack is stopped, and its adapter in peft's format."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from lora_tune.base.paths import ATTEMPT_KEY, SWEEP_KEY, AttemptPaths
from lora_tune.launchers.pack_folder import PackRequest
from lora_tune_recipes.lora_model import lora_config
from lora_tune_recipes.packed.group import Group, Rows
from lora_tune_recipes.packed.slot import Slot

OF_ATTEMPT = frozenset({"SAVE_ADAPTER"})
"""Knobs that differ between attempts of a trial."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogClock:
    """The clock of a trial's log. began: epoch seconds of its start. alone: simulated seconds since, as if alone.

    spent: real seconds in packs. block: samples and time at the start of the current block. step_seconds,
    eval_seconds: of the trial alone.
    """

    began: float
    alone: float
    spent: float
    block: tuple[int, float]
    step_seconds: float
    eval_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A trial's position between two steps. step: completed optimizer steps.

    evaluates: the log contains the start of an evaluation that was not completed.
    """

    step: int
    clock: LogClock
    evaluates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """The state of an interrupted attempt. log: its log so far."""

    progress: Progress
    rows: Rows
    log: str


def save(request: PackRequest, device: str, rows: Rows, progress: Progress) -> None:
    """Write a checkpoint into the attempt's folder, atomically. Raises OSError."""
    path = request.attempt.checkpoint
    partial = path.with_suffix(".partial")
    known = {"knobs": _of_trial(request), "device": device, "rows": tuple(rows), **asdict(progress)}
    torch.save(known, partial)
    partial.replace(path)


def of_earlier_attempt(request: PackRequest, device: str) -> Checkpoint | None:
    """The newest checkpoint of an earlier attempt of the trial, on the same kind of device; None if there is none."""
    earlier = request.attempt.previous
    while earlier is not None:
        if earlier.checkpoint.exists():
            return _read(earlier, _of_trial(request), device)
        earlier = earlier.previous
    return None


def _read(attempt: AttemptPaths, knobs: Mapping[str, str], device: str) -> Checkpoint | None:
    """The checkpoint; None if it cannot be read or has other knobs, so that the trial starts over."""
    try:
        saved: dict[str, Any] = torch.load(attempt.checkpoint, weights_only=True)
        if saved["knobs"] != knobs or saved["device"] != device:
            return None
        lines = attempt.log.read_text(encoding="utf-8").splitlines(keepends=True)
        clock = LogClock(**{**saved["clock"], "block": tuple(saved["clock"]["block"])})
        progress = Progress(step=saved["step"], clock=clock, evaluates=saved.get("evaluates", False))
        rows = Rows(*saved["rows"])
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        print(f"{attempt.checkpoint}: not read, the trial begins anew: {error}", flush=True)
        return None
    # The next attempt's log starts with its own ids.
    own = [line for line in lines if ATTEMPT_KEY not in line and SWEEP_KEY not in line]
    return Checkpoint(progress=progress, rows=rows, log="".join(own))


def _of_trial(request: PackRequest) -> dict[str, str]:
    return {name: value for name, value in request.knobs.items() if name not in OF_ATTEMPT}


LINEAR = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
EMBEDDING = "lora_embedding_A", "lora_embedding_B", "lora_magnitude_vector"
"""peft's names of the tensors of an adapter."""


def save_adapter(folder: Path, group: Group, slot: Slot) -> None:
    """Write the adapter of ``slot`` so that ``PeftModel.from_pretrained`` reads it. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter = group.adapter(slot)
    weights = {}
    for name, pair in adapter.items():
        for part, value in zip(EMBEDDING if group.modules[name].embedding else LINEAR, pair, strict=True):
            if value is not None:
                weights[f"base_model.model.{name}.{part}"] = value.cpu().contiguous()
    for name, own in group.copies_of(group.index([slot])).items():
        for parameter, values in own.items():
            weights[f"base_model.model.{name}.{parameter}"] = values[0].cpu().contiguous()
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = lora_config(slot.settings, list(adapter))
    config.inference_mode = True
    config.save_pretrained(folder)
