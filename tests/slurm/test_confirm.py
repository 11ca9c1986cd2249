"""The leaders of a sweep run again on real Slurm, several seeds in one allocation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from lora_tune.review.stopping import replicates
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import Verdict
from tests.slurm.house import House

pytestmark = pytest.mark.slurm


def test_run_sub_runs_several_seeds_in_one_allocation_and_each_counts(house: Callable[..., House]) -> None:
    home = house(
        trials=4, target=0.99, environment={"STANDIN_SECONDS": "0.5", "STANDIN_TARGET": "0.99", "NCCL_TEST": "0"}
    )
    assert home.finish(90) == 0, home.said
    command = [sys.executable, "-m", "lora_tune.confirm", "--study", str(home.study), "--output", str(home.paths.root)]
    environment = {**os.environ, **home.cluster.environment, "LORA_TUNE_IMPLEMENTATION": ""}
    done = subprocess.run(
        [*command, "--top", "2", "--seeds", "3"], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr

    store = Store(sqlite_url(home.paths.database), read_only=True)
    race, sweep = store.load(f"{home.name}.confirm"), home.sweep()
    store.close()
    assert race is not None
    leaders = [t for t in sweep.trials.values() if t.verdict is Verdict.REACHED][:2]
    jobs = _jobs(home)
    assert sorted(jobs) == sorted(f"{home.name}.confirm-{number:04d}-0" for number in race.trials)
    assert len(jobs) == len(leaders)
    for trial in race.trials.values():
        assert trial.replicates == 3
        job = (home.paths.root / "confirm" / race.attempts_of(trial.number)[-1].folder / "job.log").read_text()
        assert sorted(set(re.findall(r"Beginning trial (\d) of 3", job))) == ["1", "2", "3"]
        assert sorted(int(s) for s in set(re.findall(r'"key": "seed", "value": (\d+)', job))) == [
            trial.seed,
            trial.seed + 1,
            trial.seed + 2,
        ]
        assert len({run.metrics.last_loss for run in trial.metrics.runs}) == 3
    assert {len(runs) for runs in replicates(race).values()} == {3}
    (chosen,) = (t for t in sweep.trials.values() if t.metrics.confirmed and t.metrics.confirmed.choice == "chosen")
    results = sorted(home.paths.confirm(chosen.number).glob("result_*.txt"))
    assert [p.read_text().count('"run_start"') for p in results] == [1, 1, 1]
    assert re.search(r"checks   3 result files, 3 of them do not comply with \d\.\d\.\d", done.stdout)


def _jobs(home: House) -> list[str]:
    """The race's jobs that Slurm knows, ended ones included."""
    shown = home.cluster.run("squeue", "-h", "-t", "all", "-o", "%j").split()
    return [name for name in shown if name.startswith(f"{home.name}.confirm-")]
