"""What a notebook sees of a sweep through Optuna."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords
from tests.builders import stored, study_of, sweep_of


@pytest.fixture
def seen(tmp_path: Path) -> tuple[StudyRecords, optuna.Study]:
    """A sweep, one of whose trials runs, and what Optuna loads of its database."""
    study = study_of()
    sweep = sweep_of(study, running=1)
    database = stored(tmp_path, sweep, study)
    return sweep, optuna.load_study(study_name="built", storage=f"sqlite:///{database}")


def test_a_notebook_sees_the_same_facts_through_optuna(seen: tuple[StudyRecords, optuna.Study]) -> None:
    sweep, loaded = seen
    best = sweep.best()
    assert best is not None
    assert loaded.best_trial.number == best.number
    assert loaded.best_value == best.objective
    for trial in loaded.trials:
        record = sweep.trials[trial.number]
        assert trial.params == dict(record.tuned)
        assert {k: v for k, v in trial.user_attrs.items() if k not in ("verdict", "why")} == as_mapping(record.metrics)
        assert trial.state.is_finished() == (record.verdict is not None)
        assert list(trial.intermediate_values.values()) == [e.loss for e in sweep.last_evals(trial.number)]


def test_the_data_frame_has_a_row_a_trial_with_its_verdict(seen: tuple[StudyRecords, optuna.Study]) -> None:
    pytest.importorskip("pandas")
    sweep, loaded = seen
    best = sweep.best()
    assert best is not None
    frame = loaded.trials_dataframe().set_index("number")
    assert set(frame.index) == set(sweep.trials)
    assert frame.loc[best.number, "value"] == best.objective
    assert frame.loc[best.number, "params_LR"] == dict(best.tuned)["LR"], "as proposed, before it is rounded"
    assert frame.loc[best.number, "user_attrs_verdict"] == str(best.verdict)
