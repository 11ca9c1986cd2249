"""False alarms of ``explain`` on public good runs: ``python -m benchmarks.advice [--each 2]``

Every public log that reached its target (``LORA_TUNE_MLPERF``, ``logs`` and ``more_logs``) is replayed as a trial of
the benchmark's study. The rules of ``explain`` are applied to each run as a separate sweep, and to all runs of a
submission as one sweep, including training losses. A good run needs no remedy, so any advice on its convergence is
false; advice on the machine and MLPerf's rules is listed separately. Prints a line per advice with its count.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.public_runs import folder
from lora_tune.config.study import Study, load_study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import TrainPoint
from lora_tune.review.advice import advise
from lora_tune.review.log_replay import Replay
from lora_tune.store.records import StudyRecords, Verdict

STUDY = Path(__file__).resolve().parent.parent / "studies" / "h100.toml"
ENOUGH_EVALS, ENOUGH_LOSSES = 6, 12
"""Minimum for the rule on overfitting to apply to a run."""


@dataclass(frozen=True, slots=True)
class Submission:
    """The runs of one folder that reached their target, as one sweep, and their training losses by trial."""

    study: Study
    sweep: StudyRecords
    train: dict[int, Sequence[TrainPoint]]


def read(place: Path, study: Study, most: int) -> Submission | None:
    """The first ``most`` result files of a folder; None if none reached its target."""
    replay = Replay(study, lambda _: MllogReader())
    train: dict[int, Sequence[TrainPoint]] = {}
    for number, file in enumerate(sorted(place.glob("result_*.txt.gz"))[:most]):
        train[number] = replay.play(gzip.decompress(file.read_bytes()), str(file)).run.train
    sweeps = replay.sweeps
    if len(sweeps) != 1:
        return None
    (sweep,) = sweeps
    good = {n: t for n, t in sweep.trials.items() if t.verdict is Verdict.REACHED}
    return Submission(study, replace(sweep, trials=good), {n: train[n] for n in good}) if good else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", type=int, default=10, help="runs of each submission [10]")
    root, most = folder(), parser.parse_args().each
    # Other benchmarks measure the pruning, which takes nearly all of the time.
    study = load_study(STUDY).with_options({"pruning": {"rule": "none", "cap": False}})
    alone, together, runs, looked_at = Counter[str](), Counter[str](), 0, 0
    submissions = 0
    for place in sorted({f.parent for kind in ("logs", "more_logs") for f in (root / kind).rglob("result_*.txt.gz")}):
        if (one := read(place, study, most)) is None:
            continue
        submissions += 1
        runs += len(one.sweep.trials)
        for number, trial in one.sweep.trials.items():
            losses, evals = one.train[number], one.sweep.last_evals(number)
            looked_at += len(evals) >= ENOUGH_EVALS and len(losses) >= ENOUGH_LOSSES
            single = replace(one.sweep, trials={number: trial})
            alone.update(a.seen for a in advise(one.study, single, {number: losses}))
        together.update(a.seen for a in advise(one.study, one.sweep, one.train))
    print(f"{runs} good runs of {submissions} submissions, {datetime.date.today()}, {os.cpu_count()} cores")
    print(f"{looked_at} of them have evals and training losses enough for the rule about overfitting")
    for what, counted in (("runs by themselves", alone), ("submissions as sweeps", together)):
        print(f"{what}: {sum(counted.values())} pieces of advice")
        for words, count in counted.most_common():
            print(f"  {count:5d}  {words}")


if __name__ == "__main__":
    main()
