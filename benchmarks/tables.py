"""Tables of real trials, shipped as surfaces or stored here: ``python -m benchmarks.tables [NAME...]`` prints them.

``python -m benchmarks.tables --ship TABLE.npz NAME`` makes the compact file from the output of ``python -m
lora_tune_recipes.many_adapters``: losses rounded to 0.0001, columns of text and folders omitted.

Prints how many of the grid's points reach a target with every seed, and their spread, for a range of targets. A
surface's target is the loss that a quarter of the points reach with every seed, rounded down to 0.01: good runs reach
it in the middle of their schedule, as MLPerf's do, and most points never do. Then, at that target, mean samples by
learning rate, batch and schedule, the spread between seeds, and the cost of warm-up for schedules of each length.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_tune_simulation.tabular import TABLES, Array, Table, read_table

SHARE = 0.25
"""Share of the grid's points that reach the target with every seed."""
EASIER = 0.1
"""Distance above the chosen target of an easier one, which the shortest schedules reach too."""
FOLDERS = ("MODEL", "DATADIR")
SURFACES = ("lora_tiny", "lora_small")
NAMES = (*SURFACES, "lora_warmup")
RECORDS = Path(__file__).parent / "records"


def path_of(name: str) -> Path:
    """File of a table: in the package if a surface uses it, else with the other records."""
    return (TABLES if name in SURFACES else RECORDS) / f"{name}.npz"


def chosen_target(table: Table) -> float:
    """The loss that ``SHARE`` of the points reach with every seed, rounded down to 0.01."""
    lowest = np.min(np.where(np.isnan(table.losses), np.inf, table.losses), axis=-1)
    return math.floor(100 * float(np.quantile(lowest.max(axis=-1), SHARE))) / 100


