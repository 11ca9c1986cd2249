"""What the records answer of themselves, at the cost that a long study allows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, UnitOfWork

EMPTY = StudyRecords(name="s", digest="", study_toml="", began_at=0.0)


def trial(number: int) -> Trial:
    return Trial(number=number, seed=0, tuned={}, parameters={}, state=TrialState.RUNNING)


def attempt(trial: int, number: int = 0) -> Attempt:
    return Attempt(trial=trial, number=number, job_name=f"j{trial}", folder="")


def test_the_next_number_follows_every_new_record() -> None:
    work = UnitOfWork(EMPTY)
    assert work.sweep.next_number == 0
    work.put_trial(trial(0))
    assert work.sweep.next_number == 1
    work.put_attempt(attempt(0))
    assert work.sweep.next_number == 1
    work.put_attempt(attempt(4))
    assert work.sweep.next_number == 5, "its record is lost; its number is not given out again"
    work.put_trial(trial(2))
    assert work.sweep.next_number == 5
    assert replace(work.sweep, trials={9: trial(9)}).next_number == 10


def test_the_next_number_is_sought_once_until_there_are_more_records() -> None:
    class Counted(dict[int, Trial]):
        walks = 0

        def __iter__(self) -> Iterator[int]:
            self.walks += 1
            return super().__iter__()

    trials = Counted({n: trial(n) for n in range(100)})
    records = replace(EMPTY, trials=trials)
    for _ in range(20):
        assert records.next_number == 100
    assert trials.walks == 1
    trials[100] = replace(trial(100), state=TrialState.FINISHED)
    assert [records.next_number for _ in range(20)] == [101] * 20
    assert trials.walks == 2
