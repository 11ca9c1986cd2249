"""Write the table of published results that warm-starts a search: ``lora_tune/search/published.csv``.

``python -m benchmarks.published_table`` reads the submissions of the public MLPerf results (``LORA_TUNE_MLPERF``): v4.0
to v5.0, and the available halves of v5.1 and v6.0; of v6.0 one to three runs each. One row per submission, only
figures: means over its runs. Whether runs trained in FP4 and were healed (in a higher precision from some step on) is
inferred from their curves, whatever the config files set: submissions have several, and the environment may switch it
on. The step is that of every public configuration that heals.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks.public_runs import by_submission, folder, load
from lora_tune.curves.phases import recognised
from lora_tune.logs.run import Eval

OUTPUT = Path(__file__).resolve().parent.parent / "lora_tune" / "search" / "published.csv"
COLUMNS = {
    "round": "round", "submitter": "submitter", "system": "system", "acc": "accelerator", "n_acc": "accelerators",
    "nodes": "nodes", "tp": "TP", "pp": "PP", "cp": "CP", "ga": "MINIBS", "gbs": "GBS", "lr": "LR",
    "max_steps": "MAX_STEPS", "warmup": "warmup_ratio", "precision": "precision", "healing": "HEALING_ITER",
    "samples_mean": "mean_samples", "samples_sd": "sd_samples", "thr": "samples_per_second",
    "eval_s": "seconds_per_eval", "runs": "runs",
}  # fmt: skip
NAMES = ("round", "submitter", "system")
SAME_RUNS_AGAIN = ("smc-ac-power", "smc-dc-power")
OTHER_STACK = ("JuniperNetworks",)
NEWEST = "runs_v6.0.jsonl"
MACHINES = {
    "MI355X_EPYC_9575F_primus": ("MI355X", 8, 1),
    "G893-ZX1-AAX4_pytorch": ("MI355X", 8, 1),
    "8xMI350X_2xEPYC_9575F_SUTA": ("MI350X", 8, 1),
    "PowerEdge-XE9680-MI300X-192GB_n1_v5.0": ("MI300X", 8, 1),
    "theia_ngpu72_ngc26.04_nemo": ("GB300", 72, 18), "theia_ngpu8_ngc26.04_nemo": ("GB300", 8, 2),
    "1xC880A_M8-8xB300-SXM-288GB": ("B300", 8, 1), "1xXE7740x8H200-NVL-141GB": ("H200-NVL", 8, 1),
    "Cray-XD670-H200-SXM5-141GB_n2_v5.0": ("H200", 16, 2), "Zeus_8xH100_SXM_80GB": ("H100", 64, 8),
    "Isambard-AI-Phase2-GH200-96GB_n1_v6.0": ("GH200", 4, 1),
    "Isambard-AI-Phase2-GH200-96GB_n2_v6.0": ("GH200", 8, 2),
    "Isambard-AI-Phase2-GH200-96GB_n4_v6.0": ("GH200", 16, 4),
}  # fmt: skip
"""Systems of v6.0, whose logs mostly contain placeholders: accelerator, count and nodes of the system descriptions."""
HEALED_AT = {"MI": "340", "": "350"}
"""Step at which runs of v6.0 heal: AMD's default, and that of every public configuration of NVIDIA."""


def rows() -> list[list[str]]:
    """The table's rows in the order of ``COLUMNS``; unknown fields are empty."""
    runs = by_submission(load())
    healed = {name for name, group in runs.items() if recognised([r.run for r in group])}
    found = [r for name in ("submissions.csv", "submissions_v5.1.csv") for r in _read(name)]
    kept = [r for r in found if r["submitter"] not in SAME_RUNS_AGAIN + OTHER_STACK]
    return [_row({**r, **_precision(r, healed)}) for r in kept] + [_row(r) for r in _newest()]


def _newest() -> list[dict[str, str]]:
    """Submissions of v6.0, of which single runs are known."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for line in (folder() / NEWEST).read_text(encoding="utf-8").splitlines():
        run = json.loads(line)
        if run["benchmark"] == "llama2_70b_lora" and run["complete"]:
            found[run["submitter"], run["system"]].append(run)
    return [_of_runs(submitter, system, runs) for (submitter, system), runs in sorted(found.items())]


def _of_runs(submitter: str, system: str, runs: list[dict[str, Any]]) -> dict[str, str]:
    accelerator, count, nodes = MACHINES[system]
    first: dict[str, Any] = {k: next((r[k] for r in runs if r[k] is not None), "") for k in runs[0]}
    stops = [run["evals"][-1][0] for run in runs]
    step, batch = first["train_step_time_first_block"], first["global_batch_size"]
    said, config = (str(first[k]).upper() for k in ("lowest_numerical_precision_in_linear", "config_filename"))
    curves = [[Eval(*e) for e in run["evals"]] for run in runs]
    fp4 = bool(recognised(curves)) or "FP4" in said or "FP4" in config or "fp4" in first["notes"]
    row = {
        "round": "v6.0", "submitter": submitter, "system": system, "acc": accelerator, "n_acc": count, "nodes": nodes,
        "tp": first["tensor_parallelism"], "pp": first["pipeline_parallelism"], "cp": first["context_parallelism"],
        "ga": first["gradient_accumulation_steps"], "gbs": batch, "lr": first["opt_base_learning_rate"],
        "max_steps": first["opt_learning_rate_training_steps"], "warmup": 0, "precision": "FP4" if fp4 else said,
        "healing": next(h for kind, h in HEALED_AT.items() if accelerator.startswith(kind)) if fp4 else "",
        "samples_mean": round(mean(stops), 1), "samples_sd": round(stdev(stops), 1) if len(stops) > 1 else "",
        "thr": round(batch / step, 4) if step else round(float(first["throughput"]), 4) if first["throughput"] else "",
        "eval_s": "", "runs": len(runs),
    }  # fmt: skip
    return {name: str(value) for name, value in row.items()}


def _read(name: str) -> list[dict[str, str]]:
    with (folder() / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _precision(row: Mapping[str, str], healed: set[str]) -> dict[str, str]:
    """Precision and healing step: FP4 if the curves show it, else as in the single configuration."""
    if f"{row['round']}/{row['submitter']}/{row['system']}" in healed:
        steps = {r["HEALING_ITER"] for r in _read("configs_v5.1.csv") if r["HEALING_ITER"]}
        return {"precision": "FP4", "healing": steps.pop() if len(steps) == 1 else ""}
    said = row["precision"]
    return {"precision": "" if "|" in said else said, "healing": ""}


def _row(row: Mapping[str, str]) -> list[str]:
    return [row[k] if k in NAMES else row[k].removesuffix(".0") for k in COLUMNS]


def main() -> None:
    """Write the table."""
    found = rows()
    with OUTPUT.open("w", encoding="utf-8", newline="") as file:
        file.write("# MLPerf Training llama2_70b_lora, closed division, v4.0 to v5.0 and halves of v5.1, v6.0 ")
        file.write("(MLCommons, Apache-2.0); made by python -m benchmarks.published_table\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS.values())
        writer.writerows(found)
    print(f"{len(found)} submissions, {sum(int(r[-1]) for r in found)} runs -> {OUTPUT}")


if __name__ == "__main__":
    main()
