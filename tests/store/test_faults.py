"""Surroundings that fail a database: a network file system, a read-only folder, a full disk, a server that is away."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import StoreError
from lora_tune.base.files import NETWORK, file_system, mountinfo
from lora_tune.logs.run import Eval
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.store import Changes, Store, engine, sqlite_url
from lora_tune.store.records import Trial
from tests.builders import study_of, sweep_of
from tests.postgres import Postgres

NOW = 1_760_000_000.0
MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
40 27 0:40 / /home rw,relatime shared:20 master:3 - nfs4 server:/home rw,vers=4.2
41 40 0:41 / /home/of\\040u/local rw - xfs /dev/nvme0n1 rw
42 27 0:42 / /scratch rw - tmpfs tmpfs rw
43 27 0:43 / /scratch rw - lustre 10.0.0.1@o2ib:/s rw
a line of another form
"""

needs_root = pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="mounting needs root")


class TestNetworkFileSystems:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/var/lib/sweep.db", "ext4"),
            ("/home/u/sweep.db", "nfs4"),
            ("/homework/sweep.db", "ext4"),
            ("/home/of u/local/sweep.db", "xfs"),
            ("/home/of u/sweep.db", "nfs4"),
            ("/scratch/sweep.db", "lustre"),
        ],
    )
    def test_the_longest_mount_holds_a_path_and_of_equal_ones_the_last(self, path: str, kind: str) -> None:
        assert file_system(Path(path), MOUNTS) == kind

    @given(st.text(max_size=400))
    def test_any_text_is_read_without_a_crash(self, text: str) -> None:
        assert isinstance(file_system(Path("/a/b"), text), str)

    def test_this_machine_is_read(self) -> None:
        assert file_system(Path("/proc/self"), mountinfo()) == "proc"

    @pytest.mark.parametrize("kind", sorted(NETWORK))
    def test_sqlite_is_refused_there_with_reason_and_remedy(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        mounts = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n40 27 0:40 / {tmp_path} rw - {kind} server:/x rw\n"
        monkeypatch.setattr(engine, "mountinfo", lambda: mounts)
        with pytest.raises(StoreError, match=rf"is on {kind}, a network file system.*postgresql\+psycopg"):
            Store(sqlite_url(tmp_path / "sweep.db"))
        assert list(tmp_path.iterdir()) == []


def save(store: Store, numbers: range, size: int = 0) -> None:
    lease = store.take_lease("s", "node1 pid 1 start 1", NOW)
    for number in numbers:
        trial = Trial(number=number, seed=1, tuned={}, parameters={}, sentence="x" * size)
        store.save(lease, Changes(trials=(trial,), evals=((number, 0, 0, Eval(1.0, 2.0, 3.0)),)), NOW)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@needs_root
def test_a_full_disk_is_said_and_what_was_saved_stays(small_disk: Path) -> None:
    store = Store(sqlite_url(small_disk / "sweep.db"))
    store.begin("s", "d", "", NOW)
    save(store, range(3))
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2_000_000))
    with pytest.raises(StoreError, match=r"disk.*free some space; nothing already written is lost"):
        save(store, range(3, 40), size=20_000)
    before = store.load("s")
    assert before is not None
    assert set(before.trials) >= {0, 1, 2}
    assert set(before.trials) == {trial for trial, _ in before.evals}, "a transaction is whole or not there"
    filler.unlink()
    save(store, range(3, 6))
    after = store.load("s")
    assert after is not None
    assert set(after.trials) == {0, 1, 2, 3, 4, 5} | set(before.trials)
    store.close()


@needs_root
def test_a_full_disk_loses_no_trial_of_optunas_and_doubles_none(small_disk: Path) -> None:
    study = study_of()
    sweep = sweep_of(study, trials=6)
    store = Store(sqlite_url(small_disk / "sweep.db"))
    store.begin(study.name, "d", "", NOW)
    tables = OptunaTables(study, store, store.take_lease(study.name, "tests", NOW))
    assert tables.follow(replace(sweep, trials={n: sweep.trials[n] for n in range(3)})) == ""
    filler = small_disk / "filler"
    with pytest.raises(OSError, match="No space left"):
        filler.write_bytes(bytes(2_000_000))
    long = {n: replace(t, why="x" * 200_000) for n, t in sweep.trials.items()}
    for upto in (4, 6):
        said = tables.follow(replace(sweep, trials={n: long[n] for n in range(upto)}))
        assert "database or disk is full" in said
    filler.unlink()
    assert tables.follow(sweep) == ""
    shown = optuna.load_study(study_name=study.name, storage=store.url).get_trials()
    assert [(t.number, t.params) for t in shown] == [(n, dict(t.tuned)) for n, t in sweep.trials.items()]
    store.close()


@needs_root
def test_a_folder_that_became_read_only_is_said_and_readers_go_on(small_disk: Path) -> None:
    url = sqlite_url(small_disk / "sweep.db")
    store = Store(url)
    store.begin("s", "d", "", NOW)
    save(store, range(3))
    store.close()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(StoreError, match=r"make the file and its folder writable|must be there, and writable"):
        Store(url)
    reader = Store(url, read_only=True)
    found = reader.load("s")
    reader.close()
    assert found is not None
    assert set(found.trials) == {0, 1, 2}


@pytest.mark.postgres
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT], ids=["stopped", "crashed"])
def test_a_server_that_comes_back_is_written_to_again(how: signal.Signals, postgres: Postgres) -> None:
    store = Store(postgres.new_database())
    store.begin("s", "d", "", NOW)
    save(store, range(2))
    postgres.stop(how)
    for _ in range(3):
        with pytest.raises(StoreError, match="cannot be used") as away:
            save(store, range(2, 4))
    assert "@127.0.0.1" in str(away.value)
    postgres.start()
    save(store, range(2, 4))
    found = store.load("s")
    assert found is not None
    assert set(found.trials) == {0, 1, 2, 3}
    store.close()
