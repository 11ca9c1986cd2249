"""What sbatch refuses for good, on real Slurm: said with its remedy, and gone on with once it is fixed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lora_tune.store.records import TrialState
from tests.slurm.house import House

pytestmark = pytest.mark.slurm


def test_a_reservation_that_is_not_there_ends_the_command_and_the_same_command_goes_on_with_it(
    house: Callable[..., House],
) -> None:
    home = house(trials=3, parallel=2, environment={"STANDIN_SECONDS": "0.5", "NCCL_TEST": "0"})
    home.study.write_text(home.study.read_text().replace("[site]\n", '[site]\nreservation = "tuning"\n'))
    assert home.finish(60) == 3, home.said
    assert "Requested reservation is invalid" in home.said
    assert "correct or remove site.reservation (scontrol show reservation); fix it" in home.said
    refused = home.sweep()
    assert all(trial.state is not TrialState.FINISHED for trial in refused.trials.values()), "no trial is spent"
    assert [a.failure for a in home.attempts()] == ["configuration"]
    assert not home.slurm_jobs()

    home.cluster.run(
        "scontrol", "create", "reservation=tuning", "starttime=now", "duration=60", "user=root",
        f"nodes={','.join(home.cluster.nodes[:2])}",
    )  # fmt: skip
    try:
        assert home.finish(90) in (0, 4), home.said
    finally:
        home.cluster.run("scancel", "--user=root")
        home.cluster.run("scontrol", "delete", "reservation=tuning")
    sweep = home.sweep()
    assert sorted(sweep.trials) == [0, 1, 2]
    assert [a.failure for a in home.attempts()] == ["", "", ""]
    assert set(home.slurm_jobs().values()) == {1}
    assert {node for a in home.attempts() for node in a.nodes} <= set(home.cluster.nodes[:2])
