"""A study's pattern that matches nothing: said after the first lines, with a pattern that would."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.logs.follower import LogFollower
from lora_tune.logs.lines import ENOUGH_LINES, LineReader, Unmatched, is_eval_line, make_reader, suggest
from lora_tune.logs.run import RunLog

EVALS = [
    ("step 300 loss 0.5196", (300, 0.5196)),
    ("[rank0]: 2026-11-22 10:11:12 | eval at iteration    40/400 | val loss: 1.25e-01 | ppl 3.4", (40, 0.125)),
    ("Epoch 3: val_loss=0.91", (3, 0.91)),
    ("eval_loss = 0.4  (consumed_samples=1024)", (1024, 0.4)),
    ('{"step": 12, "validation_loss": 2.5}', (12, 2.5)),
]


def read_as_suggested(line: str, log: str) -> list[tuple[float, float]]:
    reader = make_reader(**tomllib.loads("log = {" + suggest(line) + "}")["log"])
    reader.feed(log.encode() + b"\n")
    return [(point.samples, point.loss) for point in reader.run().evals]


@pytest.mark.parametrize(("line", "point"), EVALS)
def test_the_suggested_settings_read_the_line_that_they_were_made_from(line: str, point: tuple[float, float]) -> None:
    assert is_eval_line(line)
    assert read_as_suggested(line, line) == [point]


@given(st.integers(0, 10**6), st.floats(0.001, 99), st.sampled_from(["eval loss", "val_loss", "loss"]))
def test_suggested_settings_also_read_the_next_eval(step: int, loss: float, word: str) -> None:
    first, second = (f"step {n} of 9000, {word}: {value:.4f}" for n, value in ((300, 0.5), (step, loss)))
    assert read_as_suggested(first, second) == [(step, float(f"{loss:.4f}"))]


def test_a_wrong_pattern_is_said_after_fifty_lines() -> None:
    reader = make_reader("regex", eval=r"LOSS (?P<loss>\S+) AT (?P<step>\d+)")
    reader.feed(b"".join(b"step %d loss 0.5\n" % n for n in range(ENOUGH_LINES - 1)))
    assert reader.unmatched.describe(ended=False) == ""
    reader.feed(b"step 300 loss 0.5196\n")
    words = reader.unmatched.describe(ended=False)
    assert words.startswith("50 lines read, none matched workload.log; a line that looks like an eval: `step 300")
    assert words.endswith('try in its place: kind = "named", loss = "loss", step = "step"')


def test_train_losses_before_the_first_eval_are_no_reason_to_stop() -> None:
    reader = make_reader("regex", eval=r"eval_loss (?P<loss>\S+) at (?P<step>\d+)")
    reader.feed(b"".join(b"step %d loss 0.5\n" % n for n in range(1000)))
    assert reader.unmatched.describe(ended=False) == ""


def test_a_log_that_was_understood_once_is_never_called_unmatched() -> None:
    reader = make_reader("regex", eval=r"loss (?P<loss>\S+) at (?P<step>\d+)")
    reader.feed(b"loss 0.9 at 8\n" + b"step 3 loss 0.5\n" * 100)
    assert reader.unmatched.describe(ended=True) == ""


def test_a_log_without_anything_like_an_eval_is_told_so_at_its_end() -> None:
    counted = Unmatched()
    for _ in range(60):
        counted.take("downloading")
    assert counted.describe(ended=False) == ""
    assert counted.describe(ended=True) == "60 lines read, none matched workload.log; none of them looks like an eval"


class Strict(LineReader):
    """``40 samples: loss 0.91``, without a thought for what else a log may hold."""

    def line(self, text: str, now: int) -> bool:
        samples, _, loss = text.partition(" samples: loss ")
        return self.take_fields({"loss": float(loss)}, now, float(samples))


def test_a_line_for_which_a_format_raises_is_dropped_and_the_next_one_read() -> None:
    reader = Strict(lambda: 0.0)
    reader.feed(b"40 samples: loss 0.91\n80 samples: loss n/a\nGPU 3 is hot\n120 samples: loss 0.6\n")
    assert [(e.samples, e.loss) for e in reader.run().evals] == [(40, 0.91), (120, 0.6)]
    assert reader.run().dropped_lines == 2


def test_a_format_that_understands_nothing_says_what_it_raised() -> None:
    reader = Strict(lambda: 0.0)
    reader.feed(b"GPU 3 is hot\n")
    assert "none matched workload.log (its reader failed: ValueError: could not convert" in reader.unmatched.describe(
        ended=True
    )


class Failing:
    """A reader that is no LineReader, and fails."""

    def feed(self, chunk: bytes) -> None:
        raise KeyError("loss")

    def run(self) -> RunLog:
        return RunLog()


def test_a_reader_that_fails_makes_its_log_unreadable_and_ends_no_sweep(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1\n")
    follower = LogFollower(log, Failing, now=0.0)
    follower.poll(1.0)
    assert follower.unreadable == "the reader of workload.log fails: KeyError: 'loss'"
