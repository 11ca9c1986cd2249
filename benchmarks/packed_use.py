"""The share of the GPU's peak behind each recorded throughput of packs: ``python -m benchmarks.packed_use``.

Reads ``records/packed_*.json`` and reckons: model FLOPs of the training passes (``Shape.step_flops``), of the 790
TFLOP/s that a large product of matrices reaches on an H200, for all of the time that the figure counts, start-ups and
evaluations included. No GPU is needed. Rows whose trials' lengths are not on record are left out, and named.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu.trials_of_pack import LARGE, PEAK, SMALL, peak_share
from lora_tune.base.llama import SHAPES
from lora_tune_recipes import settings

RECORDS = Path(__file__).parent / "records"


class Row(NamedTuple):
    """figure: what is on record, in words. share: of the peak, NaN where it cannot be reckoned."""

    record: str
    way: str
    figure: str
    share: float


def steps(record: Mapping[str, Any], name: str) -> Iterator[Row]:
    """Trial steps a second, without start-ups."""
    rows = [row for part in ("speed", "variants") for row in _listed(record.get(part, []))]
    for label, row in rows:
        way = f"{label}{row['shape']}, {row['batch']} x {row['seq']}, {row['slots']} slots"
        yield Row(name, way, f"{row['trial_steps_per_second']:.1f} trial steps/s", row["peak_share"])


def _listed(part: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of a part, each with the name of its variant before it."""
    if isinstance(part, dict):
        yield from ((f"{name}: ", row) for name, rows in part.items() for row in rows)
    else:
        yield from (("", row) for row in part)


def an_hour(record: Mapping[str, Any], name: str) -> Iterator[Row]:
    """Trials an hour: of the small base, and of larger shapes."""
    large = record.get("large", {})
    parts = [("small", SMALL, record.get("trials", {}))]
    parts += [(shape, LARGE, ways) for shape, ways in large.items()] if "1b" in large else [("1b", LARGE, large)]
    for shape, trial, ways in parts:
        for way, per_hour in ways.items():
            share = peak_share(SHAPES[shape], trial, per_hour)
            yield Row(name, f"{shape}: {way}", f"{per_hour:,.0f} trials an hour", share)


def sweeps(record: Mapping[str, Any], name: str) -> Iterator[Row]:
    """Whole sweeps, which count the passes that led to each trial's last evaluation."""
    for part, ways in record.items():
        if part.startswith("packed_sweep"):
            for way, row in ways.items():
                if isinstance(row, dict) and "an_hour" in row:
                    share = row.get("peak_share", math.nan)
                    yield Row(name, f"{part}: {way}", f"{row['an_hour']:,.0f} trials an hour", share)


def live(record: Mapping[str, Any], name: str) -> Iterator[Row]:
    """Runs of ``packed_live``: trials that ended, at the target or at their last step."""
    from benchmarks.gpu.packed_live import GPU, in_order

    every = {number: settings.read({**own, "TARGET": "1"}) for number, own in in_order("lora_small", GPU, 1)}
    for way, run in record.items():
        flops, last = 0.0, run["ends"][-1][0]
        for _, number, stop in run["ends"]:
            trial = every[number]
            samples = stop if stop is not None else trial.max_steps * trial.minibs
            flops += SHAPES["small"].step_flops(int(samples) * trial.seq, trial.seq)
        per_hour = 3600 * len(run["ends"]) / last
        yield Row(name, way, f"{per_hour:,.0f} trials an hour", flops / (last * PEAK))


def rows() -> list[Row]:
    """Every throughput on record."""
    found: list[Row] = []
    for file in sorted(RECORDS.glob("packed_*.json")):
        record = json.loads(file.read_text())
        kinds = (live,) if "live" in file.stem else (steps, an_hour, sweeps)
        found += [row for kind in kinds for row in kind(record, file.stem)]
    return found


def main() -> None:
    every = rows()
    for row in every:
        if math.isfinite(row.share):
            print(f"{row.record:>20}  {row.way:<66} {row.figure:>24}  {100 * row.share:5.2f}%")
    unknown = [f"{row.record}, {row.way}" for row in every if not math.isfinite(row.share)]
    print(f"not reckoned, since the lengths of the trials are not on record: {'; '.join(unknown) or 'none'}")


if __name__ == "__main__":
    main()
