"""Write the table of published results that warm-starts a search: ``lora_tune/search/published.csv``.

``python -m benchmarks.published_table [FOLDER]`` reads ``submissions.csv`` of the public MLPerf results (see
``benchmarks.surface_figures``). One row a submission; figures only: means over its runs.
"""

from __future__ import annotations

import csv
import os
import sys
from pathlib import Path

OUTPUT = Path(__file__).resolve().parent.parent / "lora_tune" / "search" / "published.csv"
COLUMNS = {
    "round": "round", "submitter": "submitter", "system": "system", "acc": "accelerator", "n_acc": "accelerators",
    "nodes": "nodes", "tp": "TP", "pp": "PP", "cp": "CP", "ga": "MINIBS", "gbs": "GBS", "lr": "LR",
    "max_steps": "MAX_STEPS", "warmup": "warmup_ratio", "samples_mean": "mean_samples", "samples_sd": "sd_samples",
    "thr": "samples_per_second", "eval_s": "seconds_per_eval", "runs": "runs",
}  # fmt: skip
SAME_RUNS_AGAIN = ("smc-ac-power", "smc-dc-power")
OTHER_STACK = ("JuniperNetworks",)


def main() -> None:
    default = os.environ.get("LORA_TUNE_MLPERF", str(OUTPUT.parents[2].parent / "shared" / "mlperf"))
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else default)
    with (folder / "submissions.csv").open(encoding="utf-8") as file:
        rows = [r for r in csv.DictReader(file) if r["submitter"] not in SAME_RUNS_AGAIN + OTHER_STACK]
    with OUTPUT.open("w", encoding="utf-8", newline="") as file:
        file.write("# MLPerf Training llama2_70b_lora, closed division, v4.0 to v5.0 (MLCommons, Apache-2.0); ")
        file.write("made by python -m benchmarks.published_table\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS.values())
        writer.writerows([row[k] if k == "round" else row[k].removesuffix(".0") for k in COLUMNS] for row in rows)
    print(f"{len(rows)} submissions -> {OUTPUT}")


if __name__ == "__main__":
    main()
