"""Runs that Optuna, MLflow, W&B and TensorBoard wrote themselves, and tables, are read as what they say."""

from __future__ import annotations

import csv
import math
import tarfile
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune.logs.trackers import TrackedRun, plain, scalar, tracked_runs
from tests.logs.exports.make import RUNS, evals


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exports")
    with tarfile.open(Path(__file__).parent / "exports" / "trackers.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def read(source: object) -> list[TrackedRun]:
    runs = tracked_runs(str(source))
    assert runs is not None
    return runs


@pytest.mark.parametrize("store", ["mlruns", "mlflow.db", "wandb"])
def test_a_tracker_s_own_files_give_parameters_and_every_eval(exports: Path, store: str) -> None:
    runs = read(exports / store)
    found = {(run.values["learning_rate"], run.values["lora_r"]): run.series["eval/loss"] for run in runs}
    assert len(runs) == len(found) == (3 if store == "wandb" else 8)
    assert found == {point: tuple(evals(*point)) for point in RUNS if point in found}


def test_a_cut_off_file_of_wandb_gives_what_was_written(exports: Path, tmp_path: Path) -> None:
    whole = min((exports / "wandb").rglob("*.wandb")).read_bytes()
    (tmp_path / "run.wandb").write_bytes(whole[: len(whole) // 2])
    (run,) = read(tmp_path / "run.wandb")
    assert len(run.series.get("eval/loss", ())) <= 2


def test_an_optuna_study_gives_finished_trials_with_what_they_reported(tmp_path: Path) -> None:
    from optuna.storages.journal import JournalFileBackend

    journal = optuna.storages.JournalStorage(JournalFileBackend(str(tmp_path / "journal.log")))
    for storage in (f"sqlite:///{tmp_path}/study.db", journal):
        study = optuna.create_study(study_name="lora", storage=storage)
        trial = study.ask({"lr": optuna.distributions.FloatDistribution(1e-5, 1e-2, log=True)})
        trial.set_user_attr("samples", 640)
        trial.report(1.5, 10)
        study.tell(trial, 1.25)
        study.ask()
    for source in (f"sqlite:///{tmp_path}/study.db", tmp_path / "study.db", tmp_path / "journal.log"):
        (run,) = read(source)
        assert (run.source, run.name) == ("Optuna study lora", "trial 0")
        assert run.values["lr"] == study.trials[0].params["lr"] or run.values["samples"] == 640
        assert run.series["value"][0][1] == 1.25
        assert run.series["intermediate_values"] == ((10.0, 1.5),)


def test_tensorboard_s_events_are_a_run_a_folder_with_lightning_s_values(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    for version, lr in enumerate((0.1, 0.2)):
        with SummaryWriter(str(tmp_path / f"version_{version}")) as writer:
            writer.add_scalar("val_loss", 1 + lr, 5)
        (tmp_path / f"version_{version}" / "hparams.yaml").write_text(f"lr: {lr}\nname: x\n")
    runs = read(tmp_path)
    assert [(r.name, r.values["lr"]) for r in runs] == [("version_0", 0.1), ("version_1", 0.2)]
    assert [r.series["val_loss"] for r in runs] == [((5.0, 1.1),), ((5.0, 1.2),)]


def test_a_table_has_a_row_a_run_or_a_row_an_eval(tmp_path: Path) -> None:
    wide, long = tmp_path / "wide.csv", tmp_path / "long.tsv"
    wide.write_text("Name,lr,val_loss\na,1e-3,1.5\nb,3e-3,1.25\n")
    long.write_text("run\tstep\tlr\tval_loss\na\t1\t1e-3\t2\na\t2\t1e-3\t1.5\nb\t1\t3e-3\t1.9\nb\t2\t3e-3\t1.25\n")
    assert [(r.name, r.values["lr"], r.series["val_loss"][-1][1]) for r in read(wide)] == [
        ("a", 1e-3, 1.5),
        ("b", 3e-3, 1.25),
    ]
    assert [r.series["val_loss"] for r in read(long)] == [((1.0, 2.0), (2.0, 1.5)), ((1.0, 1.9), (2.0, 1.25))]


@given(
    st.lists(
        st.tuples(st.floats(1e-9, 1e9), st.integers(-(10**9), 10**9), st.floats(-1e9, 1e9).filter(lambda v: v == v)),
        min_size=1,
        max_size=8,
    )
)
def test_numbers_written_as_a_table_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, rows) -> None:
    file = tmp_path_factory.mktemp("table") / "runs.csv"
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows(
            [("run_id", "lr", "rank", "val_loss"), *((f"r{n}", *row) for n, row in enumerate(rows))]
        )
    back = [(run.values["lr"], run.values["rank"], run.series["val_loss"][0][1]) for run in read(file)]
    assert back == [(lr, rank, loss) for lr, rank, loss in rows]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", 0.1),
        ("7", 7),
        ("adamw", "adamw"),
        ("", None),
        ("nan", None),
        (math.nan, None),
        (True, True),
        (None, None),
    ],
)
def test_a_cell_is_a_number_where_it_is_one(text: object, value: object) -> None:
    assert scalar(text) == value


def test_a_column_s_name_is_what_trackers_add_nothing_to() -> None:
    assert {plain(c) for c in ("params_lr", "params.lr", "config/lr", "LR", " lr ")} == {"lr"}
    assert plain("eval/loss") == plain("metrics.eval_loss") == "eval_loss"


def test_what_no_tracker_wrote_is_left_to_the_readers_of_logs(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("step 1 loss 2\n")
    assert tracked_runs(str(tmp_path / "train.log")) is None
    assert tracked_runs(str(tmp_path)) is None
    assert tracked_runs(str(tmp_path / "absent")) is None


def test_an_address_that_answers_nothing_is_said_in_a_line() -> None:
    with pytest.raises(InputError, match="Optuna cannot read it"):
        tracked_runs("sqlite:////absent/folder/x.db?mode=ro") or tracked_runs("nosuch://host/db")
