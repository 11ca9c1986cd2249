"""A folder and a database that do not belong together, as users bring that about; and the ways that are meant."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from lora_tune.base.errors import ForeignFolderError, SweepBusyError
from lora_tune.base.paths import AttemptPaths, SweepPaths
from lora_tune.controller.sweep_folder import FencedStore, FolderIdentity, owned, read_identity, refuse_foreign
from lora_tune.logs.mllog import MllogReader
from lora_tune.store import BufferedStore, Changes, Store, sqlite_url
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.cli.test_sweep import TRIAL, command, executions, study, sweep
from tests.recorded import recorded
from tests.waiting import wait_for


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with ``studies/quick.toml`` and the trial program, to run commands in."""
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "quick.toml").write_text(study())
    announcing = TRIAL.replace('say("run_start", None)', 'say("opt_base_learning_rate", rate)\nsay("run_start", None)')
    (tmp_path / "trial.py").write_text(announcing)
    return tmp_path


def every_result_is_of_its_own_trial(folder: Path, found: StudyRecords) -> bool:
    """Whether each exported number stands in a log that announces the trial's own learning rate."""
    for trial in found.trials.values():
        log = AttemptPaths(folder / found.attempts_of(trial.number)[-1].folder).log
        reader = MllogReader()
        reader.feed(log.read_bytes())
        if reader.run().hyperparameters["opt_base_learning_rate"] != trial.parameters["LR"]:
            return False
        stop = reader.run().reached(0.0)
        if trial.verdict is Verdict.REACHED and (stop is None or stop.seconds != trial.seconds):
            return False
    return True


@pytest.mark.long
def test_a_folder_whose_database_was_moved_away_is_not_taken_for_a_new_sweep(place: Path) -> None:
    assert sweep(place, "--trials", "2").returncode == 0
    root = place / "sweeps" / "quick"
    for file in root.glob("sweep.db*"):
        file.rename(place / file.name)
    study_file = place / "studies" / "quick.toml"
    study_file.write_text(study_file.read_text().replace("high = 1e-2", "high = 3.0"))
    done = sweep(place)
    assert done.returncode == 3
    assert "sweeps/quick belongs to sweep" in done.stderr
    assert "put that database back, or name it with --storage" in done.stderr
    assert "mv sweeps/quick sweeps/quick.old" in done.stderr
    assert not (root / "sweep.db").exists(), "nothing was begun"
    assert executions(place) == {"0000": 1, "0001": 1}
    root.rename(place / "sweeps" / "quick.old")
    fresh = sweep(place, "--trials", "2")
    assert fresh.returncode in (0, 4), fresh.stderr
    assert every_result_is_of_its_own_trial(root, recorded(root / "sweep.db", "quick"))


@pytest.mark.long
def test_two_drivers_that_begin_in_one_empty_folder_at_once_do_not_share_it(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(pace=0.2, trials=2))
    urls = [f"sqlite:///{place}/{name}.db" for name in ("one", "two")]
    drivers = [
        subprocess.Popen(
            command("--study", "quick", "--quiet", "--storage", url), cwd=place, stderr=subprocess.PIPE, text=True
        )
        for url in urls
    ]
    said = [driver.communicate(timeout=90)[1] for driver in drivers]
    assert sorted(driver.returncode for driver in drivers) == [0, 3], said
    assert executions(place) == {"0000": 1, "0001": 1}


@pytest.mark.long
def test_the_same_study_with_another_output_does_not_abandon_its_jobs(place: Path) -> None:
    (place / "studies" / "quick.toml").write_text(study(pace=0.2, trials=3))
    url = f"sqlite:///{place}/team.db"
    driver = subprocess.Popen(command("--study", "quick", "--quiet", "--storage", url), cwd=place)
    started = place / "sweeps" / "quick" / "trials" / "0001" / "attempt-0" / "started.json"
    wait_for(started.exists, 30, "the second trial")
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(30) == 130
    other = sweep(place, "--storage", url, "--output", "elsewhere")
    assert other.returncode == 3
    assert f"belong to {place}/sweeps/quick, not to elsewhere. Go on there (--output" in other.stderr
    assert not list((place / "elsewhere").glob("trials/*"))
    assert sweep(place, "--storage", url).returncode in (0, 4)
    assert executions(place) == {f"{n:04d}": 1 for n in range(3)}


