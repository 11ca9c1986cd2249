"""Many LoRA trainings at once over one frozen base: ``python -m lora_tune.recipes.many_adapters --grid F --out F``.

Every point of a grid is a trial of the PEFT recipe with its own learning rate, warm-up, seed and so on. The base is
the same for all, so a step of N trials is one pass over N batches, in which each adapter is a slice of a batched
product. The arithmetic is the recipe's (a test holds them together); what it yields is whole eval curves, for tables
that a search can be tried against. Nothing stops at a target.

The grid is a JSON object: knobs of the recipe (``settings.Settings``, names in capitals), a list for each that varies
and a plain value for each that does not, such as ``{"LR": [1e-3, 3e-3], "SEED": [1, 2, 3], "MAX_STEPS": 200}``.

The table is an .npz with one row a trial, in the grid's order (the last knob varies fastest):

    <KNOB>     [trials] for each knob of the grid
    batch      [trials] sequences per optimizer step
    samples    [trials, evals] training samples at each evaluation, filled up with NaN
    eval_loss  [trials, evals] float32; NaN where the training diverged, and behind its end
    meta       a JSON string: grid, task, device, precision, libraries, seconds, date, trials left out for want of time
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune.recipes import settings as knobs
from lora_tune.recipes import text
from lora_tune.recipes.batch import Batch, weighted_losses
from lora_tune.recipes.lora_model import TARGETS, initial_weights, load_base, tokenizer
from lora_tune.recipes.ranks import precision
from lora_tune.recipes.schedule import learning_rate
from lora_tune.recipes.settings import Settings
from lora_tune.recipes.text import Sequences
from lora_tune.recipes.trainer import DROPOUT_SEEDS

OF_BASE = ("model", "datadir", "dtype", "attn", "seq", "eval_samples", "lora_dropout", "threads")
"""What the model and the data depend on."""
OF_PASS = (*OF_BASE, "max_steps", "val_check_interval", "minibs", "lora_rank")
"""What the trials of one pass must have in common; everything else may differ from adapter to adapter."""
IGNORED = frozenset({"TARGET", "PROBE", "WARMUP", "MBS"})
"""Knobs of a trial that make no difference to a whole curve."""
SINGLE = ("TP", "CP", "FSDP")


def points(grid: Mapping[str, object]) -> list[dict[str, object]]:
    """Every combination of the grid's values, the last knob varying fastest.

    Raises InputError for an empty list, or a knob that this program cannot serve.
    """
    for name, values in grid.items():
        if name in IGNORED or (name in SINGLE and values not in (0, 1)):
            raise InputError(f"grid: {name}: has no place here; take it out")
        if values == []:
            raise InputError(f"grid: {name}: allowed is a value or a list of at least one")
    lists = [values if isinstance(values, list) else [values] for values in grid.values()]
    return [dict(zip(grid, combination, strict=True)) for combination in itertools.product(*lists)]


class StackedLora(torch.nn.Module):
    """A frozen linear layer with N adapters, each for its own N-th of the batch.

    The input is [N * b, s, width in]: first the b sequences of the first adapter, then those of the second.
    a: [N, rank, width in]. b: [N, width out, rank]. scale: [N, 1, 1].
    """

    def __init__(self, base: torch.nn.Linear, dropout: float) -> None:
        super().__init__()
        self.base = base
        self.dropout = torch.nn.Dropout(dropout)
        self.a = self.b = self.scale = torch.empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x)
        own = self.dropout(x).view(len(self.a), -1, x.shape[-1]).to(self.a.dtype)
        update = torch.bmm(torch.bmm(own, self.a.mT), self.b.mT) * self.scale
        return y + update.view_as(y)


class Adapters:
    """N adapters as one matrix [N, all their weights], with AdamW over it: a learning rate for each row."""

    BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

    def __init__(self, layers: Sequence[StackedLora], trials: Sequence[Settings], device: torch.device) -> None:
        rank = trials[0].lora_rank
        shapes = [(rank, layer.base.in_features) for layer in layers]
        sizes = [rank * (layer.base.in_features + layer.base.out_features) for layer in layers]
        self._weights = torch.zeros(len(trials), sum(sizes), device=device)
        self._gradients = torch.zeros_like(self._weights)
        self._first, self._second = torch.zeros_like(self._weights), torch.zeros_like(self._weights)
        self._steps = 0
        starts = {t.seed: initial_weights(shapes, t.seed) for t in trials}
        scale = _column([t.lora_alpha / rank for t in trials], device)[:, :, None]
        place = 0
        for i, (layer, shape) in enumerate(zip(layers, shapes, strict=True)):
            layer.a = self._part(place, shape)
            layer.b = self._part(place + shape[0] * shape[1], (layer.base.out_features, rank))
            layer.scale = scale
            with torch.no_grad():
                layer.a.copy_(torch.stack([starts[t.seed][i] for t in trials]))
            place += sizes[i]
        self._decay = _column([t.weight_decay for t in trials], device)
        # Without clipping the limit is infinite.
        self._limit = _column([t.grad_clip or float("inf") for t in trials], device)

    def _part(self, start: int, shape: tuple[int, int]) -> torch.Tensor:
        """Columns of the matrix as a leaf [N, *shape] whose gradient gathers in the same columns."""
        columns = slice(start, start + shape[0] * shape[1])
        leaf = self._weights[:, columns].view(-1, *shape).requires_grad_()
        leaf.grad = self._gradients[:, columns].view(-1, *shape)
        return leaf

    @torch.no_grad()
    def step(self, lr: torch.Tensor) -> None:
        """AdamW (Loshchilov and Hutter 2019, algorithm 2) with rates ``lr`` [N, 1]; clears the gradients."""
        self._steps += 1
        norm = torch.linalg.vector_norm(self._gradients, dim=1, keepdim=True)
        self._gradients.mul_(torch.clamp(self._limit / (norm + 1e-6), max=1.0))
        self._first.lerp_(self._gradients, 1 - self.BETA1)
        self._second.mul_(self.BETA2).addcmul_(self._gradients, self._gradients, value=1 - self.BETA2)
        self._weights.mul_(1 - lr * self._decay)
        spread = (self._second / (1 - self.BETA2**self._steps)).sqrt_().add_(self.EPSILON)
        self._weights.sub_(self._first / spread * (lr / (1 - self.BETA1**self._steps)))
        self._gradients.zero_()


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None]


class Base:
    """The frozen model with stacked adapters, and the data, on the device; shared by one pass after another."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.set_num_threads(settings.threads)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._half = precision(settings) == "bf16"
        tokenize = tokenizer(settings.model)
        self.train = text.load(settings.datadir, "train", settings.seq, tokenize)
        validation = text.load(settings.datadir, "validation", settings.seq, tokenize)
        self.validation = validation.spread(settings.eval_samples) if settings.eval_samples else validation
        self.model = load_base(settings).to(self.device).requires_grad_(False)
        for sequences in (self.train, self.validation):
            sequences.check(self.model.config.vocab_size, str(settings.datadir))
        self.layers = []
        for module in list(self.model.modules()):
            for name, child in list(module.named_children()):
                if name in TARGETS:
                    layer = StackedLora(child, settings.lora_dropout)
                    setattr(module, name, layer)
                    self.layers.append(layer)

    def losses(self, sequences: Sequences, adapters: int) -> torch.Tensor:
        """The mean loss of each sequence: [adapters, b] of ``adapters`` * b sequences."""
        batch = Batch.of(sequences, self.device)
        half = torch.autocast(self.device.type, torch.bfloat16) if self._half else contextlib.nullcontext()
        with half:
            logits = self.model(input_ids=batch.read, use_cache=False).logits
        return weighted_losses(logits, batch.predict, batch.weight).sum(1).view(adapters, -1)


