"""A sweep as a compact record for the repository: ``python -m benchmarks.gpu.record SWEEP_FOLDER RECORD_FOLDER``.

Writes ``study.toml``, ``trials.csv`` (one line a trial), ``curves.csv`` (every eval), the best ``config_*.sh``, what
``confirm`` found, and prints what the README says of the sweep: trials by verdict, spread, idle time between trials.
"""

from __future__ import annotations

import csv
import itertools
import json
import shutil
import sys
from pathlib import Path

from lora_tune.cli.export import export_best
from lora_tune.cli.options import recorded_study
from lora_tune.store import Store, sqlite_url
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords, Verdict
from lora_tune.workloads import load

METRICS = ("samples_per_second", "seconds_per_eval", "init_seconds", "evals", "last_loss", "node_hours")


def write_tables(sweep: StudyRecords, folder: Path) -> None:
    """``trials.csv`` and ``curves.csv``."""
    with (folder / "trials.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        tuned = list(next(iter(sweep.trials.values())).tuned)
        out.writerow(["trial", *tuned, "verdict", "seconds", "samples", *METRICS, "sentence"])
        for t in sweep.trials.values():
            values = [t.tuned[name] for name in tuned]
            known = as_mapping(t.metrics)
            measured = [known.get(name, "") for name in METRICS]
            out.writerow([t.number, *values, t.verdict or t.state, t.seconds, t.samples, *measured, t.sentence])
    with (folder / "curves.csv").open("w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(["trial", "attempt", "samples", "loss", "seconds"])
        for (trial, attempt), evals in sorted(sweep.evals.items()):
            out.writerows([trial, attempt, f"{e.samples:g}", e.loss, e.seconds] for e in evals)


def taken_over(log: Path) -> set[int]:
    """Trials that ran on while no driver did: the gap behind them is that of whoever started the sweep again."""
    events = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return {event["trial"] for event in events if event["event"] == "adopted"}


def main(source: Path, target: Path) -> None:
    store = Store(sqlite_url(source / "sweep.db"), read_only=True)
    sweep = store.load(store.names()[0])
    assert sweep is not None, f"no sweep in {source}"
    study = recorded_study(sweep, Path("studies") / f"{sweep.name}.toml")
    target.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "study.toml", target / "study.toml")
    if (source / "confirm" / "confirmation.json").exists():
        shutil.copyfile(source / "confirm" / "confirmation.json", target / "confirmation.json")
    write_tables(sweep, target)
    written = export_best(study, sweep, load(study, source / "study.toml"), target)
    if written is None:
        print("no trial reached the target: no config is written")
    # Exported here, run elsewhere: this machine's paths and versions say nothing, so the twins that hold them go.
    for file in target.glob("config_*"):
        if file.suffix != ".sh":
            file.unlink()
            continue
        lines = file.read_text(encoding="utf-8").replace(f"{Path.cwd()}/", "").splitlines(keepends=True)
        file.write_text("".join(line for line in lines if not line.startswith("# optuna")), encoding="utf-8")
    _say(sweep, taken_over(source / "driver.log"))


def _say(sweep: StudyRecords, adopted: set[int]) -> None:
    """What the README says of the sweep."""
    counts = {v.value: sum(t.verdict is v for t in sweep.trials.values()) for v in Verdict}
    ends = sorted((a.started_at, a.ended_at, a.trial) for a in sweep.attempts.values() if a.started_at and a.ended_at)
    gaps = [later[0] - earlier[1] for earlier, later in itertools.pairwise(ends) if earlier[2] not in adopted]
    print({name: count for name, count in counts.items() if count})
    reached = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED]
    for what, found in (
        ("seconds to target", sorted(t.seconds for t in reached if t.seconds is not None)),
        ("samples/s", sorted(float(t.metrics.samples_per_second) for t in reached)),
    ):
        if found:
            print(f"{what}: {found[0]:.4g} to {found[-1]:.4g} ({found[-1] / found[0]:.2f}x)")
    print(f"from a trial's end to the next one's start: mean {sum(gaps) / len(gaps):.1f} s, at most {max(gaps):.0f} s")
    print(f"node-hours: {sum(t.metrics.node_hours or 0.0 for t in sweep.trials.values()):.3f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
