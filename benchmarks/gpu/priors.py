"""What a table of packed runs says of the first learning rate of a new cell: ``python -m benchmarks.gpu.priors TABLE``

TABLE is the .npz of the ``priors`` part of ``real_base_figures``. A cell is a rank, an alpha, a batch and targets; its
best rate is the vertex of a parabola through the mean losses of its seeds around the best one. Each (rank, batch) is
left out in turn: a line over log rate by log rank, log alpha, log batch and targets is fitted to the other cells, with
an 80% interval (Student's t). Prints how often that held the best rate, and what the first proposal loses, beside
fixed rules.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

RULES = {"2e-4 (QLoRA; 10 times full fine-tuning at 2e-5)": 2e-4, "1e-3": 1e-3, "1e-4": 1e-4}


def cells(table: Any) -> dict[tuple[int, int, int, str], tuple[np.ndarray, np.ndarray]]:
    """Log rates and mean losses of the seeds, by (rank, alpha, batch, targets); what is no number counts worst."""
    last = np.array([row[~np.isnan(s)][-1] for row, s in zip(table["eval_loss"], table["samples"], strict=True)])
    keys = list(zip(*(table[n].tolist() for n in ("LORA_RANK", "LORA_ALPHA", "MINIBS", "LORA_TARGETS")), strict=True))
    found = {}
    for key in sorted(set(keys)):
        own = np.array([k == key for k in keys])
        rates = np.unique(table["LR"][own])
        losses = [last[own & (table["LR"] == rate)].mean() for rate in rates]
        found[key] = np.log(rates), np.nan_to_num(np.array(losses), nan=np.nanmax(losses) + 1)
    return found


def best(rates: np.ndarray, losses: np.ndarray) -> float:
    """The log rate of the lowest loss."""
    at = int(np.clip(np.argmin(losses), 1, len(rates) - 2))
    a, b, _ = np.polyfit(rates[at - 1 : at + 2], losses[at - 1 : at + 2], 2)
    return float(np.clip(-b / (2 * a), rates[0], rates[-1])) if a > 0 else float(rates[np.argmin(losses)])


def main() -> None:
    """Print one JSON line a figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", type=Path)
    every = cells(np.load(parser.parse_args().table, allow_pickle=True))
    keys = list(every)
    features = np.array([[1, np.log(r), np.log(a), np.log(b), float(t == "all")] for r, a, b, t in keys])
    tops = np.array([best(*every[key]) for key in keys])
    inside, regrets = [], {name: [] for name in ("left-out line", *RULES)}
    for left in sorted({(r, b) for r, _, b, _ in keys}):
        out = np.array([(key[0], key[2]) == left for key in keys])
        used = features[~out]
        weights, *_ = np.linalg.lstsq(used, tops[~out], rcond=None)
        free = len(used) - np.linalg.matrix_rank(used)
        spread = np.sum((tops[~out] - used @ weights) ** 2) / free
        for key, row, top in zip(
            (k for k, o in zip(keys, out, strict=True) if o), features[out], tops[out], strict=True
        ):
            half = stats.t.ppf(0.9, free) * np.sqrt(spread * (1 + row @ np.linalg.pinv(used.T @ used) @ row))
            inside.append(abs(top - row @ weights) <= half)
            rates, losses = every[key]
            proposals = {"left-out line": row @ weights, **{name: np.log(rate) for name, rate in RULES.items()}}
            for name, at in proposals.items():
                regrets[name].append(float(np.interp(at, rates, losses) - losses.min()))
    weights, *_ = np.linalg.lstsq(features, tops, rcond=None)
    names = ("1", "log rank", "log alpha", "log batch", "all targets")
    print(
        json.dumps(
            {"cells": len(keys), "exponents": {n: round(float(w), 3) for n, w in zip(names, weights, strict=True)}}
        )
    )
    print(json.dumps({"coverage": round(float(np.mean(inside)), 3), "asked": 0.8, "cells": len(inside)}))
    for name, losses in regrets.items():
        print(
            json.dumps(
                {"rule": name, "median_regret": round(float(np.median(losses)), 4), "worst": round(max(losses), 3)}
            )
        )


if __name__ == "__main__":
    main()
