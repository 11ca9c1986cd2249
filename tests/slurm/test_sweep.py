"""A whole sweep of the stand-in on real Slurm, with real (tiny) trainings."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from lora_tune.config.study import load_study
from lora_tune.logs.mllog import MllogReader
from lora_tune.search.recommendation import recommend
from lora_tune.store.records import TrialState, Verdict
from tests.cluster import wait_until
from tests.slurm.house import House

pytestmark = pytest.mark.slurm

TINY = {"STANDIN_TRAINING": "tiny", "STANDIN_TARGET": "1.68"}


def test_sixteen_trials_on_four_nodes_and_the_best_config_by_hand(
    house: Callable[..., House], peft_worker: dict[str, str]
) -> None:
    home = house(trials=16, parallel=4, target=1.68, environment={**TINY, **peft_worker})
    assert home.finish(400) == 0, home.said
    sweep = home.sweep()
    attempts = home.attempts()

    assert len(sweep.trials) == 16
    assert all(trial.state is TrialState.FINISHED for trial in sweep.trials.values())
    assert {trial.verdict for trial in sweep.trials.values()} <= {Verdict.REACHED, Verdict.CENSORED, Verdict.PRUNED}
    for trial in sweep.trials.values():
        values = {k: int(trial.parameters[k]) for k in ("TP", "PP", "CP", "MINIBS", "MBS", "GBS")}
        assert 8 % (values["TP"] * values["PP"] * values["CP"]) == 0
        assert values["MINIBS"] * 8 // (values["TP"] * values["PP"] * values["CP"]) == values["GBS"] == 8
        assert values["MINIBS"] % values["MBS"] == 0

    for one, other in combinations(attempts, 2):
        if set(one.nodes) & set(other.nodes):
            assert one.started_at is not None
            assert other.started_at is not None
            assert one.ended_at is not None
            assert other.ended_at is not None
            assert one.ended_at <= other.started_at or other.ended_at <= one.started_at, (one, other)
    assert len({node for attempt in attempts for node in attempt.nodes}) == 4

    # A slot is refilled when its job has ended; how soon, benchmarks.slurm_latency says: here machines may be loaded.
    submissions = sorted(attempt.submitted_at or 0.0 for attempt in attempts)[4:]
    ends = sorted(attempt.ended_at or 0.0 for attempt in attempts)[: len(submissions)]
    gaps = [submitted - ended for ended, submitted in zip(ends, submissions, strict=True)]
    # The last trial may wait for the others, to run what the search recommends by then.
    assert max(gaps[:-1]) < 15, gaps

    the_same_by_hand(home)


def the_same_by_hand(home: House) -> None:
    """``source config_X.sh; sbatch -N $DGXNNODES -t $WALLTIME run.sub`` gives the evals of what is handed over."""
    handed_over = recommend(load_study(home.study), home.sweep())
    assert handed_over is not None
    assert handed_over.ran
    best = handed_over.trial
    (config,) = home.paths.best.glob("config_*.sh")
    (home.implementation / config.name).write_text(config.read_text())
    results = home.paths.root.parent / "by hand"
    results.mkdir()
    command = (
        f"cd {home.implementation} && source ./{config.name} && "
        f'sbatch --parsable -o "{results}/out" -N $DGXNNODES -t $WALLTIME run.sub'
    )
    job = home.cluster.run(
        "bash",
        "-c",
        command,
        environment={
            **TINY,
            "CONT": "standin.sqsh",
            "DATADIR": str(home.paths.root.parent / "data"),
            "MODEL": str(home.paths.root.parent / "data"),
            "LOGDIR": str(results),
            "DATESTAMP": "hand",
            "SEED_BASE": str(best.seed),
            "SLURM_MPI_TYPE": "none",
            "STANDIN_PYTHON": sys.executable,
        },
    ).strip()
    wait_until(lambda: home.cluster.job_state(job) == "COMPLETED", 90, "the job by hand ends")
    assert evals_in(results / "hand_1.log") == [e.loss for e in home.sweep().last_evals(best.number)]


def evals_in(log: Path) -> list[float]:
    reader = MllogReader()
    reader.feed(log.read_bytes())
    return [e.loss for e in reader.run().evals]


def test_a_silent_trial_is_stopped_and_a_lying_one_is_no_success(house: Callable[..., House]) -> None:
    """One trial hangs, one ignores SIGTERM as well, one claims success without an eval at the target."""
    environment = {
        "STANDIN_SECONDS": "2",
        "FAIL_MODE": "hang@SEED=5001 deaf@SEED=5002 fake_success@SEED=5003 exit3@SEED=5004",
        "STANDIN_TARGET": "0.5",
    }
    home = house(trials=5, parallel=4, stall_minutes=0.1, target=0.5, environment=environment)
    # Slurm itself sends SIGKILL two seconds after SIGTERM here.
    home.study.write_text(home.study.read_text().replace("kill_seconds = 5", "kill_seconds = 0.5"))
    assert home.finish(240) == 4, home.said  # nothing reached the target
    sweep = home.sweep()
    hung, deaf, fake, failed, other = (sweep.trials[i] for i in range(5))
    assert "silent" in home.said
    for trial in (hung, deaf):
        attempts = sweep.attempts_of(trial.number)
        assert (trial.verdict, len(attempts)) == (Verdict.FAILED, 3)
        for attempt in attempts:
            assert (attempt.stop, attempt.failure) == ("silent", "infrastructure")
            assert home.cluster.job_state(attempt.job_id) == "CANCELLED"
        assert attempts[0].nodes[0] in attempts[1].exclude_nodes
    assert all(attempt.killed_at for attempt in sweep.attempts_of(deaf.number)), "SIGKILL for what ignores scancel"
    assert fake.verdict is Verdict.CENSORED
    assert fake.sentence.startswith("eval loss")
    assert '"status": "success"' in home.paths.attempt(fake.number, 0).log.read_text()
    assert (failed.verdict, len(sweep.attempts_of(failed.number))) == (Verdict.FAILED, 3)
    for attempt in sweep.attempts_of(failed.number):
        # Slurm's DerivedExitCode, too, says 0 for a step of eight tasks of which one failed: only the log tells.
        assert home.cluster.job_state(attempt.job_id) == "COMPLETED"
        assert attempt.failure == "unknown"
        assert attempt.line.startswith("ValueError: the training went wrong")
        assert attempt.remedy
    assert other.verdict is Verdict.CENSORED
