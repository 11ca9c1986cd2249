"""Interchange: the same numbers in CSV, Parquet, MLflow, TensorBoard and a notebook's Optuna study."""

from __future__ import annotations

import csv
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from lora_tune.commands import interchange, trackers
from lora_tune.config.study import Study
from lora_tune.logs.run import Eval
from lora_tune.store.metrics import as_mapping
from lora_tune.store.records import StudyRecords
from tests.builders import BEGAN, HOSTILE, STUDY, hostile, stored, study_of, sweep_of

NOW = BEGAN + 30 * 3600


@pytest.fixture(scope="module")
def study() -> Study:
    return study_of()


@pytest.fixture(scope="module")
def sweep(study: Study) -> StudyRecords:
    return sweep_of(study, running=1)


def test_csv_holds_every_trial_and_every_eval(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    stored(tmp_path / "built", sweep)
    options = ["--study", "built", "--output", str(tmp_path / "built"), "--csv", str(tmp_path / "trials.csv")]
    assert CliRunner().invoke(interchange.main, options).exit_code == 0
    with (tmp_path / "trials.csv").open(newline="") as file:
        rows = {int(r["trial"]): r for r in csv.DictReader(file)}
    assert rows.keys() == sweep.trials.keys()
    for number, trial in sweep.trials.items():
        assert rows[number]["verdict"] == (str(trial.verdict) if trial.verdict else "")
        assert rows[number]["seconds"] == ("" if trial.seconds is None else str(trial.seconds))
        assert float(rows[number]["param.LR"]) == trial.parameters["LR"]
    with (tmp_path / "trials-evals.csv").open(newline="") as file:
        points = list(csv.DictReader(file))
    assert len(points) == sum(len(e) for e in sweep.evals.values())


def test_parquet_keeps_types_and_curves(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = interchange.trial_rows(study, sweep, NOW)
    evals = {n: [e._asdict() for e in sweep.last_evals(n)] for n in sweep.trials}
    interchange.write_parquet(tmp_path / "trials.parquet", rows, evals)
    table = parquet.read_table(tmp_path / "trials.parquet").to_pylist()
    for row, trial in zip(table, sweep.trials.values(), strict=True):
        assert row["param.MAX_STEPS"] == trial.parameters["MAX_STEPS"]
        assert [(e["samples"], e["loss"]) for e in row["eval_curve"]] == [
            (e.samples, e.loss) for e in sweep.last_evals(trial.number)
        ]


def test_mlflow_gets_each_finished_trial_once(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    finished = [t for t in sweep.trials.values() if t.verdict]
    assert trackers.to_mlflow(study, sweep, address) == (len(finished), 0)
    assert trackers.to_mlflow(study, sweep, address) == (0, len(finished))
    client = tracking.MlflowClient(tracking_uri=address)
    experiment = client.get_experiment_by_name("built").experiment_id
    best = sweep.best()
    assert best is not None
    (run,) = client.search_runs([experiment], f"tags.`lora_tune.trial` = '{best.number}'")
    assert run.data.metrics["objective"] == best.objective
    assert run.data.params["MAX_STEPS"] == str(best.parameters["MAX_STEPS"])
    curve = client.get_metric_history(run.info.run_id, "eval_loss")
    assert [(m.step, m.value) for m in curve] == [(int(e.samples), e.loss) for e in sweep.last_evals(best.number)]


def test_tensorboard_reads_the_eval_curves(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    finished = [t for t in sweep.trials.values() if t.verdict]
    assert trackers.to_tensorboard(study, sweep, tmp_path) == len(finished)
    assert trackers.to_tensorboard(study, sweep, tmp_path) == 0
    best = sweep.best()
    assert best is not None
    events = accumulator.EventAccumulator(str(tmp_path / f"built-{best.number:04d}"))
    events.Reload()
    seen = [(e.step, e.value) for e in events.Scalars("eval_loss")]
    wanted = [(int(e.samples), pytest.approx(e.loss, rel=1e-6)) for e in sweep.last_evals(best.number)]
    assert seen == wanted


@pytest.mark.parametrize(("unit", "steps"), [("epoch", [250, 1000]), ("step", [2, 7])])
def test_trackers_are_told_parts_of_an_epoch_on_one_scale_for_all_trials(unit: str, steps: list[int]) -> None:
    """Also of a trial whose evals are all at whole epochs: runs are compared at equal steps."""
    text = STUDY.replace('["bash", "train.sh"]', f'["bash", "train.sh"]\nlog = {{ kind = "jsonl", {unit} = "at" }}')
    points = (0.25, 1.0) if unit == "epoch" else (2.0, 7.0)
    for evals in ([Eval(at, 1.0, 0.0) for at in points], [Eval(points[1], 1.0, 0.0)]):
        told = [step for _, step in trackers._with_steps(study_of(text), evals)]
        assert told == steps[-len(evals) :]


class FakeRun:
    """A run of Weights & Biases that keeps what it is given, and leaves its folder as an offline run does."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.given, self.logged, self.summary = given, [], {}
        self.code: int | None = None
        (Path(given["dir"]) / "wandb" / f"offline-run-20261123_000000-{given['id']}").mkdir(parents=True)

    def define_metric(self, name: str, step_metric: str) -> None:
        self.logged.append({name: step_metric})

    def log(self, row: dict[str, float]) -> None:
        self.logged.append(row)

    def finish(self, exit_code: int) -> None:
        self.code = exit_code


def test_wandb_gets_each_finished_trial_once(
    study: Study, sweep: StudyRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []

    def init(**given: Any) -> FakeRun:
        runs.append(FakeRun(given))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    finished = [t for t in sweep.trials.values() if t.verdict]
    assert trackers.to_wandb(study, sweep, tmp_path / "out") == len(finished)
    assert trackers.to_wandb(study, sweep, tmp_path / "out") == 0
    best = sweep.best()
    assert best is not None
    (run,) = (r for r in runs if r.given["name"] == f"trial {best.number}")
    assert (run.given["project"], run.given["mode"], run.code) == ("built", "offline", 0)
    assert run.given["config"]["LR"] == best.parameters["LR"]
    assert run.summary["objective"] == best.objective
    assert [(r["samples"], r["eval_loss"]) for r in run.logged[1:]] == [
        (e.samples, e.loss) for e in sweep.last_evals(best.number)
    ]
    assert {r.code for r in runs if r.given["tags"] == ["failed"]} <= {1}


def test_a_trial_whose_export_to_wandb_was_interrupted_is_written_by_the_next(
    study: Study, sweep: StudyRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[FakeRun] = []

    class Interrupted(FakeRun):
        def log(self, row: dict[str, float]) -> None:
            raise KeyboardInterrupt

    def init(**given: Any) -> FakeRun:
        runs.append(FakeRun(given) if runs else Interrupted(given))
        return runs[-1]

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Settings=dict))
    with pytest.raises(KeyboardInterrupt):
        trackers.to_wandb(study, sweep, tmp_path / "out")
    assert runs[-1].code == 1
    assert not list((tmp_path / "out").rglob("offline-run-*"))
    finished = [t for t in sweep.trials.values() if t.verdict]
    assert trackers.to_wandb(study, sweep, tmp_path / "out") == len(finished)


def interrupted(*given: Any, **more: Any) -> None:
    raise KeyboardInterrupt


def test_a_trial_whose_export_to_mlflow_was_interrupted_is_written_by_the_next(
    study: Study, sweep: StudyRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(tracking.MlflowClient, "log_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trackers.to_mlflow(study, sweep, address)
    assert trackers.to_mlflow(study, sweep, address) == (
        sum(t.verdict is not None for t in sweep.trials.values()),
        0,
    )


def test_a_trial_whose_export_to_tensorboard_was_interrupted_is_written_by_the_next(
    study: Study, sweep: StudyRecords, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with monkeypatch.context() as patch:
        patch.setattr(tensorboard.SummaryWriter, "add_text", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trackers.to_tensorboard(study, sweep, tmp_path)
    assert not [*tmp_path.iterdir()]
    assert trackers.to_tensorboard(study, sweep, tmp_path) == sum(t.verdict is not None for t in sweep.trials.values())


def test_wandb_itself_writes_what_it_can_read_again(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    assert trackers.to_wandb(study, sweep, tmp_path) == sum(t.verdict is not None for t in sweep.trials.values())
    assert trackers.to_wandb(study, sweep, tmp_path) == 0
    best = sweep.best()
    assert best is not None
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{best.number:04d}/*.wandb")
    records = [protocol.Record.FromString(data) for data in leveldb_records(file.read_bytes()[7:])]
    rows = [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in r.history.item} for r in records]
    seen = [(row["samples"], row["eval_loss"]) for row in rows if "eval_loss" in row]
    assert seen == [(e.samples, e.loss) for e in sweep.last_evals(best.number)]
    assert records[-1].exit.exit_code == 0


def leveldb_records(log: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's form: blocks of 32 KiB, which begins 7 bytes into the first one."""
    at, whole = 7, b""
    log = bytes(7) + log
    while at + 7 <= len(log):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", log, at + 4)
        whole += log[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def test_a_notebook_sees_the_same_facts_through_optuna(study: Study, sweep: StudyRecords, tmp_path: Path) -> None:
    import optuna

    database = stored(tmp_path, sweep, study)
    loaded = optuna.load_study(study_name="built", storage=f"sqlite:///{database}")
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


def test_hostile_texts_are_plain_cells(tmp_path: Path) -> None:
    study, sweep = hostile()
    rows = interchange.trial_rows(study, sweep, NOW)
    rows[0]["sentence"] = "=HYPERLINK(1)"
    interchange.write_csv(tmp_path / "trials.csv", rows)
    text = (tmp_path / "trials.csv").read_text(encoding="utf-8")
    assert "\x1b" not in text
    with (tmp_path / "trials.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(sweep.trials)
    assert read[0]["sentence"] == "'=HYPERLINK(1)"
    assert not [c for r in read for n, c in r.items() if c[:1] in "=+@" and c[:1]]
    evals = {n: [e._asdict() for e in sweep.last_evals(n)] for n in sweep.trials}
    parquet = pytest.importorskip("pyarrow.parquet")
    interchange.write_parquet(tmp_path / "trials.parquet", rows, evals)
    kept = parquet.read_table(tmp_path / "trials.parquet").to_pylist()
    assert kept[1]["sentence"] == HOSTILE


def test_hostile_parameters_reach_mlflow_and_tensorboard_as_text(tmp_path: Path) -> None:
    pytest.importorskip("mlflow.tracking")
    study, sweep = hostile()
    finished = sum(t.verdict is not None for t in sweep.trials.values())
    assert trackers.to_mlflow(study, sweep, f"sqlite:///{tmp_path}/mlflow.db") == (finished, 0)
    assert trackers.to_tensorboard(study, sweep, tmp_path / "tb") == finished


def test_asking_for_nothing_is_an_error() -> None:
    result = CliRunner().invoke(interchange.main, ["--study", "built"])
    assert result.exit_code == 2
    assert "give --csv FILE" in result.output


def test_rows_are_plain_data(study: Study, sweep: StudyRecords) -> None:
    assert json.loads(json.dumps(interchange.trial_rows(study, sweep, NOW)))