def compact(data: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays to ship, from those of many_adapters."""
    kept = {name: column for name, column in data.items() if column.dtype.kind in "iuf"}
    meta = json.loads(str(data["meta"]))
    meta["grid"] = {name: value for name, value in meta["grid"].items() if name not in FOLDERS}
    kept["samples"] = data["samples"].astype(np.float32)
    kept["eval_loss"] = np.round(data["eval_loss"].astype(np.float64), 4).astype(np.float32)
    return {**kept, "meta": json.dumps(meta)}


def ship(source: Path, name: str) -> Path:
    """Write the compact file of a full grid. Raises InputError for any other table."""
    read_table(source)
    path = path_of(name)
    path.parent.mkdir(exist_ok=True)
    with np.load(source, allow_pickle=False) as data:
        np.savez_compressed(path, **compact(data))
    return path


def show(name: str) -> None:
    """Print the contents of a table."""
    path = path_of(name)
    table = read_table(path)
    meta = json.loads(str(np.load(path)["meta"]))
    points = math.prod(len(v) for v in table.axes.values())
    print(f"\n{name}: {points * table.seeds} trials of {meta['parameters'] / 1e6:.1f} M parameters, on")
    print(f"{meta['device']} in {meta['seconds']} s, {meta['date']}; {path.stat().st_size // 1000} kB")
    for axis, values in [*table.axes.items(), ("seeds", (table.seeds,))]:
        print(f"  {axis}: {', '.join(f'{v:g}' for v in values)}")
    target = chosen_target(table)
    print(f"\n{'target':>8} {'by all seeds':>13} {'by some':>8} {'fewest samples':>15} {'median':>7} {'most':>6}")
    for at in sorted({round(target + step, 2) for step in (-0.06, -0.04, -0.02, 0.0, 0.02, 0.04, 0.06)}):
        found = table.stops(at)
        all_seeds, some = np.isfinite(found).all(axis=-1), np.isfinite(found).any(axis=-1)
        means = found.mean(axis=-1)[all_seeds]
        told = [f"{x:.0f}" for x in (means.min(), np.median(means), means.max())] if len(means) else ["", "", ""]
        mark = " <" if at == target else ""
        print(f"{at:8.2f} {all_seeds.mean():13.0%} {some.mean():8.0%} {told[0]:>15} {told[1]:>7} {told[2]:>6}{mark}")
    by_rate(table, target)
    by_warmup(table, target + EASIER)


def crossings(table: Table, target: float) -> Array:
    """Samples at which each curve crosses ``target`` [*axes, seeds], interpolated between evals; NaN if it does not
    cross, or crosses before its first eval."""
    reached = table.losses <= target
    at = np.maximum(np.argmax(reached, axis=-1), 1)[..., None]
    samples = np.broadcast_to(table.samples, table.losses.shape)
    (x1, x0), (y1, y0) = (
        [np.take_along_axis(v, at - back, axis=-1)[..., 0] for back in (0, 1)] for v in (samples, table.losses)
    )
    with np.errstate(invalid="ignore", divide="ignore"):
        between = x0 + (y0 - target) / (y0 - y1) * (x1 - x0)
    return np.asarray(np.where(reached.any(axis=-1) & ~reached[..., 0], between, np.nan))


def warmup_lost(table: Table, target: float) -> Array:
    """Delay of the crossing by warm-up, in samples, relative to the samples of the warm-up: [batch, warm-up, schedule,
    learning rate] from geometric means over seeds; NaN if a seed does not cross."""
    names = list(table.axes)
    found = np.exp(np.log(crossings(table, target)).mean(axis=-1))
    found = np.moveaxis(found, [names.index(n) for n in ("GBS", "WARMUP_STEPS", "MAX_STEPS")], [0, 1, 2])
    warmups = np.array(table.axes["WARMUP_STEPS"][1:])[:, None, None]
    return np.asarray((found[:, 1:] - found[:, :1]) / (np.array(table.axes["GBS"])[:, None, None, None] * warmups))


def by_warmup(table: Table, target: float) -> None:
    """Share of warm-up that is lost by batch and warm-up (rows) and schedule (columns): median over the learning rates
    at which every schedule crosses, and over all that do."""
    lost, steps = warmup_lost(table, target), table.axes["MAX_STEPS"]
    print(f"\nSamples by which runs cross {target:.2f} later, over those of their warm-up, by schedule in steps")
    print(f"{'GBS':>4} {'warm-up':>8} " + " ".join(f"{s:>6g}" for s in steps) + "   learning rates")
    for g, w in itertools.product(range(lost.shape[0]), range(lost.shape[1])):
        common = np.isfinite(lost[g, w]).all(axis=0)
        cells = [f"{np.median(row):6.2f}" if common.any() else f"{'-':>6}" for row in lost[g, w][:, common]]
        head = f"{table.axes['GBS'][g]:4g} {table.axes['WARMUP_STEPS'][w + 1]:8g}"
        print(f"{head} {' '.join(cells)}   {common.sum()}")
    print(f"median of all {np.isfinite(lost).sum()}: {np.nanmedian(lost):.2f}")


def by_rate(table: Table, target: float) -> None:
    """Mean samples to the target by learning rate (rows), batch and schedule (columns), with the best warm-up each."""
    found = table.stops(target)
    names = list(table.axes)
    rate = names.index("LR")
    shown = [names.index(n) for n in ("GBS", "MAX_STEPS") if n in names]
    columns = list(itertools.product(*(range(len(table.axes[names[i]])) for i in shown)))
    print(f"\nMean samples to {target:g} (- where a seed does not reach it), the best warm-up each")
    heads = ["/".join(f"{table.axes[names[i]][at]:g}" for i, at in zip(shown, c, strict=True)) for c in columns]
    print(f"{'LR':>8} " + " ".join(f"{h:>8}" for h in heads) + f"   ({'/'.join(names[i] for i in shown)})")
    for row, value in enumerate(table.axes["LR"]):
        cells = []
        for column in columns:
            index: list[Any] = [slice(None)] * len(names)
            index[rate] = row
            for i, at in zip(shown, column, strict=True):
                index[i] = at
            best = float(found[tuple(index)].mean(axis=-1).min())
            cells.append(f"{best:8.0f}" if math.isfinite(best) else f"{'-':>8}")
        print(f"{value:8g} " + " ".join(cells))
    all_seeds = np.isfinite(found).all(axis=-1)
    spread = np.log(found[all_seeds]).std(axis=-1, ddof=1)
    print(f"spread of ln(samples) between seeds of a point: median {np.median(spread):.1%}, root mean square ", end="")
    print(f"{np.sqrt((spread**2).mean()):.1%}; evals are {table.interval:g} samples apart")


def main() -> int:
    """Make a compact table, or print the existing ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--ship", type=Path, metavar="TABLE", help="make the shipped file NAME of this one")
    options = parser.parse_args()
    for name in options.names:
        if options.ship:
            print(ship(options.ship, name))
        show(name)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