@pytest.mark.long
def test_a_database_may_be_moved_with_the_folder_left_in_place(place: Path) -> None:
    assert sweep(place, "--trials", "1").returncode == 0
    root = place / "sweeps" / "quick"
    for file in root.glob("sweep.db*"):
        shutil.move(file, place / file.name)
    url = f"sqlite:///{place}/sweep.db"
    done = sweep(place, "--trials", "2", "--storage", url)
    assert done.returncode == 0, done.stderr
    assert executions(place) == {"0000": 1, "0001": 1}
    identity = read_identity(SweepPaths(root))
    assert identity is not None
    assert identity.database == f"sqlite:///{place}/sweep.db"


@pytest.mark.long
def test_a_folder_that_another_attempt_ran_in_is_left_as_it_is(place: Path) -> None:
    """The database was put back from a copy that knows nothing of trial 1, and its user goes on from there."""
    assert sweep(place, "--trials", "1").returncode == 0
    root = place / "sweeps" / "quick"
    shutil.copytree(root, place / "backup")
    assert sweep(place, "--trials", "2").returncode == 0
    log = root / "trials" / "0001" / "attempt-0" / "job.log"
    before = log.read_bytes()
    for file in root.glob("sweep.db*"):
        file.unlink()
    for file in (place / "backup").glob("sweep.db*"):
        shutil.copy(file, root / file.name)
    (root / "saved.json").unlink()
    done = sweep(place, "--trials", "2")
    assert done.returncode == 0, done.stderr
    assert log.read_bytes() == before
    (attempt,) = recorded(root / "sweep.db", "quick").attempts_of(1)
    assert attempt.folder == f"trials/0001/attempt-0-{attempt.token[:8]}"
    assert every_result_is_of_its_own_trial(root, recorded(root / "sweep.db", "quick"))
    said = [json.loads(line).get("text", "") for line in (root / "driver.log").read_text().splitlines()]
    assert [text for text in said if "is of another attempt" in text and "is left as it is" in text]


# -- without processes: what a folder and a database may say of each other

TRIALS = {0: Trial(number=0, seed=1, tuned={}, parameters={}, state=TrialState.FINISHED)}
RUNNING = {0: Trial(number=0, seed=1, tuned={}, parameters={}, state=TrialState.RUNNING)}
DATABASE = "sqlite:////data/x.db"


def records(folder: Path | str = "", id: str = "a" * 32, trials: dict[int, Trial] = TRIALS) -> StudyRecords:
    """What the database knows."""
    made = StudyRecords(name="quick", digest="", study_toml="", began_at=0.0, trials=trials)
    return replace(made, id=id, folder=str(folder))


def folder_of(path: Path, id: str = "a" * 32, trials: int = 1) -> SweepPaths:
    """A sweep's folder with trials in it; id "": of an earlier release."""
    for number in range(trials):
        (path / "trials" / f"{number:04d}" / "attempt-0").mkdir(parents=True)
    path.mkdir(exist_ok=True)
    if id:
        (path / "sweep.json").write_text(json.dumps({"sweep": id, "study": "quick", "database": DATABASE}))
    return SweepPaths(path)


def test_a_folder_and_its_records_belong_together(tmp_path: Path) -> None:
    refuse_foreign(folder_of(tmp_path / "new", id="", trials=0), None, DATABASE)
    refuse_foreign(folder_of(tmp_path / "a"), records(tmp_path / "a"), DATABASE)
    refuse_foreign(folder_of(tmp_path / "earlier", id=""), records(), DATABASE)
    refuse_foreign(folder_of(tmp_path / "removed", id="", trials=0), records(tmp_path / "removed"), DATABASE)


@pytest.mark.parametrize("known", [None, records(id="b" * 32)], ids=["an empty database", "another sweep's"])
def test_a_folder_of_another_sweep_is_refused_with_what_it_is_and_what_to_do(
    known: StudyRecords | None, tmp_path: Path
) -> None:
    with pytest.raises(ForeignFolderError) as error:
        refuse_foreign(folder_of(tmp_path / "a"), known, "postgresql://db/x")
    for words in ("belongs to sweep aaaaaaaa of study quick", DATABASE, "--storage", f"mv {tmp_path}/a", "--output"):
        assert words in str(error.value)


def test_trials_of_an_earlier_release_that_no_record_knows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ForeignFolderError, match=r"holds 2 trials of which sqlite:////data/x.db knows nothing"):
        refuse_foreign(folder_of(tmp_path / "a", id="", trials=2), None, DATABASE)