def train(base: Base, trials: Sequence[Settings], tokens: int) -> npt.NDArray[np.float32]:
    """Train the trials, alike in OF_PASS, side by side; their eval losses [trials, evals].

    tokens: about how many a forward pass of an evaluation takes.
    """
    first = trials[0]
    adapters = Adapters(base.layers, trials, base.device)
    # With one trial this is its own stream; of several, dropout is the one thing that depends on the company.
    torch.manual_seed(first.seed + DROPOUT_SEEDS)
    orders = [text.order(len(base.train), first.minibs, t.seed) for t in trials]
    curve = []
    base.model.train()
    for step in range(first.max_steps):
        rows = np.concatenate([next(order) for order in orders])
        with warnings.catch_warnings():
            # Gradients lie in columns of one matrix on purpose; torch warns that this is not its own layout.
            warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
            base.losses(base.train.rows(rows), len(trials)).mean(1).sum().backward()
        adapters.step(_column([_rate(t, step) for t in trials], base.device))
        if (step + 1) % first.interval(first.minibs) == 0 or step + 1 == first.max_steps:
            curve.append(_evaluate(base, len(trials), tokens))
    return torch.stack(curve, 1).cpu().numpy()


def _rate(trial: Settings, step: int) -> float:
    return learning_rate(
        step, peak=trial.lr, floor=trial.min_lr, warmup_steps=trial.warmup_steps, max_steps=trial.max_steps
    )


@torch.no_grad()
def _evaluate(base: Base, adapters: int, tokens: int) -> torch.Tensor:
    base.model.eval()
    total = torch.zeros(adapters, device=base.device)
    count = len(base.validation)
    share = max(1, tokens // (adapters * base.settings.seq))
    for start in range(0, count, share):
        rows = np.arange(start, min(start + share, count))
        total += base.losses(base.validation.rows(np.tile(rows, adapters)), adapters).sum(1)
    base.model.train()
    return total / count


def passes(trials: Sequence[Settings], tokens: int) -> Iterator[list[int]]:
    """Numbers of trials that can be trained together, with at most ``tokens`` in a step."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, trial in enumerate(trials):
        groups.setdefault(_values(trial, OF_PASS), []).append(number)
    for group in groups.values():
        first = trials[group[0]]
        width = max(1, tokens // (first.minibs * first.seq))
        for start in range(0, len(group), width):
            yield group[start : start + width]


def _values(trial: Settings, names: Sequence[str]) -> tuple[object, ...]:
    return tuple(getattr(trial, name) for name in names)


def run(grid: Mapping[str, object], tokens: int, seconds: float = math.inf) -> dict[str, Any]:
    """The table of the grid, array by array; see the module's text. No pass begins after ``seconds``."""
    wanted = points(grid)
    trials = [knobs.read({name: str(value) for name, value in point.items()}) for point in wanted]
    evaluations = [_eval_steps(t) for t in trials]
    losses = np.full((len(trials), max(map(len, evaluations))), np.nan, np.float32)
    samples = np.full(losses.shape, np.nan)
    trained: list[int] = []
    base = Base(trials[0])
    began = time.monotonic()
    for numbers in passes(trials, tokens):
        if time.monotonic() - began > seconds:
            break
        together = [trials[i] for i in numbers]
        if _values(together[0], OF_BASE) != _values(base.settings, OF_BASE):
            base = Base(together[0])
        curves = train(base, together, tokens)
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


def _meta(grid: Mapping[str, object], base: Base, seconds: float) -> dict[str, object]:
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
