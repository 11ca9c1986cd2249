"""``lora_tune.move``: a sweep goes on in another database, and the one that it left is refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path

from lora_tune.store import Store
from lora_tune.store.port import Remark, Request
from lora_tune.store.remarks import Remarks
from lora_tune.store.requests import Requests
from tests.commands.test_sweep import TRIAL, executions, study, sweep
from tests.recorded import recorded


def move(place: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lora_tune.move", "--study", "quick", *arguments]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120)


def test_a_sweep_goes_on_in_another_database_and_not_in_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "quick.toml").write_text(study())
    (tmp_path / "trial.py").write_text(TRIAL)
    assert sweep(tmp_path, "--trials", "2").returncode in (0, 4)
    old, url = tmp_path / "sweeps" / "quick" / "sweep.db", f"sqlite:///{tmp_path}/team.db"
    asked = Request(
        kind="set", what={"parallel": 2}, who="ann@login1", asked_at=1.0, answered_at=2.0, accepted=True, answer="done"
    )
    written = [Remark(trial=0, version=v, text=f"note {v}", who="ben@login1", written_at=float(v)) for v in (1, 2)]
    with closing(Store(f"sqlite:///{old}")) as store:
        asked = Requests(store, "quick").ask(asked)
        for remark in written:
            Remarks(store, "quick").write(remark)
        registered = store.registered()
    done = move(tmp_path, "--to", url)
    assert done.returncode == 0, done.stderr
    assert f"2 trials of quick copied from {old} to {url}" in done.stdout
    with closing(Store(url, read_only=True)) as store:
        assert store.registered() == registered, "from where it is driven, and that it is over"
    again = move(tmp_path, "--to", url)
    assert (again.returncode, "holds a sweep quick already" in again.stderr) == (2, True)
    assert sweep(tmp_path, "--trials", "3", "--storage", url).returncode in (0, 4)
    assert executions(tmp_path) == {f"{n:04d}": 1 for n in range(3)}
    store = Store(url, read_only=True)
    assert store.names() == ["quick"]
    moved = store.load("quick")
    assert Requests(store, "quick").all() == [asked], "what people asked, with its answer"
    assert Remarks(store, "quick").history() == written, "what they wrote, in every version"
    store.close()
    page = (tmp_path / "sweeps" / "quick" / "report.html").read_text()
    assert "note 2</td>" in page
    assert "note 1</td>" not in page
    assert moved is not None
    before = recorded(old, "quick")
    assert {n: moved.trials[n].metrics for n in range(2)} == {n: before.trials[n].metrics for n in range(2)}
    refused = sweep(tmp_path, "--trials", "4")
    assert refused.returncode == 3
    assert "is older than this folder" in refused.stderr


def test_a_password_belongs_on_no_command_line(tmp_path: Path) -> None:
    done = move(tmp_path, "--to", "postgresql://tuner:secret@db/x")
    assert done.returncode == 2
    assert "~/.pgpass" in done.stderr
