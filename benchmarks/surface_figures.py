"""Derive the figures of the simulated surfaces from the public MLPerf results v4.0 to v5.0.

``python -m benchmarks.surface_figures [FOLDER]`` reads ``submissions.csv`` and ``runs.jsonl.gz`` from FOLDER (default:
``$LORA_TUNE_MLPERF`` or ``../shared/mlperf``) and writes ``lora_tune_simulation/figures.json``. Only figures are
written: regression coefficients, noise levels and their residuals, none of the runs.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

TARGET = 0.925
EVAL_SEQUENCES = 173
OUTPUT = Path(__file__).resolve().parent.parent / "lora_tune" / "simulation" / "figures.json"
Rows = list[dict[str, str]]


def number(row: dict[str, str], key: str) -> float:
    return float(row[key]) if row[key] else math.nan


def convergence(rows: Rows) -> dict[str, Any]:
    """ln(mean samples to the target) over submissions, by g = ln(GBS/8), l = ln(LR/4e-4), ln(steps/1024)."""
    # Intel's and Juniper's stacks differ (other framework, other batch order): their samples cannot be pooled.
    rows = [r for r in rows if number(r, "samples_mean") > 0 and r["submitter"] != "JuniperNetworks"]
    rows = [r for r in rows if r["submitter"] not in ("smc-ac-power", "smc-dc-power")]  # duplicates of other runs
    g = np.array([math.log(number(r, "gbs") / 8) for r in rows])
    rate = np.array([math.log(number(r, "lr") / 4e-4) for r in rows])
    steps = np.array([math.log(number(r, "max_steps") / 1024) for r in rows])
    x = np.c_[np.ones_like(g), g, g**2, rate, rate * g, steps]
    y = np.log([number(r, "samples_mean") for r in rows])
    beta, *_ = np.linalg.lstsq(x, y, rcond=None)
    residual = y - x @ beta
    return {
        "terms": ["1", "g", "g^2", "l", "l*g", "ln(steps/1024)"],
        "coefficients": [round(float(b), 4) for b in beta],
        "covariance": np.round(np.linalg.inv(x.T @ x) * residual.var(ddof=6), 8).tolist(),
        "residual_sd": round(float(residual.std(ddof=6)), 4),
        "submissions": len(rows),
        "learning_rate_range": [min(number(r, "lr") for r in rows), max(number(r, "lr") for r in rows)],
        "steps_range": [min(number(r, "max_steps") for r in rows), max(number(r, "max_steps") for r in rows)],
    }


def noise(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Slope of the median curve by GBS, and noise of single evals about their submission's median (GBS 8)."""
    by_submission: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        by_submission[run["path"].rsplit("/", 1)[0]].append(run)
    slopes: dict[int, list[float]] = defaultdict(list)
    gap: list[float] = []
    residuals: list[list[float]] = []
    for group in by_submission.values():
        columns: dict[float, list[float]] = defaultdict(list)
        for run in group:
            for samples, loss, _ in run["evals_samples_loss_seconds"]:
                columns[samples].append(loss)
        full = sorted(s for s, losses in columns.items() if len(losses) >= 0.7 * len(group))
        if len(full) < 3:
            continue
        medians = [float(np.median(columns[s])) for s in full]
        slope, level = np.polyfit(np.log(full), medians, 1)
        gbs = group[0]["gbs"]
        slopes[gbs].append(float(slope))
        if gbs != 8:
            continue
        stops = [run["evals_samples_loss_seconds"][-1][0] for run in group]
        gap.append(float(np.mean(stops)) - math.exp((TARGET - level) / slope))
        if len(group) >= 8:
            at = dict(zip(full, medians, strict=True))
            for run in group:
                seen = {s: loss - at[s] for s, loss, _ in run["evals_samples_loss_seconds"] if s in at}
                residuals.append([seen.get(s, math.nan) for s in (1536, 1920, 2304, 2688)])
    table = np.array([r for r in residuals if not any(map(math.isnan, r))])
    core = table[np.abs(table).max(axis=1) < 0.008]
    covariance = np.cov(core.T)
    shared = float(np.mean(covariance[np.triu_indices(4, 1)]))
    return {
        "slope_by_gbs": {str(g): round(float(np.median(v)), 4) for g, v in sorted(slopes.items())},
        "mean_stop_minus_median_crossing_samples": round(float(np.median(gap)), 1),
        "run_offset_sd": round(math.sqrt(shared), 5),
        "eval_noise_sd": round(math.sqrt(float(np.mean(np.diag(covariance))) - shared), 5),
        "spike_share": round(float(np.mean(table > 0.01)), 4),
        "spike_median": round(float(np.median(table[table > 0.01])), 4),
        "runs": len(table),
    }


