"""Who may drive: patience by one's own clock, and a lease that is kept while the driver is busy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.base.host import boot, place
from lora_tune.store import LEASE_SECONDS, BufferedStore, Changes, Held, Store, leases, sqlite_url
from lora_tune.store.leases import StaleLeaseDetector, keeping, take_lease, try_lease, wait_for_lease
from tests.conftest import REPOSITORY
from tests.waiting import wait_for

NOW = 1_760_000_000.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(sqlite_url(tmp_path / "sweep.db"))
    made.begin("s", "d", "", NOW)
    return made


class TestPatience:
    def test_a_lease_that_does_not_change_for_its_time_has_no_living_owner(self) -> None:
        patience, held = StaleLeaseDetector(), Held("node1 pid 1 start 1", 3, NOW)
        assert not patience.dead("s", held, 100.0)
        assert not patience.dead("s", held, 100.0 + LEASE_SECONDS - 0.1)
        assert patience.dead("s", held, 100.0 + LEASE_SECONDS)

    def test_every_sign_of_life_begins_the_time_anew_whatever_the_owners_clock_says(self) -> None:
        patience = StaleLeaseDetector()
        for second in range(200):
            assert not patience.dead("s", Held("node1 pid 1 start 1", 3, NOW - 1e6 * second), 10.0 * second)

    def test_sweeps_are_watched_one_by_one(self) -> None:
        patience = StaleLeaseDetector()
        patience.dead("a", Held("x", 1, 1.0), 0.0)
        assert not patience.dead("b", Held("x", 1, 1.0), LEASE_SECONDS)
        assert patience.dead("a", Held("x", 1, 1.0), LEASE_SECONDS)


def test_the_lease_of_a_process_of_this_host_that_ended_is_free_at_once(store: Store) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    store.take_lease("s", f"{os.uname().nodename} pid {ended.pid} start 1", NOW)
    assert take_lease(store, "s", NOW).token == 2


NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
TAKE = """import sys
from lora_tune.base.errors import SweepBusyError
from lora_tune.store import Store
from lora_tune.store.leases import take_lease
try:
    print(take_lease(Store(sys.argv[1]), "s", float(sys.argv[2])).token)
except SweepBusyError:
    print("busy")
"""


def test_a_driver_in_a_pid_namespace_of_its_own_leaves_a_living_owner_of_this_host_alone(
    store: Store, tmp_path: Path
) -> None:
    """As a container on its host's network, which has its name and sees none of its processes."""
    if subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may not make namespaces here")
    take_lease(store, "s", NOW)
    assert store.held("s").who == f"{os.uname().nodename} pid {os.getpid()}"
    for seconds, answer in ((0.0, "busy\n"), (LEASE_SECONDS, "2\n")):
        command = [*NAMESPACE, sys.executable, "-c", TAKE, sqlite_url(tmp_path / "sweep.db"), str(NOW + seconds)]
        taken = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=REPOSITORY)
        assert taken.stdout == answer


