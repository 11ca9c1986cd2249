"""Write the table of published results that warm-starts a search: ``lora_tune/search/published.csv``.

``python -m benchmarks.published_table`` reads the submissions of the public MLPerf results (``LORA_TUNE_MLPERF``): v4.0
to v5.0, and the half of v5.1 that is at hand. One row a submission; figures only: means over its runs. Which trained
in FP4 and was healed (in a higher precision from a step on) is seen in the curves of its runs, whatever its
configuration files say: several lie beside each other, and the environment may switch it on. The step is the one that
every public configuration which heals has.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from benchmarks.public_runs import by_submission, folder, load
from lora_tune.curves.phases import recognised

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


def rows() -> list[list[str]]:
    """The table's rows in the order of ``COLUMNS``; an empty field where nobody says it."""
    runs = by_submission(load())
    healed = {name for name, group in runs.items() if recognised([r.run for r in group])}
    found = [r for name in ("submissions.csv", "submissions_v5.1.csv") for r in _read(name)]
    kept = [r for r in found if r["submitter"] not in SAME_RUNS_AGAIN + OTHER_STACK]
    return [_row({**r, **_precision(r, healed)}) for r in kept]


def _read(name: str) -> list[dict[str, str]]:
    with (folder() / name).open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _precision(row: Mapping[str, str], healed: set[str]) -> dict[str, str]:
    """Precision and healing step: FP4 where the curves show it, else what the one configuration says."""
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
        file.write("# MLPerf Training llama2_70b_lora, closed division, v4.0 to v5.0 and half of v5.1 ")
        file.write("(MLCommons, Apache-2.0); made by python -m benchmarks.published_table\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS.values())
        writer.writerows(found)
    print(f"{len(found)} submissions, {sum(int(r[-1]) for r in found)} runs -> {OUTPUT}")


if __name__ == "__main__":
    main()