def test_an_empty_output_is_no_place_for_the_records_of_another_folder(tmp_path: Path) -> None:
    with pytest.raises(ForeignFolderError, match=r"belong to .*/a, not to .*/b. Go on there \(--output .*/a\)"):
        refuse_foreign(folder_of(tmp_path / "b", id="", trials=0), records(folder_of(tmp_path / "a").root), DATABASE)


def test_a_folder_may_be_moved_when_nothing_runs_in_it(tmp_path: Path) -> None:
    moved = folder_of(tmp_path / "moved")
    refuse_foreign(moved, records(tmp_path / "a"), DATABASE)
    with pytest.raises(ForeignFolderError, match=r"Move it back \(mv .*/moved .*/a\), let them end or cancel them"):
        refuse_foreign(moved, records(tmp_path / "a", trials=RUNNING), DATABASE)


def test_a_folder_may_have_two_names(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "a").root
    (tmp_path / "link").symlink_to(root)
    refuse_foreign(SweepPaths(tmp_path / "link"), records(root, trials=RUNNING), DATABASE)


def test_a_copy_of_a_folder_is_not_driven_beside_the_original(tmp_path: Path) -> None:
    folder_of(tmp_path / "a")
    with pytest.raises(ForeignFolderError, match=r"copy is a copy of .*/a, the folder of sweep quick"):
        refuse_foreign(folder_of(tmp_path / "copy"), records(tmp_path / "a"), DATABASE)


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"sweep": 7}', b"[]"])
def test_a_damaged_sweep_json_is_made_anew_where_the_database_vouches_for_the_folder(
    content: bytes, tmp_path: Path
) -> None:
    paths = folder_of(tmp_path / "a")
    paths.identity.write_bytes(content)
    with owned(paths, records(paths.root), DATABASE):
        assert read_identity(paths) == FolderIdentity(sweep="a" * 32, study="quick", database=DATABASE)
    paths.identity.write_bytes(content)
    with pytest.raises(ForeignFolderError):
        refuse_foreign(paths, None, DATABASE)


def test_a_driver_whose_folder_was_taken_over_writes_nothing(tmp_path: Path) -> None:
    store = Store(sqlite_url(tmp_path / "x.db"))
    store.begin("quick", "d", "", 0.0)
    lease = store.take_lease("quick", "me", 0.0)
    sweep = store.load("quick")
    assert sweep is not None
    with owned(SweepPaths(tmp_path / "a"), sweep, DATABASE) as lock:
        fenced = FencedStore(BufferedStore(store, tmp_path / "unsaved"), lock)
        fenced.save(lease, Changes(trials=tuple(TRIALS.values())), 1.0)
        path = SweepPaths(tmp_path / "a").lock
        path.write_text(path.read_text().replace(json.loads(path.read_text())["token"], "f" * 32))
        lock._checked_at -= 60  # it stood still for a minute
        with pytest.raises(SweepBusyError, match="was taken over"):
            fenced.save(lease, Changes(trials=tuple(RUNNING.values())), 2.0)
    found = store.load("quick")
    assert found is not None
    assert found.trials == TRIALS
    assert path.exists(), "the other one's lock stays"


def test_a_sweep_that_somebody_begins_at_this_moment_is_no_foreign_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the records and the look at the folder another process has written both."""
    from lora_tune.cli.options import plan_of
    from lora_tune.config.study import load_study
    from lora_tune.controller import runtime
    from lora_tune.store.leases import take_lease
    from tests.cli.test_ask_tell import STUDY

    (tmp_path / "mine.toml").write_text(STUDY)
    plan = plan_of(tmp_path / "mine.toml", load_study(tmp_path / "mine.toml"), {}, tmp_path / "sweep")
    refuse, began = runtime.refuse_foreign, []

    def late(paths: SweepPaths, sweep: StudyRecords | None, database: str) -> None:
        if not began:
            began.append(True)
            other = runtime.open_sweep(plan, None, 1.0)
            with runtime.locked_folder(plan, other, take_lease(other, "mine", 1.0)):
                pass
            other.close()
        refuse(paths, sweep, database)

    monkeypatch.setattr(runtime, "refuse_foreign", late)
    store = runtime.open_sweep(plan, None, 2.0)
    assert store.load("mine") is not None
    store.close()
