"""The head of a recipe's log: whose it is."""

from __future__ import annotations

import io

from lora_tune.base.paths import ATTEMPT_KEY, ATTEMPT_VARIABLE, SWEEP_KEY, SWEEP_VARIABLE
from lora_tune.logs.mllog import MllogReader
from lora_tune_recipes.trial_log import TrialLog


def announced(environment: dict[str, str]) -> dict[str, object]:
    stream, reader = io.StringIO(), MllogReader()
    log = TrialLog(enabled=True, stream=stream)
    log.start("init_start")
    log.identity(environment)
    log.start("run_start")
    reader.feed(stream.getvalue().encode())
    return dict(reader.run().hyperparameters)


def test_a_log_says_of_which_sweep_and_attempt_it_is() -> None:
    given = {SWEEP_VARIABLE: "a" * 32, ATTEMPT_VARIABLE: "b" * 32, "LR": "4e-4"}
    assert announced(given) == {SWEEP_KEY: "a" * 32, ATTEMPT_KEY: "b" * 32}


def test_a_run_by_hand_is_nobodys_attempt() -> None:
    assert announced({"LR": "4e-4"}) == {}