@pytest.mark.parametrize("elsewhere", ["boot/pid:[7]", f"{boot()}/pid:[7]", "/"])
def test_a_process_of_another_pid_namespace_or_boot_is_another_hosts(store: Store, elsewhere: str) -> None:
    """Containers on the network of their host have its name: whoever came second evicted the living owner at once."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    owner = f"{os.uname().nodename} pid {ended.pid} start 1 in {elsewhere}"
    store.take_lease("s", owner, NOW)
    with pytest.raises(SweepBusyError):
        take_lease(store, "s", NOW)
    assert take_lease(store, "s", NOW + LEASE_SECONDS).token == 2


def test_a_process_of_this_place_that_ended_has_no_lease(store: Store) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    store.take_lease("s", f"{os.uname().nodename} pid {ended.pid} start 1 in {place()}", NOW)
    assert take_lease(store, "s", NOW).token == 2


@pytest.mark.parametrize("owner", ["a copy", "{} pid x start 1", "{} pid 1 start None", "{} pid 1 start 1 in a b"])
def test_an_owner_of_any_words_is_waited_for(store: Store, owner: str) -> None:
    store.take_lease("s", owner.format(os.uname().nodename), NOW)
    with pytest.raises(SweepBusyError):
        take_lease(store, "s", NOW)


def test_the_leases_of_an_owner_that_is_known_to_be_gone_are_free_at_once(store: Store) -> None:
    store.take_lease("s", "node7 pid 1 start 1", NOW)
    assert try_lease(store, "s", StaleLeaseDetector(), NOW) is None
    assert try_lease(store, "s", StaleLeaseDetector(), NOW, gone="node8 pid 1 start 1") is None
    assert try_lease(store, "s", StaleLeaseDetector(), NOW, gone="node7 pid 1 start 1") is not None


def test_a_standby_counts_no_time_during_which_the_database_was_away(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.take_lease("s", "node7 pid 1 start 1", NOW)
    steady, answers = [0.0], iter([True, True, True, False])  # one look asks three times

    class Sometimes:
        def __getattr__(self, name: str) -> Any:
            if name == "held" and not next(answers, True):
                steady[0] += 600.0
                raise StoreError("away")
            return getattr(store, name)

    def sleep(seconds: float) -> None:
        steady[0] += seconds

    monkeypatch.setattr(leases.time, "sleep", sleep)
    monkeypatch.setattr(leases.time, "monotonic", lambda: steady[0])
    said: list[str] = []
    lease, before = wait_for_lease(Sometimes(), "s", lambda: NOW, said.append)  # type: ignore[arg-type]
    assert before == "node7 pid 1 start 1"
    assert lease.token == 2
    assert steady[0] >= 600 + LEASE_SECONDS, "its time began when the database was back"
    assert said[0].startswith("standby: s is driven by node7")
    assert said[1] == "standby: away"


class TestKeeping:
    @pytest.fixture(autouse=True)
    def quickly(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(leases, "RENEW_SECONDS", 0.02)

    def test_the_lease_is_renewed_while_the_driver_is_busy(self, store: Store, tmp_path: Path) -> None:
        lease, clock = store.take_lease("s", "node1 pid 1 start 1", NOW), [NOW]
        with keeping(BufferedStore(store, tmp_path / "unsaved"), lease, lambda: clock[0]):
            clock[0] = NOW + 100
            wait_for(lambda: store.held("s").renewed_at == NOW + 100, 10, "a renewal")

    def test_a_loop_that_is_stuck_lets_it_go(
        self, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lease, clock = store.take_lease("s", "node1 pid 1 start 1", NOW), [NOW]
        records = BufferedStore(store, tmp_path / "unsaved")
        asked: list[float] = []
        monkeypatch.setattr(records, "idle_seconds", lambda: asked.append(1.0) or leases.STUCK_SECONDS + 1)
        with keeping(records, lease, lambda: clock[0]):
            clock[0] = NOW + 100
            wait_for(lambda: len(asked) > 3, 10, "looks at the loop")
        assert store.held("s").renewed_at == NOW

    def test_a_lost_lease_is_not_taken_back(self, store: Store, tmp_path: Path) -> None:
        lease = store.take_lease("s", "node1 pid 1 start 1", NOW)
        records = BufferedStore(store, tmp_path / "unsaved")
        taken = store.take_lease("s", "node2 pid 2 start 2", NOW, dead=True)
        with keeping(records, lease, lambda: NOW + 50), pytest.raises(SweepBusyError):
            records.save(lease, Changes(), NOW + 50)
        assert store.held("s") == Held("node2 pid 2 start 2", taken.token, NOW)


@pytest.mark.postgres
def test_the_tests_own_server_ends_with_a_killed_session(postgres_server: object) -> None:
    program = (
        "import time; from tests.postgres import Postgres; server = Postgres().__enter__(); "
        "print(server.folder, flush=True); time.sleep(600)"
    )
    session = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert session.stdout is not None
    folder = Path(session.stdout.readline().strip())
    pid = int((folder / "data" / "postmaster.pid").read_text().split()[0])
    session.send_signal(signal.SIGKILL)
    session.wait()
    session.stdout.close()
    wait_for(lambda: not folder.exists() and not Path(f"/proc/{pid}").exists(), 30, "server and folder gone")