def throughput(rows: Rows, accelerators: tuple[str, ...]) -> dict[str, Any]:
    """ln samples/s per GPU and ln seconds of one eval round by layout, with the pipeline bubble divided out first."""
    rows = [r for r in rows if r["acc"] in accelerators and r["tp"] and r["thr"]]
    rows = [r for r in rows if r["submitter"] not in ("smc-ac-power", "smc-dc-power")]
    gpus, nodes, tp, cp, pp, gbs = (
        np.array([number(r, k) for r in rows]) for k in ("n_acc", "nodes", "tp", "cp", "pp", "gbs")
    )
    dp = gpus / (tp * cp * pp)
    older = np.array([r["round"] == "v4.0" for r in rows], dtype=float)
    which = np.array([[r["acc"] == a for a in accelerators] for r in rows], dtype=float)
    bubble = np.log1p((pp - 1) / (gbs / dp))
    rate = np.log(np.array([number(r, "thr") for r in rows]) / gpus) + bubble
    # lstsq gives 0 for a column of zeros (no TP > 1, no v4.0), which means "no data" without a special case.
    x = np.c_[which, np.log2(tp), np.log2(cp), np.log2(nodes), older]
    beta, *_ = np.linalg.lstsq(x, rate, rcond=None)
    names = [*accelerators, "log2_tp", "log2_cp", "log2_nodes", "v4.0"]
    rounds = np.ceil(EVAL_SEQUENCES / dp)
    seconds = np.log(np.array([number(r, "eval_s") for r in rows]) / rounds)
    z = np.c_[which, np.log2(tp), np.log2(cp), np.log2(nodes)]
    gamma, *_ = np.linalg.lstsq(z, seconds, rcond=None)

    def named(values: Any) -> dict[str, float]:
        return {n: round(float(v), 4) for n, v in zip(names, values, strict=False)}

    cold: dict[int, list[float]] = defaultdict(list)
    for r in rows:
        loss = number(r, "first_eval") * (1 / number(r, "thr_firstblock") - 1 / number(r, "thr"))
        cold[int(number(r, "nodes"))].append(loss)
    return {
        "cold_seconds_by_nodes": {str(n): round(max(0.0, float(np.median(v))), 1) for n, v in sorted(cold.items())},
        "ln_samples_per_second_per_gpu": named(beta),
        "residual_sd": round(float((rate - x @ beta).std()), 4),
        "ln_seconds_per_eval_round": named(gamma),
        "eval_residual_sd": round(float((seconds - z @ gamma).std()), 4),
        "submissions": len(rows),
    }


def initialisation(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds from init_start to run_start, as a lognormal by its quartiles."""
    seconds = np.array([r["init_seconds"] for r in runs if (r["init_seconds"] or 0) > 5])
    low, middle, high = np.percentile(seconds, [25, 50, 75])
    return {"median_seconds": round(float(middle), 1), "sigma_ln": round(math.log(high / low) / 1.349, 3)}


def main() -> None:
    default = os.environ.get("LORA_TUNE_MLPERF", str(OUTPUT.parents[2].parent / "shared" / "mlperf"))
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    with (folder / "submissions.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with gzip.open(folder / "runs.jsonl.gz", "rt", encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    single = [r for r in runs if r["gbs"] == 8]
    figures = {
        "provenance": "Public MLPerf Training llama2_70b_lora results v4.0 to v5.0 (MLCommons, Apache-2.0); "
        "made by python -m benchmarks.surface_figures",
        "convergence": convergence(rows),
        "noise": noise(runs),
        "hopper": throughput(rows, ("H100", "H200")),
        "blackwell": throughput(rows, ("B200", "GB200")),
        "initialisation": initialisation(single),
    }
    OUTPUT.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    print(OUTPUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
