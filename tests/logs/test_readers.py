"""Logs that are not MLLOG: Hugging Face Trainer prints, JSON lines, and lines read by a user's patterns."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.logs import lines as line_reader
from lora_tune.logs import readers
from lora_tune.logs.lines import make_reader
from lora_tune.logs.run import LogReader, RunLog


class Clock:
    """Epoch seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now


def follow(reader: LogReader, clock: Clock, *lines: tuple[float, str]) -> RunLog:
    """Feed lines, each that many seconds after the first bytes."""
    begin = clock.now
    for seconds, line in lines:
        clock.now = begin + seconds
        reader.feed(line.encode() + b"\n")
    return reader.run()


def points(run: RunLog) -> list[tuple[float, float, float]]:
    return [tuple(one) for one in run.evals]


class TestHfTrainer:
    def test_a_whole_run(self) -> None:
        clock = Clock()
        run = follow(
            make_reader("hf_trainer", clock=clock, samples_per_epoch=1000),
            clock,
            (0, "loading checkpoint shards: 100%"),
            (60, "***** Running training *****"),
            (70, "{'loss': 1.4, 'grad_norm': 0.31, 'learning_rate': 0.0002, 'epoch': 0.1}"),
            (120, "{'eval_loss': 0.95, 'eval_runtime': 20.0, 'eval_samples_per_second': 8.6, 'epoch': 0.4}"),
            (220, "{'eval_loss': 0.93, 'eval_runtime': 20.0, 'eval_samples_per_second': 8.6, 'epoch': 1.2}"),
            (221, "{'train_runtime': 161.0, 'train_samples_per_second': 95.339, 'train_loss': 1.0156, 'epoch': 1.2}"),
        )
        assert points(run) == [(400, 0.95, 60.0), (1200, 0.93, 160.0)], "counted from where training starts"
        assert run.train == ((100, 1.4, 10.0),)
        assert run.eval_seconds == (20.0, 20.0)
        assert run.throughput == (10.0, 10.0), "eval time left out"
        assert run.stated_throughput == (95.339,)
        assert run.seconds == 161.0

    @pytest.mark.parametrize(
        "line",
        [
            "{'loss': 1.5, 'epoch': 0.5}",
            "{'loss': '1.5', 'grad_norm': '0.3', 'epoch': '0.5'}",
            "{'grad_norm': nan, 'loss': 1.5, 'learning_rate': 0.0, 'epoch': 0.5}",
            " 10%|#   | 20/200 [00:10<01:30]{'loss': 1.5, 'epoch': 0.5}",
            "0: {'loss': 1.5, 'epoch': 0.5} 10%|#   | 20/200",
            "50%|###  |\r{'loss': 1.5, 'epoch': 0.5}\r",
            "{'config': 1} {'loss': 1.5, 'epoch': 0.5}",
        ],
    )
    def test_shapes_of_one_dict(self, line: str) -> None:
        clock = Clock()
        run = follow(make_reader("hf_trainer", clock=clock), clock, (0, line))
        assert run.train == ((0.5, 1.5, 0.0),)
        assert run.dropped_lines == 0

    @pytest.mark.parametrize(("text", "loss"), [("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf)])
    def test_losses_that_are_no_numbers(self, text: str, loss: float) -> None:
        clock = Clock()
        run = follow(make_reader("hf_trainer", clock=clock), clock, (0, f"{{'eval_loss': {text}, 'epoch': 0.5}}"))
        assert run.evals[0].loss == loss or math.isnan(loss)

    @pytest.mark.parametrize(
        "line",
        [
            "{'loss': __import__('os').getpid(), 'epoch': 1}",
            "{'loss': tensor(1.5), 'epoch': 1}",
            "{'loss': 1.5}",
            "{'loss': None, 'epoch': 1}",
            "{'loss': " + "-" * 3000 + "1, 'epoch': 1}",
            "{'loss': " + "[" * 1500 + "]" * 1500 + ", 'epoch': 1}",
            "{'loss': 1.5, 'epoch': 1, 'x': <object>}",
        ],
    )
    def test_what_is_no_plain_dict_is_counted_and_never_evaluated(self, line: str) -> None:
        clock = Clock()
        run = follow(make_reader("hf_trainer", clock=clock), clock, (0, line))
        assert (run.train, run.dropped_lines) == ((), 1)

    def test_the_trainer_of_transformers_itself(self) -> None:
        """Whatever the installed version prints, it is read."""
        callbacks = pytest.importorskip("transformers.trainer_callback")
        logs = {"eval_loss": 0.9312, "eval_runtime": 4.1, "epoch": 0.5}
        import contextlib
        import io

        state = callbacks.TrainerState(is_world_process_zero=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            callbacks.PrinterCallback().on_log(None, state, None, logs=dict(logs))
        clock = Clock()
        run = follow(make_reader("hf_trainer", clock=clock), clock, (0, printed.getvalue()))
        assert [(e.samples, e.loss) for e in run.evals] == [(0.5, 0.9312)]


class TestJsonLines:
    def test_facts_under_the_study_s_names(self) -> None:
        clock = Clock()
        reader = make_reader(
            "jsonl",
            clock=clock,
            loss="val/loss",
            train_loss="train/loss",
            step="iter",
            seconds="t",
            global_batch_size=8,
        )
        run = follow(
            reader,
            clock,
            (0, json.dumps({"iter": 10, "train/loss": 1.5, "t": 4.0})),
            (9, json.dumps({"iter": 100, "val/loss": 0.95, "t": 50.0, "eval_seconds": 10.0, "throughput": 20.0})),
            (9, "not json"),
        )
        assert points(run) == [(800, 0.95, 50.0)], "the log's own seconds, not the time of arrival"
        assert run.train == ((80, 1.5, 4.0),)
        assert run.throughput == (20.0,)
        assert run.stated_throughput == (20.0,)
        assert run.dropped_lines == 0

    def test_arrival_times_where_the_log_has_none(self) -> None:
        clock = Clock()
        reader = make_reader("jsonl", clock=clock)
        run = follow(reader, clock, (0, "{}"), (12.5, '{"samples": 8, "eval_loss": 0.9}'))
        assert points(run) == [(8, 0.9, 12.5)]

    @pytest.mark.parametrize(
        "line", ["{broken", '{"eval_loss": 0.9}', '{"eval_loss": "x", "samples": 1}', "{" + "[" * 3000]
    )
    def test_what_cannot_be_used_is_counted(self, line: str) -> None:
        clock = Clock()
        assert follow(make_reader("jsonl", clock=clock), clock, (0, line)).dropped_lines == 1


class TestRegex:
    def test_facts_by_named_groups(self) -> None:
        clock = Clock()
        reader = make_reader(
            "regex",
            clock=clock,
            eval=r"iter (?P<step>\d+) .*val loss[ =](?P<loss>\S+)",
            train=r"iter (?P<step>\d+)/\d+ loss (?P<loss>[\d.]+) (?P<throughput>[\d.]+) seq/s",
            start=r"^begin training",
            stop=r"^done",
            global_batch_size=4,
        )
        run = follow(
            reader,
            clock,
            (0, "loading"),
            (30, "begin training"),
            (40, "7: iter 5/100 loss 1.25 2.0 seq/s"),
            (130, "iter 50 | lr 1e-4 | val loss=0.93"),
            (131, "done"),
        )
        assert points(run) == [(200, 0.93, 100.0)]
        assert run.train == ((20, 1.25, 10.0),)
        assert run.stated_throughput == (2.0,)
        assert run.seconds == 101.0

    @pytest.mark.parametrize(
        "pattern",
        [
            r"(?P<samples>(a+)+) (?P<loss>.)",
            r"(?P<samples>(?:ab|b)*) (?P<loss>.)",
            r"(?P<samples>(?:a{1,3})*) (?P<loss>.)",
            r"(?P<samples>(?:a?b?)*) (?P<loss>.)",
            r"(?:(?P<samples>\d*)x)+ (?P<loss>.)",
        ],
    )
    def test_patterns_that_can_hang_are_refused(self, pattern: str) -> None:
        with pytest.raises(ValueError, match="repeats a repetition"):
            make_reader("regex", eval=pattern)

    def test_a_pattern_that_is_slow_on_a_line_is_given_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(readers, "SLOW_SECONDS", 0.0)
        clock = Clock()
        reader = make_reader("regex", clock=clock, eval=r"(?P<samples>\d+) (?P<loss>\S+)")
        run = follow(reader, clock, (0, "8 0.9"), (1, "16 0.8"))
        assert [e.samples for e in run.evals] == [8]
        assert run.dropped_lines == 1

    def test_only_the_first_characters_of_a_line_are_searched(self) -> None:
        clock = Clock()
        reader = make_reader("regex", clock=clock, eval=r"(?P<samples>\d+) (?P<loss>\S+)")
        assert follow(reader, clock, (0, "x" * readers.MAX_PATTERN_LINE + "8 0.9")).evals == ()

    def test_the_worst_allowed_pattern_ends_on_the_worst_line(self) -> None:
        """Polynomial patterns cannot be told from harmless ones; the length of a line bounds them."""
        clock = Clock()
        reader = make_reader("regex", clock=clock, eval=r"a*a*b(?P<samples>\d)(?P<loss>\d)")
        begin = time.thread_time()
        run = follow(reader, clock, (0, "a" * line_reader.MAX_LINE), (1, "a" * line_reader.MAX_LINE), (2, "b19"))
        assert time.thread_time() - begin < 20
        assert points(run) in ([(1, 9.0, 2.0)], []), "found, unless the pattern was given up on a slow machine"


class TestSettings:
    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"kind": "tensorboard"}, "'tensorboard' is unknown; known are mllog, hf_trainer, jsonl, regex"),
            ({"kind": "mllog", "loss": "x"}, "has no setting 'loss'; its settings: none"),
            ({"kind": "jsonl", "los": "x"}, "has no setting 'los'"),
            ({"kind": "jsonl", "loss": 3}, "'loss' is 3; it must be a text"),
            ({"kind": "hf_trainer", "samples_per_epoch": 0}, "must be a number above 0"),
            ({"kind": "hf_trainer", "samples_per_epoch": True}, "must be a number above 0"),
            ({"kind": "regex"}, "needs the setting 'eval'"),
            ({"kind": "regex", "eval": "("}, "'eval' is not a valid regular expression"),
            ({"kind": "regex", "eval": r"(?P<loss>\d)"}, "needs the named groups loss and samples, step or epoch"),
            ({"kind": "regex", "eval": r"(?P<loss>.)(?P<step>.)(?P<foo>.)"}, "unknown group 'foo'"),
        ],
    )
    def test_mistakes_are_named(self, settings: dict[str, object], words: str) -> None:
        with pytest.raises(ValueError) as error:  # noqa: PT011  # the words are compared below
            make_reader(**settings)  # type: ignore[arg-type]
        assert words in str(error.value)
        assert "\n" not in str(error.value)


