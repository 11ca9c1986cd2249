"""What every database must do for a sweep: subclass with a ``url`` fixture that gives an empty one."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest

from lora_tune.base.errors import StoreError, SweepBusyError
from lora_tune.logs.run import Eval
from lora_tune.search.optuna_tables import OptunaTables
from lora_tune.store import LEASE_SECONDS, Changes, Held, Lease, Registered, Store
from lora_tune.store.leases import take_lease
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict
from tests.builders import STUDY, study_of, sweep_of

NOW = 1_760_000_000.0
ODD = "half a pair \ud83d, a zero \x00, ünïcode ☃, 'quotes\" and ; DROP TABLE lora_tune_trial; --"


def where(
    file: Path, folder: Path, options: Mapping[str, Mapping[str, Any]] | None = None, name: str = "built"
) -> Registered:
    """From where a test's sweep is driven."""
    return Registered(name=name, study_toml=STUDY, cwd=Path.cwd(), file=file, folder=folder, options=options or {})


class StoreContract:
    """One class for every backend."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    @pytest.fixture
    def store(self, url: str) -> Iterator[Store]:
        store = Store(url)
        store.begin("built", "d1", STUDY, NOW)
        yield store
        store.close()

    @pytest.fixture
    def lease(self, store: Store) -> Lease:
        return store.take_lease("built", "node1 pid 1 start 1", NOW)

    # -- records

    def test_what_is_saved_is_loaded(self, store: Store, lease: Lease) -> None:
        made = sweep_of(study_of(), trials=12)
        save(store, lease, made)
        found = store.load("built")
        assert found is not None
        assert found.trials == made.trials
        assert found.attempts == made.attempts
        assert {k: tuple(v) for k, v in found.evals.items()} == made.evals
        assert (found.digest, found.study_toml, found.began_at) == ("d1", STUDY, NOW)

    def test_a_record_is_replaced_by_its_newest_form(self, store: Store, lease: Lease) -> None:
        trial = Trial(number=0, seed=1, tuned={}, parameters={})
        later = trial.finished(Verdict.FAILED, "it ended", NOW + 9)
        store.save(lease, Changes(trials=(trial, replace(trial, state=TrialState.RUNNING), later)), NOW + 1)
        assert loaded(store).trials == {0: later}

    def test_any_text_and_any_number_comes_back(self, store: Store, lease: Lease) -> None:
        attempt = Attempt(trial=0, number=0, job_name="j", folder="f", line=ODD, remedy=ODD)
        trial = Trial(number=0, seed=2**62, tuned={"LR": 1e-300}, parameters={"LR": 1e300}, sentence=ODD)
        points = tuple((0, 0, i, Eval(float(i), loss, math.nan)) for i, loss in enumerate([math.nan, math.inf, -1e308]))
        store.save(lease, Changes((trial,), (attempt,), points), NOW)
        found = loaded(store)
        assert found.trials == {0: trial}
        assert found.attempts == {(0, 0): attempt}
        assert [repr(e.loss) for e in found.evals[0, 0]] == ["nan", "inf", "-1e+308"]

    def test_a_watcher_reads_again_only_what_is_open(self, store: Store, lease: Lease) -> None:
        made = sweep_of(study_of(), trials=6, running=2)
        save(store, lease, made)
        before = loaded(store)
        grown = made.trials[5].finished(Verdict.CANCELLED, "enough", NOW)
        store.save(lease, Changes(trials=(grown,)), NOW)
        after = store.load("built", before)
        assert after is not None
        assert after.trials[5] == grown
        assert all(after.trials[n] is before.trials[n] for n in range(4))

    def test_a_watcher_writes_nothing(self, store: Store, url: str) -> None:
        watcher = Store(url, read_only=True)
        assert watcher.names() == ["built"]
        with pytest.raises(StoreError):
            watcher.begin("other", "d", STUDY, NOW)
        watcher.close()
        assert store.names() == ["built"]

    def test_what_was_made_of_finished_trials_is_kept_until_another_finishes(self, store: Store, lease: Lease) -> None:
        made = sweep_of(study_of(), trials=6, running=1)
        save(store, lease, made)
        before = loaded(store)
        assert before.once("their number", lambda: 5) == 5
        (running,) = (t for t in made.trials.values() if t.state is not TrialState.FINISHED)
        store.save(lease, Changes(trials=(replace(running, why="looked at again"),)), NOW + 1)
        later = store.load("built", before)
        assert later is not None
        assert later is not before
        assert later.once("their number", lambda: 7) == 5, "nothing finished"
        store.save(lease, Changes(trials=(running.finished(Verdict.FAILED, "it ended", NOW + 9),)), NOW + 2)
        last = store.load("built", later)
        assert last is not None
        assert last.once("their number", lambda: 7) == 7

    def test_an_empty_database_holds_no_sweep_for_a_watcher(self, url: str) -> None:
        with pytest.raises(StoreError, match=r"holds no sweep|no database at"):
            Store(url, read_only=True)

    def test_sweeps_stand_side_by_side(self, store: Store, lease: Lease) -> None:
        store.begin("second", "d2", STUDY, NOW)
        second = store.take_lease("second", "node2 pid 2 start 2", NOW)
        trial = Trial(number=0, seed=1, tuned={}, parameters={})
        store.save(second, Changes(trials=(trial,)), NOW)
        assert loaded(store).trials == {}
        found = store.load("second")
        assert found is not None
        assert found.trials == {0: trial}

    def test_a_whole_sweep_is_copied_in_and_other_sweeps_leases_are_left_alone(
        self, store: Store, lease: Lease
    ) -> None:
        made = replace(sweep_of(study_of(), trials=12), name="moved", id="e" * 32)
        store.copy_in(made, NOW, 7)
        found = store.load("moved")
        assert found is not None
        assert (found.id, found.trials, found.attempts, found.evals) == (
            made.id,
            made.trials,
            made.attempts,
            made.evals,
        )
        assert store.saves("moved") == (made.id, 7)
        assert store.held("moved").owner == ""
        assert store.held("built").owner == "node1 pid 1 start 1", "another sweep's driver keeps its lease"

    # -- from where a sweep is driven

    def test_a_placed_sweep_says_from_where_it_is_driven_and_whether_it_is_over(
        self, store: Store, lease: Lease
    ) -> None:
        assert store.registered() == []
        store.place(lease, where(Path("/s/built.toml"), Path("/sweeps/built"), {"budget": {"trials": 3}}))
        (found,) = store.registered()
        assert (found.name, found.file, found.folder) == ("built", Path("/s/built.toml"), Path("/sweeps/built"))
        assert found.options == {"budget": {"trials": 3}}
        assert found.ended == ""
        store.finish(lease, "all 3 trials are proposed")
        assert store.registered()[0].ended == "all 3 trials are proposed"
        store.place(lease, found)
        assert store.registered()[0].ended == "", "it goes on"

    # -- leases

    def test_a_lease_is_one_drivers_at_a_time(self, store: Store, lease: Lease) -> None:
        with pytest.raises(SweepBusyError, match="driven by node1 pid 1"):
            store.take_lease("built", "node2 pid 9 start 9", NOW + LEASE_SECONDS - 1)
        taken = store.take_lease("built", "node2 pid 9 start 9", NOW + LEASE_SECONDS)
        assert taken.token == lease.token + 1

    def test_a_driver_that_lost_its_lease_writes_nothing(self, store: Store, lease: Lease) -> None:
        taken = store.take_lease("built", "node2 pid 9 start 9", NOW, dead=True)
        trial = Trial(number=0, seed=1, tuned={}, parameters={})
        for attempt in (
            lambda: store.save(lease, Changes(trials=(trial,)), NOW),
            lambda: store.accept_study(lease, "d9", "x"),
            lambda: store.place(lease, where(Path("/a"), Path("/b"))),
            lambda: store.finish(lease, "over"),
        ):
            with pytest.raises(SweepBusyError, match="taken over"):
                attempt()
        store.release(lease)
        assert store.held("built") == Held("node2 pid 9 start 9", taken.token, NOW)
        assert loaded(store).trials == {}
        assert loaded(store).digest == "d1"

    def test_a_standby_takes_only_what_it_saw_unchanged(self, store: Store, lease: Lease) -> None:
        seen = store.held("built")
        store.save(lease, Changes(), NOW + 5)
        with pytest.raises(SweepBusyError):
            store.take_lease("built", "node2 pid 9 start 9", NOW + 6, unchanged=seen)
        seen = store.held("built")
        assert store.take_lease("built", "node2 pid 9 start 9", NOW - 1e6, unchanged=seen).token == lease.token + 1

    def test_an_owner_whose_clock_is_ahead_keeps_its_lease_and_the_reason_is_said(
        self, store: Store, lease: Lease
    ) -> None:
        with pytest.raises(SweepBusyError, match=r"clock is 3600 s ahead.*--standby"):
            store.take_lease("built", "node2 pid 9 start 9", NOW - 3600)

    def test_a_lease_that_is_given_back_is_free(self, store: Store, lease: Lease) -> None:
        store.release(lease)
        assert store.take_lease("built", "node2 pid 9 start 9", NOW).token == lease.token + 1

    def test_who_wrote_last_is_known_by_the_token(self, store: Store, lease: Lease) -> None:
        store.save(lease, Changes(), NOW)
        assert store.wrote("built") == 0, "renewing writes nothing"
        store.save(lease, Changes(trials=(Trial(number=0, seed=1, tuned={}, parameters={}),)), NOW)
        assert store.wrote("built") == lease.token

    @pytest.mark.parametrize("rounds", [100])
    def test_of_drivers_that_start_at_one_instant_exactly_one_works(self, store: Store, url: str, rounds: int) -> None:
        context = multiprocessing.get_context("spawn")
        barrier, results = context.Barrier(3), context.SimpleQueue()
        racers = [context.Process(target=race, args=(url, rounds, barrier, results)) for _ in range(2)]
        for racer in racers:
            racer.start()
        winners: dict[int, list[int]] = {}
        for number in range(rounds):
            held = store.held("built")
            if held.owner:
                store.release(Lease("built", held.owner, held.token))
            barrier.wait(60)  # both try now
            for _ in racers:
                pid, won = results.get()
                winners.setdefault(number, []).extend([pid] if won else [])
        for racer in racers:
            racer.join(60)
        assert {len(found) for found in winners.values()} == {1}

    # -- Optuna beside it

    def test_optunas_study_lives_in_the_same_database(self, store: Store, lease: Lease) -> None:
        study = study_of()
        made = sweep_of(study, trials=6, running=2)
        assert OptunaTables(study, store, lease).follow(made) == ""
        found = optuna.load_study(study_name=study.name, storage=store.url).get_trials()
        assert [(t.number, t.params) for t in found] == [(n, dict(t.tuned)) for n, t in made.trials.items()]
        assert store.names() == ["built"]


def race(url: str, rounds: int, barrier: multiprocessing.synchronize.Barrier, results: object) -> None:
    """One of two drivers: tries to take the lease at each round's start and says whether it did."""
    store = Store(url)
    mine = multiprocessing.current_process().pid or 0
    for _ in range(rounds):
        barrier.wait(60)
        try:
            lease = take_lease(store, "built", NOW)
            # The other one may come later than the holder's release: nobody lets go before the round is over.
            won = lease.token > 0
        except SweepBusyError:
            won = False
        results.put((mine, won))  # type: ignore[attr-defined]
    store.close()


def save(store: Store, lease: Lease, sweep: StudyRecords) -> None:
    """All records of ``sweep``."""
    points = tuple((t, a, i, e) for (t, a), found in sweep.evals.items() for i, e in enumerate(found))
    store.save(lease, Changes(tuple(sweep.trials.values()), tuple(sweep.attempts.values()), points), NOW)


def loaded(store: Store) -> StudyRecords:
    found = store.load("built")
    assert found is not None
    return found
