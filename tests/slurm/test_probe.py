"""A short run that only measures a layout's speed, on real Slurm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lora_tune.config.study import load_study
from lora_tune.controller.driver import Dependencies, Driver, RealClock
from lora_tune.launchers.slurm.launcher import SlurmLauncher
from lora_tune.logs.run import Eval
from lora_tune.review.screen import Quiet
from lora_tune.search.session import SearchPoint
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StopKind, Trial, Verdict
from lora_tune.workloads import load as load_workload
from tests.slurm.house import House
from tests.standin.trainer import SPEED

pytestmark = pytest.mark.slurm


class OneProbe:
    """Proposes one probe of one layout."""

    def __init__(self, tuned: dict[str, Any]) -> None:
        self._left = [SearchPoint(0, tuned, "its speed is not known", probe=True)]
        self.told: list[Trial] = []

    def ask(self) -> SearchPoint | str:
        return self._left.pop() if self._left else "one is enough"

    def report(self, number: int, evals: Sequence[Eval]) -> None:
        pass

    def tell(self, record: Trial) -> None:
        self.told.append(record)


def test_a_probe_is_stopped_after_a_warm_block_and_one_eval(house: Callable[..., House]) -> None:
    home = house(environment={"STANDIN_SECONDS": "6", "NCCL_TEST": "0", "STANDIN_TARGET": "0.1"}, target=0.1)
    study = load_study(home.study)
    home.paths.root.mkdir()
    store = Store(sqlite_url(home.paths.database))
    store.begin(study.name, study.digest, home.study.read_text(), 0.0)
    lease = store.take_lease(study.name, "test", 0.0)
    (layout,) = (name for name in study.search_space.distributions() if name == "layout")
    choice = study.search_space.distributions()[layout].choices[0]  # type: ignore[attr-defined]
    search = OneProbe({"LR": 4e-4, "MAX_STEPS": 100, layout: choice})
    ports = Dependencies(
        workload=load_workload(study, home.study),
        launcher=SlurmLauncher(study.site),
        store=store,
        session=search,
        clock=RealClock(),
        view=Quiet(),
    )
    Driver(study, home.paths, ports, lease, period=0.2, submit_grace_seconds=10.0).run()
    store.close()

    (trial,) = search.told
    sweep = home.sweep()
    (attempt,) = sweep.attempts_of(0)
    assert trial.verdict is Verdict.CENSORED
    assert trial.sentence.startswith("a probe of the layout: ")
    assert attempt.stop is StopKind.PROBED
    assert attempt.failure == ""
    config = next(home.paths.attempt(0, 0).folder.glob("config_*.sh")).read_text()
    assert "MAX_STEPS=32" in config
    assert "VAL_CHECK_INTERVAL=128" in config
    log = home.paths.attempt(0, 0).log.read_text()
    assert log.count('"key": "eval_accuracy"') <= 2
    # The stand-in's formula; its first block is 1.5% slow.
    penalty = {1: 1.6, 2: 1.12, 4: 1.0, 8: 1.25}[int(trial.parameters["TP"])]
    penalty *= 1 + 0.06 * (int(trial.parameters["CP"]) - 1)
    assert trial.metrics.samples_per_second == pytest.approx(SPEED / penalty, rel=5e-3)
    assert trial.metrics.seconds_per_eval == pytest.approx(75 * penalty / SPEED, rel=2e-2)
    assert attempt.node_hours(0) == pytest.approx(home.node_hours_by_slurm())
