"""Programs that start again inside their job: torchrun's restarts, a retry loop, a resume from a checkpoint."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.readers import RegexReader
from lora_tune.logs.run import RunLog
from tests.logs.test_mllog import evals, record


def run_start(at: float, *, init: bool = False, **announced: object) -> str:
    """The start of a program, with its initialisation or without."""
    text = record("init_start", at=at - 5.0) if init else ""
    text += "".join(record(name, value) for name, value in announced.items())
    return text + (record("init_stop", at=at - 0.1) if init else "") + record("run_start", at=at)


def train(*points: tuple[int, float]) -> str:
    return "".join(record("train_loss", 1.2, at=at, samples_count=samples) for samples, at in points)


def ev(*points: tuple[int, float]) -> str:
    """Evals, each with its marks; the one at 600 samples meets 0.925."""
    text = ""
    for samples, at in points:
        text += record("eval_start", at=at - 5.0, samples_count=samples)
        text += record("eval_accuracy", round(0.96 - samples * 6e-5, 4), at=at, samples_count=samples)
        text += record("eval_stop", at=at, samples_count=samples)
    return text


def runs_of(text: str, pieces: int = 1 << 20) -> tuple[RunLog, ...]:
    reader, log = MllogReader(), text.encode()
    for at in range(0, len(log), pieces):
        reader.feed(log[at : at + pieces])
    assert repr(reader.run()) in {repr(run) for run in reader.runs()}
    return reader.runs()


FIRST = ev((200, 600.0), (400, 1200.0))
REST = ev((600, 1660.0))
STOP = record("run_stop", at=1660.0, status="success")
WITH_TRAIN = train((50, 150.0)) + ev((200, 600.0)) + train((250, 760.0), (300, 900.0), (350, 1050.0))


@pytest.mark.parametrize("init", [False, True], ids=["run_start", "init_start"])
@pytest.mark.parametrize("pieces", [1 << 20, 7])
def test_a_run_that_goes_on_after_a_restart_is_timed_from_its_first_start(init: bool, pieces: int) -> None:
    """27 minutes became one: the run was timed from its last start."""
    (run,) = runs_of(run_start(0.0, init=init) + FIRST + run_start(1600.0, init=init) + REST + STOP, pieces)
    stop = run.reached(0.925)
    assert stop is not None
    assert stop.seconds == 1660.0
    assert [one.samples for one in run.evals] == [200, 400, 600]
    assert run.status == "success"
    assert run.init_seconds == (4.9 if init else None)
    assert run.eval_seconds == (5.0, 5.0, 5.0)


@pytest.mark.parametrize("again", [(300, 1700.0), (400, 1800.0)], ids=["before what was lost", "behind it"])
def test_what_was_trained_twice_after_a_checkpoint_counts_once(again: tuple[int, float]) -> None:
    text = run_start(0.0) + WITH_TRAIN + run_start(1600.0, init=True) + train(again) + ev((400, 1800.0), (600, 2400.0))
    (run,) = runs_of(text)
    assert evals(run) == [(200, 0.948, 600.0), (400, 0.936, 1800.0), (600, 0.924, 2400.0)]
    assert run.train[3].seconds == 1050.0


def test_several_restarts_of_which_some_got_nowhere_are_one_run() -> None:
    text = run_start(0.0, init=True) + FIRST + run_start(1300.0, init=True) + run_start(1400.0, init=True)
    text += record("eval_start", at=1500.0, samples_count=600) + run_start(1600.0, init=True) + REST
    (run,) = runs_of(text + run_start(1700.0) + ev((800, 2300.0)))
    assert [one.seconds for one in run.evals] == [600.0, 1200.0, 1660.0, 2300.0]
    assert run.eval_seconds == (5.0, 5.0, 5.0, 5.0), "the eval that was cut off began anew"


def test_ranks_whose_lines_of_the_second_start_come_late_open_no_run() -> None:
    again = run_start(1600.0, init=True) + REST
    assert len(runs_of(run_start(0.0, init=True) + FIRST + again + again)) == 1


def test_until_its_first_point_nobody_knows_whether_a_run_goes_on() -> None:
    assert len(runs_of(run_start(0.0) + FIRST + run_start(1600.0))) == 2


def test_training_that_begins_again_with_its_first_point_is_another_run() -> None:
    """A retry from zero, and NEXP seeds of a program that prints no run_stop."""
    for first, second in ((FIRST, ev((200, 2300.0), (400, 2900.0))), (WITH_TRAIN, train((50, 1750.0)))):
        assert len(runs_of(run_start(0.0) + first + run_start(1600.0) + second)) == 2


def test_a_run_that_stopped_goes_on_in_no_other() -> None:
    text = run_start(0.0) + FIRST + record("run_stop", at=1200.0, status="aborted") + run_start(1600.0) + REST
    assert [len(run.evals) for run in runs_of(text)] == [2, 1]


@pytest.mark.parametrize("name", ["opt_base_learning_rate", "global_batch_size"])
def test_runs_of_other_values_are_not_one(name: str) -> None:
    """Logs of several configurations in one file: with a larger batch the first eval comes later."""
    text = run_start(0.0, init=True, **{name: 8}) + FIRST + run_start(1600.0, init=True, **{name: 16}) + REST
    assert len(runs_of(text)) == 2
    assert len(runs_of(text.replace('"value": 16', '"value": 8'))) == 1


PARTS = st.sampled_from([FIRST, REST, WITH_TRAIN, STOP, "noise\n"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), PARTS), max_size=6), st.integers(1, 300))
def test_restarts_read_the_same_in_any_pieces(parts: list[tuple[bool, str]], pieces: int) -> None:
    text = "".join(run_start(700.0 * i, init=init) + part for i, (init, part) in enumerate(parts))
    assert repr(runs_of(text, pieces)) == repr(runs_of(text))


class TestLogsWithoutTimeStamps:
    """Read by a pattern, ``start`` among them: lines have the times at which they come."""

    @staticmethod
    def run_of(*lines: tuple[float, str]) -> RunLog:
        now = [0.0]
        reader = RegexReader(
            lambda: now[0],
            eval=r"eval at (?P<samples>\d+): (?P<loss>\S+)", train=r"train at (?P<samples>\d+): (?P<loss>\S+)",
            start="^run_start", stop="^run_stop",
        )  # fmt: skip
        for now[0], line in lines:
            reader.feed(f"{line}\n".encode())
        return reader.run()

    @pytest.mark.parametrize("kind", ["eval", "train"])
    def test_training_that_begins_again_with_its_first_point_is_timed_from_there(self, kind: str) -> None:
        run = self.run_of(
            (1.0, "run_start"), (11.0, f"{kind} at 80: 0.95"), (13.0, "run_start"), (23.0, f"{kind} at 80: 0.95"),
            (33.0, f"{kind} at 160: 0.92"),
        )  # fmt: skip
        assert [(e.samples, e.seconds) for e in (*run.evals, *run.train)] == [(80, 10.0), (160, 20.0)]

    def test_what_goes_on_from_a_checkpoint_is_timed_from_the_first_start(self) -> None:
        run = self.run_of(
            (1.0, "run_start"), (11.0, "eval at 80: 0.95"), (13.0, "run_start"), (23.0, "eval at 160: 0.92")
        )
        assert [(e.samples, e.seconds) for e in run.evals] == [(80, 10.0), (160, 22.0)]

    @pytest.mark.parametrize(("loss", "seconds"), [("0.951", 30.0), ("0.93", 52.0)])
    def test_who_counts_from_zero_again_begins_anew_only_with_the_loss_of_the_beginning(
        self, loss: str, seconds: float
    ) -> None:
        run = self.run_of(
            (1.0, "run_start"), (11.0, "eval at 80: 0.95"), (21.0, "eval at 160: 0.931"), (23.0, "run_start"),
            (33.0, f"eval at 80: {loss}"), (43.0, "eval at 160: 0.929"), (53.0, "eval at 240: 0.92"),
        )  # fmt: skip
        assert run.evals[-1].seconds == seconds

    @pytest.mark.parametrize(("loss", "after", "again"), [(0.925, 10.0, 1), (0.95, 10.0, 1), (0.95, 1.0, 0)])
    def test_evals_after_progress_went_back_are_counted(self, loss: float, after: float, again: int) -> None:
        """Nothing says that the program started again; what comes at once is a summary, or another rank's."""
        now = 21.0 + after
        run = self.run_of(
            (1.0, "run_start"), (11.0, "eval at 80: 0.95"), (21.0, "eval at 160: 0.931"), (now, f"eval at 80: {loss}"),
        )  # fmt: skip
        assert (run.again, run.lowest_again) == ((again, loss) if again else (0, math.inf))
        assert [e.loss for e in run.evals] == [0.95, 0.931]

    @pytest.mark.parametrize("late", [0.0, 4.0])
    def test_lines_of_another_rank_that_come_late_begin_no_run(self, late: float) -> None:
        run = self.run_of(
            (1.0, "run_start"), (11.0, "eval at 80: 0.95"), (11.0 + late / 2, "run_start"),
            (11.0 + late, "eval at 80: 0.95"), (21.0, "eval at 160: 0.92"), (21.0 + late, "eval at 160: 0.92"),
        )  # fmt: skip
        assert [(e.samples, e.seconds) for e in run.evals] == [(80, 10.0), (160, 20.0)]

    def test_a_run_that_stopped_is_not_begun_anew(self) -> None:
        first = ((1.0, "run_start"), (11.0, "eval at 80: 0.92"), (12.0, "run_stop"))
        run = self.run_of(*first, (13.0, "run_start"), (14.0, "eval at 80: 0.92"))
        assert [(e.samples, e.seconds) for e in run.evals] == [(80, 10.0)]
