"""Many LoRA trainings at once over one frozen base: ``python -m lora_tune_recipes.many_adapters --grid F --out F``.

Every point of a grid is a trial of the PEFT recipe with its own learning rate, warm-up, seed and so on. All share the
base, so a step of N trials is one pass over N batches (``lora_tune_recipes.packed``), with the recipe's arithmetic
(checked by a test). The result is full eval curves, for tables to test searches on. No trial stops at a target.

The grid is a JSON object: knobs of the recipe (``settings.Settings``, names in capitals), a list for each that varies
and a plain value for each that does not, such as ``{"LR": [1e-3, 3e-3], "SEED": [1, 2, 3], "MAX_STEPS": 200}``.

The table is an .npz with one row a trial, in the grid's order (the last knob varies fastest):

    <KNOB>     [trials] for each knob of the grid
    batch      [trials] sequences per optimizer step
    samples    [trials, evals] training samples at each evaluation, padded with NaN
    eval_loss  [trials, evals] float32; NaN where the training diverged, and after its end
    meta       a JSON string: grid, task, device, precision, libraries, seconds, date, number of trials left out for
               lack of time or memory
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import json
import math
import operator
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed.base import PackedBase, check_packable
from lora_tune_recipes.packed.job import OF_BASE
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.scheduler import attempted
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.ranks import precision
from lora_tune_recipes.settings import Settings

_OF_BASE = tuple(OF_BASE.values())
OF_PASS = (
    *(*_OF_BASE, "datadir", "seq", "packing", "eval_samples", "threads"),
    *("max_steps", "val_check_interval", "minibs", "adapters.rank", "adapters.rank_pattern", "adapters.targets"),
)
"""Settings that the trials of one pass must share; all others may differ."""
IGNORED = frozenset({"TARGET", "PROBE", "WARMUP", "MBS", "SAVE_ADAPTER"})
"""Knobs of a trial that do not affect a full curve."""
SINGLE = ("TP", "CP", "FSDP")


def points(grid: Mapping[str, object]) -> list[dict[str, object]]:
    """Every combination of the grid's values, the last knob varying fastest.

    Raises InputError for an empty list, or an unsupported knob.
    """
    for name, values in grid.items():
        if name in IGNORED or (name in SINGLE and values not in (0, 1)):
            raise InputError(f"grid: {name}: has no place here; take it out")
        if values == []:
            raise InputError(f"grid: {name}: allowed is a value or a list of at least one")
    lists = [values if isinstance(values, list) else [values] for values in grid.values()]
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*lists)]


def train(base: PackedBase, trials: Sequence[Settings]) -> npt.NDArray[np.float32]:
    """Train trials that share OF_PASS together; returns their eval losses [trials, evals]."""
    pack = Pack(base)
    slots = [Slot(trial, base.texts(trial)) for trial in trials]
    for slot in slots:
        pack.join(slot)
    due = set(_eval_steps(trials[0]))
    curve = []
    for step in range(1, trials[0].max_steps + 1):
        pack.round()
        if step in due:
            curve.append(pack.evaluate(slots))
    return np.asarray(curve, np.float32).T


def passes(trials: Sequence[Settings], tokens: int) -> Iterator[list[int]]:
    """Indices of trials that can be trained together, with at most ``tokens`` in a step."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, trial in enumerate(trials):
        groups.setdefault(_values(trial, OF_PASS), []).append(number)
    for group in groups.values():
        first = trials[group[0]]
        width = max(1, tokens // (first.minibs * first.seq))
        for start in range(0, len(group), width):
            yield group[start : start + width]


def _values(trial: Settings, names: Sequence[str]) -> tuple[object, ...]:
    return operator.attrgetter(*names)(trial)


def run(grid: Mapping[str, object], tokens: int, seconds: float = math.inf) -> dict[str, Any]:
    """The table of the grid, array by array; see the module's docstring. No pass begins after ``seconds``."""
    wanted = points(grid)
    trials = [knobs.read({name: str(value) for name, value in point.items()}) for point in wanted]
    for trial in trials:
        check_packable(trial)
    evaluations = [_eval_steps(t) for t in trials]
    losses = np.full((len(trials), max(map(len, evaluations))), np.nan, np.float32)
    samples = np.full(losses.shape, np.nan)
    trained: list[int] = []
    base = PackedBase(trials[0])
    began = time.monotonic()
    for numbers in passes(trials, tokens):
        if time.monotonic() - began > seconds:
            break
        together = [trials[i] for i in numbers]
        if _values(together[0], _OF_BASE) != _values(base.settings, _OF_BASE):
            base = PackedBase(together[0])
        curves = attempted(functools.partial(train, base, together))
        if curves is None:
            print(f"{len(numbers)} trials left out: no memory for a pass of them; --tokens takes fewer", flush=True)
            continue
        losses[numbers, : curves.shape[1]] = curves
        for i in numbers:
            samples[i, : len(evaluations[i])] = np.asarray(evaluations[i]) * trials[i].minibs
        trained += numbers
        print(f"{len(trained)} of {len(trials)} trials, {time.monotonic() - began:.1f} s", flush=True)
    kept = sorted(trained)
    columns = {name: np.asarray([point[name] for point in wanted]) for name in grid}
    columns |= {"batch": np.asarray([t.minibs for t in trials]), "samples": samples, "eval_loss": losses}
    meta = {**_meta(grid, base, time.monotonic() - began), "left_out": len(trials) - len(kept)}
    return {**{name: column[kept] for name, column in columns.items()}, "meta": json.dumps(meta)}


def _eval_steps(trial: Settings) -> list[int]:
    interval = trial.interval(trial.minibs)
    steps = list(range(interval, trial.max_steps + 1, interval))
    return steps if steps and steps[-1] == trial.max_steps else [*steps, trial.max_steps]


def _meta(grid: Mapping[str, object], base: PackedBase, seconds: float) -> dict[str, object]:
    device = torch.cuda.get_device_name() if base.device.type == "cuda" else "cpu"
    settings = base.settings
    shipped = settings.model == knobs.TINY and settings.datadir == knobs.TINY
    return {
        "grid": dict(grid),
        "task": "tiny" if shipped else f"{settings.model.name} on {settings.datadir.name}",
        "parameters": sum(p.numel() for p in base.model.parameters()),
        "device": device,
        "precision": precision(settings),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "seconds": round(seconds, 1),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", type=Path, required=True, help="JSON file with the knobs")
    parser.add_argument("--out", type=Path, required=True, help=".npz to write")
    parser.add_argument("--tokens", type=int, default=2**18, help="tokens of one pass: memory (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no pass after this many")
    options = parser.parse_args(arguments)
    try:
        try:
            grid = json.loads(options.grid.read_text())
        except (OSError, ValueError) as error:
            raise InputError(f"--grid {options.grid}: {error}") from error
        if not isinstance(grid, dict) or not grid:
            raise InputError(f"--grid {options.grid}: allowed is a JSON object with at least one knob")
        table = run(grid, options.tokens, options.seconds)
    except LoraTuneError as error:
        print(f"many_adapters: {error}", file=sys.stderr)
        return error.exit_code
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(options.out, **table)
    print(f"{len(table['batch'])} trials in {json.loads(table['meta'])['seconds']} s to {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