KINDS: dict[str, Callable[[Clock], LogReader]] = {
    "hf_trainer": lambda clock: make_reader("hf_trainer", clock=clock),
    "jsonl": lambda clock: make_reader("jsonl", clock=clock),
    "regex": lambda clock: make_reader("regex", clock=clock, eval=r"loss (?P<loss>\S+) at (?P<samples>\d+)"),
}
LINES = st.sampled_from(
    [
        b"{'loss': 1.5, 'epoch': 0.5}",
        b"{'eval_loss': 0.9, 'eval_runtime': 2, 'epoch': 1}",
        b'{"eval_loss": 0.9, "samples": 8}',
        b"loss 0.9 at 16",
        b"\n",
        b"\r\n",
        b"{'",
        b"x" * 5000,
        b"\xff\xfe",
        b"{'loss': 1.",
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=100, deadline=None)
@given(st.lists(LINES | st.binary(max_size=20), max_size=12), st.lists(st.integers(0, 9000), max_size=6))
def test_any_split_of_the_bytes_gives_the_same_run(kind: str, pieces: list[bytes], cuts: list[int]) -> None:
    log = b"".join(pieces)
    whole, split = KINDS[kind](Clock()), KINDS[kind](Clock())
    whole.feed(log)
    for begin, end in pairwise([0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]):
        split.feed(log[begin:end])
    assert repr(split.run()) == repr(whole.run())


@pytest.mark.parametrize("kind", KINDS)
def test_a_line_without_end_takes_no_memory(kind: str) -> None:
    reader = KINDS[kind](Clock())
    for _ in range(100):
        reader.feed(b"x" * 100_000)
    assert isinstance(reader, line_reader.LineReader)
    assert len(reader._held) <= line_reader.MAX_LINE
    assert reader.run().dropped_lines == 1
