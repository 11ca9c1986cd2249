"""What is read from ``:::MLLOG`` logs: the shapes of all rounds, several ranks, several runs, and damage."""

from __future__ import annotations

import gzip
import json
import math
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.logs import run_builder
from lora_tune.logs.mllog import MAX_RECORD, MllogReader
from lora_tune.logs.run import RunLog

START = 1_700_000_000_000


def record(key: str, value: Any = None, at: float = 0.0, event: str = "POINT_IN_TIME", **metadata: Any) -> str:
    """One record as mlperf_logging prints it; ``at`` is seconds after START."""
    fields = {
        "namespace": "",
        "time_ms": START + round(at * 1000),
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": {"file": "/workspace/ft-llm/custom_callbacks.py", "lineno": 181, **metadata},
    }
    return f":::MLLOG {json.dumps(fields)}\n"


def read(text: str | bytes) -> RunLog:
    reader = MllogReader()
    reader.feed(text.encode() if isinstance(text, str) else text)
    return reader.run()


def evals(run: RunLog) -> list[tuple[float, float, float]]:
    return [tuple(one) for one in run.evals]


def v4_run(batch: int = 8, losses: tuple[float, ...] = (0.9374, 0.9316, 0.9233), start: float = 60.0) -> str:
    """NVIDIA's v4.0 and v4.1 shape: 2 samples/s, evals of 30 s, the first block of 1,536 samples 10 s slower."""
    text = record("cache_clear", True) + record("init_start", event="INTERVAL_START")
    text += record("submission_benchmark", "llama2_70b_lora") + record("seed", 31105)
    text += record("global_batch_size", batch) + record("train_samples", 3901)
    text += record("opt_base_learning_rate", 0.0005) + record("opt_learning_rate_training_steps", 896)
    text += record("init_stop", at=start, event="INTERVAL_END")
    text += record("run_start", at=start, event="INTERVAL_START")
    text += record("block_start", at=start, event="INTERVAL_START", samples_count=0)
    now, samples = start + 10.0, 0
    for loss in losses:
        block = 1536 if samples == 0 else 384
        samples, now = samples + block, now + block / 2
        text += record("train_loss", 1.4, at=now, samples_count=samples, lr=0.0004)
        text += record("tracked_stats", {"throughput": 2.0001}, at=now, step=samples)
        text += record("block_stop", at=now, event="INTERVAL_END", samples_count=samples)
        text += record("eval_start", at=now, event="INTERVAL_START", samples_count=samples)
        now += 30.0
        text += record("eval_accuracy", loss, at=now, samples_count=samples)
        text += record("eval_stop", at=now, event="INTERVAL_END", samples_count=samples)
        text += record("block_start", at=now, event="INTERVAL_START", samples_count=samples)
    return text + record("run_stop", losses[-1], at=now, event="INTERVAL_END", samples_count=samples, status="success")


V4 = v4_run()
V4_EVALS = [(1536, 0.9374, 808.0), (1920, 0.9316, 1030.0), (2304, 0.9233, 1252.0)]


class TestRounds:
    """The same facts under the keys of each round."""

    def test_v4_and_v4_1(self) -> None:
        run = read(V4)
        assert evals(run) == V4_EVALS
        assert run.status == "success"
        assert run.init_seconds == 60.0
        assert run.seconds == 1252.0
        assert run.eval_seconds == (30.0, 30.0, 30.0)
        assert run.throughput == (1536 / 778, 2.0, 2.0), "the cold block first, by the log's clock"
        assert run.stated_throughput == (2.0001, 2.0001, 2.0001), "as the trial prints it"
        assert [(p.samples, p.loss) for p in run.train] == [(1536, 1.4), (1920, 1.4), (2304, 1.4)]
        assert run.last_ms == run.run_stop_ms
        assert run.dropped_lines == 0

    def test_hyperparameters_keep_their_types(self) -> None:
        assert read(V4).hyperparameters == {
            "cache_clear": True,
            "submission_benchmark": "llama2_70b_lora",
            "seed": 31105,
            "global_batch_size": 8,
            "train_samples": 3901,
            "opt_base_learning_rate": 0.0005,
            "opt_learning_rate_training_steps": 896,
        }

    def test_hyperparameters_of_any_name_can_be_listed(self) -> None:
        run = read(record("x").encode().replace(b'"x"', b'"\xff\xe9"').replace(b"null", b"3"))
        assert dict(run.hyperparameters) == {"\N{REPLACEMENT CHARACTER}" * 2: 3}
        assert len(run.hyperparameters) == 1
        assert read(record("x", [1]) + record("y")).hyperparameters.get("y") is None

    def test_v4_0_of_stacks_that_count_evals_into_the_block(self) -> None:
        """Gaudi2 and DeepSpeed: no eval_start, block_stop with the result, block_start counts steps."""
        text = record("run_start", at=0.0, event="INTERVAL_START")
        text += "".join(record("train_loss", 1.3, at=10 + s / 2, samples_count=s) for s in (192, 576, 960, 1344))
        text += record("block_stop", "", at=800.0, samples_count=1536)
        text += record("eval_accuracy", 0.94, at=800.002, samples_count=1536)
        text += record("block_start", "", at=800.002, samples_count=192)
        text += record("train_loss", 1.3, at=900.0, samples_count=1728)
        text += record("block_stop", "", at=1000.0, samples_count=1920)
        text += record("eval_accuracy", 0.93, at=1000.0, samples_count=1920)
        run = read(text)
        assert run.eval_seconds == (), "an eval's length cannot be told"
        assert run.throughput == (2.0,), "the median between train points; the second block has only one"

    def test_block_marks_serve_where_evals_are_not_marked(self) -> None:
        text = record("run_start")
        text += record("block_stop", at=500.0) + record("eval_accuracy", 0.94, at=530.0, samples_count=1000)
        text += record("block_start", at=531.0) + record("block_stop", at=731.0)
        text += record("eval_accuracy", 0.93, at=761.0, samples_count=1400) + record("block_start", at=761.0)
        run = read(text)
        assert run.throughput == (2.0, 2.0)
        assert run.eval_seconds == (31.0, 30.0)

    def test_v5_0_prints_step_time_too_and_counts_blocks_from_their_start(self) -> None:
        text = record("global_batch_size", 8) + record("run_start")
        text += record("tracked_stats", {"before_model_init": 2.3}, at=0.0, step=0)
        text += record("train_loss ", 2.19, at=15.0, samples_count=80, lr=0.0005)
        stats = {"throughput": 5.4458, "train_step_time": 1.469, "max_memory_usage": 168.83}
        text += record("tracked_stats", stats, at=282.0, step=0)
        text += record("block_stop", at=282.0, samples_count=0) + record("eval_start", at=282.0, samples_count=1536)
        text += record("eval_accuracy", 0.9408, at=295.5, samples_count=1536)
        text += record("tracked_stats", {"validation_throughput": 13.0}, at=295.5, step=1536)
        text += record("eval_stop", at=295.5, samples_count=1536)
        run = read(text)
        assert run.train[0][:2] == (80, 2.19), "the misspelt key"
        assert run.stated_throughput == (5.4458,)
        assert run.throughput == (1536 / 282,)
        assert run.peak_gib == 168.83

    @pytest.mark.parametrize("blank", ["", " "])  # as mlperf_logging prints it, and in any other form
    def test_of_several_peaks_of_memory_the_highest_counts_and_no_nonsense_does(self, blank: str) -> None:
        text = record("run_start")
        for peak in (71.5, 74.25, 3.0, 0.0, -1.0, math.inf, math.nan):
            stats = record("tracked_stats", {"max_memory_usage": peak}, at=10.0, step=0)
            text += stats.replace(":::MLLOG {", f":::MLLOG {blank}{{")
        assert read(text).peak_gib == 74.25
        assert read(record("run_start")).peak_gib is None

    def test_v5_1_prints_train_loss_in_tracked_stats_and_lengths_in_blocks(self) -> None:
        text = record("global_batch_size", 8) + record("run_start")
        text += record("block_start", samples_count=1536, step=0)
        text += record("tracked_stats", {"train_loss": 2.151}, at=7.3, samples_count=80, lr=0.0006, step=10)
        text += record("tracked_stats", {"train_step_time": 0.8}, at=153.0, samples_count=1536)
        text += record("block_stop", at=153.6, samples_count=1536, step=192)
        text += record("eval_start", at=153.6, samples_count=1536, step=192)
        text += record("eval_accuracy", 0.957, at=160.0, samples_count=1536)
        text += record("eval_stop", at=160.0, samples_count=1536, step=192)
        text += record("block_start", at=160.0, samples_count=384, step=192)
        text += record("tracked_stats", {"train_step_time": 0.8}, at=198.0, samples_count=384)
        text += record("block_stop", at=198.4, samples_count=384, step=240)
        text += record("eval_start", at=198.4, samples_count=1920, step=240)
        text += record("eval_accuracy", 0.952, at=205.0, samples_count=1920)
        run = read(text)
        assert run.train[0][:2] == (80, 2.151)
        assert run.stated_throughput == (10.0, 10.0), "batch over seconds a step; 384 twice is no repetition"
        assert run.throughput == (10.0, 10.0)
        assert run.eval_seconds == (6.4, 6.6), "the second eval has a result and no eval_stop yet"

    REDUCED = (
        record("reduced_train_loss", 28.0, at=3.0, samples_count=160),
        record("tracked_stats", {"reduced_train_loss": 28.0}, at=3.0, samples_count=160),
        record("tracked_stats", {"reduced_train_loss": 28.0, "lr": 0.1}, at=3.0, step=20),
        record("tracked_stats", {"train_step_time": 0.8, "reduced_train_loss": 28.0}, at=3.0, samples_count=160),
        record("tracked_stats", {"reduced_train_loss": 28.0, "train_step_time": 0.8}, at=3.0, samples_count=160),
    )

    @pytest.mark.parametrize("line", REDUCED)
    @pytest.mark.parametrize(
        "cp",
        [record("context_parallelism", 8), "export CP=8\n", "  context_parallel_size: 8\n"],
        ids=["6.1", "CP", "yaml"],
    )
    def test_v6_0_prints_the_loss_times_cp_over_micro_batches(self, cp: str, line: str) -> None:
        head = record("global_batch_size", 8) + record("gradient_accumulation_steps", 2)
        run = read(cp + head + record("run_start") + line)
        assert run.train == ((160, 28.0 * 2 / 8, 3.0),)
        assert "cp" not in run.hyperparameters
        assert run.stated_throughput == ((10.0,) if "step_time" in line else ())

    @pytest.mark.parametrize("pieces", [1, 7, 60, 100_000])
    def test_a_configuration_is_printed_before_the_run_in_any_case_of_letters(self, pieces: int) -> None:
        """What programs say while they train, of other ranks or other models, changes nothing any more."""
        head = record("global_batch_size", 8) + record("gradient_accumulation_steps", 2)
        text = f"Cp=4\n{head}{record('run_start')}cp=2 \n{self.REDUCED[1]}".encode()
        reader = MllogReader()
        for at in range(0, len(text), pieces):
            reader.feed(text[at : at + pieces])
        assert [point.loss for point in reader.run().train] == [28.0 * 2 / 4]

    @pytest.mark.parametrize(
        "scale",
        [
            {},
            {"gradient_accumulation_steps": 2, "context_parallelism": -8},
            {"gradient_accumulation_steps": 2},
            {"gradient_accumulation_steps": 0, "context_parallelism": 8},
            {"gradient_accumulation_steps": 2, "context_parallelism": math.inf},
        ],
    )
    def test_a_reduced_loss_whose_scale_is_not_known_is_no_loss(self, scale: dict[str, float]) -> None:
        """Not shown, not used; that it is no number any more is known all the same."""
        stated = "".join(record(name, value) for name, value in scale.items())
        head = stated + record("global_batch_size", 8) + record("run_start")
        assert read(head + self.REDUCED[1]).train == ()
        nan = record("tracked_stats", {"reduced_train_loss": math.nan}, at=3.0, samples_count=160)
        assert [math.isnan(point.loss) for point in read(head + nan).train] == [True]

    def test_a_train_loss_under_its_own_name_is_one(self) -> None:
        run = read(record("global_batch_size", 8) + record("run_start") + record("train_loss", 1.25, at=3.0, step=20))
        assert run.train == ((160, 1.25, 3.0),)

    @pytest.mark.parametrize(
        ("metadata", "samples"), [({"epoch_num": 0.5}, 1950.5), ({"epoch_num": 3072}, 3072), ({"step_num": 192}, 1536)]
    )
    def test_older_counts_of_progress(self, metadata: dict[str, float], samples: float) -> None:
        text = record("global_batch_size", 8) + record("train_samples", 3901) + record("run_start")
        run = read(text + record("eval_accuracy", 0.93, at=5.0, **metadata))
        assert [one.samples for one in run.evals] == [samples]


class TestBelief:
    """What counts when a log says things twice, or wrongly."""

    def test_status_is_not_believed(self) -> None:
        run = read(v4_run(losses=(0.94, 0.93)))
        assert run.status == "success"
        assert run.reached(0.925) is None

    def test_the_first_eval_at_or_below_the_target_reaches_it(self) -> None:
        run = read(v4_run(losses=(0.94, math.nan, 0.925, 0.92)))
        stop = run.reached(0.925)
        assert stop is not None
        assert stop.samples == 2304

    def test_eight_ranks_that_print_everything_count_once(self) -> None:
        lines = V4.splitlines(keepends=True)
        ranks = "".join(f"{rank}: {line}" for line in lines for rank in range(8))
        assert read(ranks) == read(V4)

    def test_the_first_printing_of_an_eval_counts(self) -> None:
        text = record("run_start") + record("eval_accuracy", 0.93, at=5.0, samples_count=8)
        assert evals(read(text + record("eval_accuracy", 0.94, at=5.2, samples_count=8))) == [(8, 0.93, 5.0)]

    def test_ranks_whose_output_comes_late_open_no_second_run(self) -> None:
        """srun buffers by rank: another rank's start lines may appear after this rank's evals."""
        late = "".join(f"7: {line}" for line in V4.splitlines(keepends=True))
        reader = MllogReader()
        reader.feed((V4 + late).encode())
        assert len(reader.runs()) == 1
        assert reader.run() == read(V4)

    def test_a_doubled_init_start_is_one_initialisation_from_the_first_on(self) -> None:
        text = record("init_start") + record("init_start", at=0.7) + record("init_stop", at=50.0)
        assert read(text).init_seconds == 50.0

    def test_a_log_of_several_runs_gives_the_last_and_keeps_the_others(self) -> None:
        """NEXP seeds in one job, or a requeued job that appends."""
        second = v4_run(losses=(0.95, 0.92)).replace("31105", "31106").replace(str(START)[:6], "170001")
        reader = MllogReader()
        reader.feed((V4 + second).encode())
        assert [run.hyperparameters["seed"] for run in reader.runs()] == [31105, 31106]
        assert [len(run.evals) for run in reader.runs()] == [3, 2]
        assert reader.run().hyperparameters["seed"] == 31106

    def test_a_requeued_job_that_has_only_begun_to_initialise_is_not_yet_the_run(self) -> None:
        reader = MllogReader()
        reader.feed((V4 + record("init_start", at=5000.0)).encode())
        assert len(reader.runs()) == 2
        assert reader.run().reached(0.925) is not None

    def test_a_trial_that_prints_only_run_start_may_start_again(self) -> None:
        text = record("run_start") + record("eval_accuracy", 0.95, at=10.0, samples_count=100)
        again = record("run_start", at=20.0) + record("eval_accuracy", 0.94, at=31.0, samples_count=100)
        assert evals(read(text + again)) == [(100, 0.94, 11.0)]

    def test_evals_before_any_run_start_have_no_time(self) -> None:
        (one,) = read(record("eval_accuracy", 0.93, samples_count=8)).evals
        assert (one.samples, one.loss) == (8, 0.93)
        assert math.isnan(one.seconds)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_losses_that_are_no_numbers_are_kept(self, value: float) -> None:
        run = read(record("run_start") + record("eval_accuracy", value, at=1.0, samples_count=8))
        assert run.evals[0].loss == value or math.isnan(run.evals[0].loss)
        text = record("run_start") + record("tracked_stats", {"train_loss": value}, at=1.0, samples_count=8)
        assert read(text).train[0].loss == value or math.isnan(value)

    @pytest.mark.parametrize("value", [None, "", "abc", True, [1], {"a": 1}])
    def test_a_loss_that_is_no_number_at_all_is_dropped(self, value: Any) -> None:
        run = read(record("run_start") + record("eval_accuracy", value, at=1.0, samples_count=8))
        assert run.evals == ()
        assert run.dropped_lines == 1


class TestDamage:
    """srun labels, interleaving, cuts, glue, encodings, floods."""

    @pytest.mark.parametrize(
        "prefix", ["0: ", " 12: ", "127: ", "[1,0]<stdout>:", "node7: 3: ", "\x1b[32m", "50%|##  |"]
    )
    def test_a_record_is_found_anywhere_in_a_line(self, prefix: str) -> None:
        assert read("".join(prefix + line for line in V4.splitlines(keepends=True))) == read(V4)

    def test_carriage_returns(self) -> None:
        assert read(V4.replace("\n", "\r\n")) == read(V4)
        assert read("10%\r20%\r" + V4.replace("\n", "\n30%\r")) == read(V4)

    def test_records_glued_into_one_line(self) -> None:
        assert read(V4.replace("\n", "") + "\n") == read(V4)
        assert read(V4.replace("\n", "0: [NeMo I 2024-05-05] {not: a record} ")) == read(V4)

    def test_glued_records_that_arrive_byte_by_byte(self) -> None:
        """No newline ends them: the start of the next marker must be held behind a whole record."""
        reader = MllogReader()
        for byte in V4.replace("\n", " ").encode():
            reader.feed(bytes([byte]))
        assert reader.run() == read(V4)

    def test_a_whole_record_without_its_newline_counts(self) -> None:
        """The last line of a process that was killed."""
        assert read(V4.rstrip("\n")) == read(V4)

    def test_a_record_cut_by_another_rank_is_dropped_and_the_other_kept(self) -> None:
        line = record("eval_accuracy", 0.93, at=10.0, samples_count=1536)
        for cut in (12, 40, 100, len(line) - 3):
            run = read(record("run_start") + line[:cut] + "3: " + line + line[cut:])
            assert evals(run) == [(1536, 0.93, 10.0)]
            assert run.dropped_lines == 1

    def test_bytes_that_are_no_utf_8(self) -> None:
        noise = bytes(range(128, 256)) + b"\n"
        run = read(noise + V4.encode().replace(b"llama2", b"ll\xe4ma\xff") + noise)
        assert evals(run) == V4_EVALS
        assert (
            run.hyperparameters["submission_benchmark"]
            == "ll\N{REPLACEMENT CHARACTER}ma\N{REPLACEMENT CHARACTER}_70b_lora"
        )

    def test_json_in_another_order_and_spacing(self) -> None:
        lines = [json.loads(line[9:]) for line in V4.splitlines()]
        shuffled = "".join(
            ":::MLLOG {" + ", ".join(f"{json.dumps(k)} :\t{json.dumps(v)}" for k, v in sorted(one.items())) + "}\n"
            for one in lines
        )
        assert read(shuffled) == read(V4)

    def test_blanks_before_the_brace(self) -> None:
        assert read(V4.replace(":::MLLOG ", ":::MLLOG")) == read(V4)
        assert read(V4.replace(":::MLLOG ", ":::MLLOG \t  ")) == read(V4)

    @pytest.mark.parametrize(
        "line",
        [
            ":::MLLOG {}\n",
            ":::MLLOG {" + "[" * 50_000 + "\n",
            ":::MLLOG {" + '{"a":' * 50_000 + "\n",
            ":::MLLOG [1, 2]\n:::MLLOG {\n",
            record("eval_accuracy", 0.9, samples_count=-1),
            record("eval_accuracy", 0.9, samples_count=math.inf),
            record("eval_accuracy", 0.9).replace(str(START), "9" * 400),
            record("eval_accuracy", 0.9, samples_count=1).replace(str(START), "NaN"),
            record("eval_accuracy", 10**400, samples_count=1),
            record("eval_accuracy", 0.9, samples_count=1).replace("0.9", "0.9.9"),
            record("eval_accuracy", 0.9, samples_count=1).replace('"key"', '"clef"'),
            record("eval_accuracy", 0.9, samples_count=1).replace('"metadata"', '"meta"'),
        ],
    )
    def test_malformed_records_are_counted_and_change_nothing(self, line: str) -> None:
        run = read(V4 + line)
        assert evals(run) == V4_EVALS
        assert run.dropped_lines == 1

    def test_a_line_without_end_is_dropped_and_takes_no_memory(self) -> None:
        reader = MllogReader()
        reader.feed(b':::MLLOG {"key": "')
        for _ in range(40):
            reader.feed(b"x" * (MAX_RECORD // 8))
            assert sys.getsizeof(reader._tail) < 2 * MAX_RECORD
        reader.feed(b"\n" + V4.encode())
        assert evals(reader.run()) == V4_EVALS
        assert reader.run().dropped_lines == 1

    def test_megabytes_of_braces_and_markers_are_read_in_seconds(self) -> None:
        for noise in (b"{", b":::MLLOG", b":::MLLOG {", b':::MLLOG {"', b":::MLLOG {\n", b"\n", b":", b'{"a": '):
            reader = MllogReader()
            reader.feed(noise * ((2 << 20) // len(noise)))
            reader.feed(b"\n" + V4.encode())
            assert evals(reader.run()) == V4_EVALS

    def test_a_flood_of_facts_takes_bounded_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A trial that prints evals, losses, marks, hyperparameters and new runs for ever."""
        monkeypatch.setattr(run_builder, "MAX_EVALS", run_builder.MAX_POINTS)
        reader = MllogReader()
        reader.feed(record("run_start").encode())
        for step in range(3 * run_builder.MAX_POINTS):
            line = record("eval_accuracy", 0.9, at=step, samples_count=step)
            line += record("train_loss", 1.0, at=step, samples_count=step) + record(f"hyper{step}", step)
            line += record("block_stop", at=step) + record("tracked_stats", {"throughput": 1.0}, at=step)
            reader.feed(line.encode())
        run = reader.run()
        assert (len(run.evals), run.missing_evals) == (run_builder.MAX_EVALS, 2 * run_builder.MAX_POINTS)
        assert run_builder.MAX_POINTS // 2 <= len(run.train) <= run_builder.MAX_POINTS
        assert run.train[-1].samples == 3 * run_builder.MAX_POINTS - 1, "the newest train points are kept"
        assert len(run.hyperparameters) == run_builder.MAX_HYPERPARAMETERS
        for start in range(100):
            reader.feed(record("init_start", at=1e6 + start).encode() + record("run_start", at=1e6 + start).encode())
        assert len(reader.runs()) == 33


@st.composite
def damaged_logs(draw: st.DrawFn) -> bytes:
    """A real log, damaged in a few places."""
    log = bytearray(V4.encode())
    pieces = st.sampled_from(
        [b"\n", b":::MLLOG ", b":::MLLOG {", b"{", b"}}", b'"', b"\xff", b"\r", b"NaN", b"\x00", b": "]
    )
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(log)))
        if draw(st.booleans()):
            log[at:at] = draw(pieces | st.binary(max_size=20))
        else:
            del log[at : at + draw(st.integers(1, 60))]
    return bytes(log)


@settings(max_examples=200, deadline=None)
@given(damaged_logs(), st.lists(st.integers(0, 12_000), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_run(log: bytes, cuts: list[int]) -> None:
    reader = MllogReader()
    edges = [0, *sorted(min(cut, len(log)) for cut in cuts), len(log)]
    for begin, end in pairwise(edges):
        reader.feed(log[begin:end])
    assert repr(reader.run()) == repr(read(log)), "repr: NaN is not equal to itself"
    assert repr(reader.runs()) == repr(_runs(log))


@settings(max_examples=20, deadline=None)
@given(damaged_logs())
def test_byte_by_byte_gives_the_same_run(log: bytes) -> None:
    reader = MllogReader()
    for byte in log:
        reader.feed(bytes([byte]))
    assert repr(reader.run()) == repr(read(log))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.binary(max_size=60) | st.sampled_from([b":::MLLOG ", b"{", b'"key": "eval_accuracy"', b"\n"]), max_size=30
    )
)
def test_no_bytes_raise(pieces: list[bytes]) -> None:
    reader = MllogReader()
    for piece in pieces:
        reader.feed(piece)
    assert isinstance(reader.run(), RunLog)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 10**6), st.floats(allow_nan=False), st.integers(0, 10**7)), unique_by=lambda t: t[0]
    )
)
def test_the_quick_and_the_thorough_way_read_the_same(points: list[tuple[int, float, int]]) -> None:
    """Records in the usual form are read without the JSON decoder."""
    usual = record("run_start") + "".join(record("eval_accuracy", v, at=ms, samples_count=s) for s, v, ms in points)
    unusual = usual.replace('"namespace": "", ', "")
    assert repr(read(unusual)) == repr(read(usual))
    assert sorted((e.samples, e.loss) for e in read(usual).evals) == sorted((s, v) for s, v, _ in points)


@pytest.mark.public_data
def test_every_public_log_agrees_with_the_published_summary(public_data: Path) -> None:
    """1,050 logs against runs.jsonl.gz, to the last digit.

    The summary holds one row a distinct successful run, identified here by its run_start. It was derived so, and
    nothing in it is rounded: seconds are (time_ms - run_start) / 1000; eval_seconds are eval_stop - eval_start;
    samples_per_second_by_block are samples between evals over (eval_start - previous eval_stop), without the first
    block, which is samples over (eval_start - run_start); init_seconds are init_stop - the first init_start; minutes
    are (run_stop - run_start) / 60000. Where a stack does not mark evals, eval_seconds and samples_per_second_by_block
    are empty. It leaves out train losses under the misspelt key, and rows for the one log that hit its time limit
    and ten that were added later.
    """
    summary = gzip.decompress((public_data / "runs.jsonl.gz").read_bytes()).splitlines()
    rows = {row["rs"]: row for row in map(json.loads, summary)}
    logs = sorted((public_data / "logs").rglob("*.txt.gz"))
    assert len(logs) == 1050
    compared, unfinished, dropped, without_row = set(), [], 0, 0
    for log in logs:
        reader = MllogReader()
        reader.feed(gzip.decompress(log.read_bytes()))
        run = reader.run()
        assert len(reader.runs()) == 1, log
        assert run.evals, log
        dropped += run.dropped_lines
        if run.run_stop_ms is None:
            unfinished.append(log)
        elif run.run_start_ms in rows:
            compare(run, rows[run.run_start_ms])
            compared.add(run.run_start_ms)
        else:
            without_row += 1
    assert len(compared) == 1029
    assert (len(unfinished), without_row, dropped) == (1, 10, 1)


def compare(run: RunLog, row: dict[str, Any]) -> None:
    assert evals(run) == [tuple(one) for one in row["evals_samples_loss_seconds"]]
    assert list(run.eval_seconds) == row["eval_seconds"]
    if row["eval_seconds"]:
        first, *warm = run.throughput
        assert first == row["first_block_samples_per_second"]
        assert warm == row["samples_per_second_by_block"]
    assert list(run.stated_throughput) == [value for name, value, *_ in row["ts"] if name == "throughput"]
    assert run.init_seconds == row["init_seconds"]
    assert run.run_stop_ms is not None
    assert run.run_start_ms is not None
    assert (run.run_stop_ms - run.run_start_ms) / 60000 == row["minutes"]
    assert run.status == row["status"]
    points = [(samples, loss, seconds) for samples, loss, _, seconds in row["train_loss_samples_loss_lr_seconds"]]
    assert not points or [tuple(point) for point in run.train] == points
    known = run.hyperparameters
    assert [known["lora_rank"], known["lora_alpha"]] == row["lora_rank_alpha"]
    names = {
        "gbs": "global_batch_size",
        "lr": "opt_base_learning_rate",
        "max_steps": "opt_learning_rate_training_steps",
        "warmup_ratio": "opt_learning_rate_warmup_factor",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "weight_decay": "opt_adamw_weight_decay",
        "gradient_clip_norm": "opt_gradient_clip_norm",
        "seed": "seed",
        "train_samples": "train_samples",
        "eval_samples": "eval_samples",
    }
    assert {short: known[name] for short, name in names.items()} == {short: row[short] for short in names}


@pytest.mark.public_data
def test_public_logs_read_the_same_in_small_pieces(public_data: Path) -> None:
    logs = sorted((public_data / "logs").rglob("*.txt.gz"))
    chance = random.Random(1)
    for log in chance.sample(logs, 25):
        text = gzip.decompress(log.read_bytes())
        reader = MllogReader()
        at = 0
        while at < len(text):
            size = chance.choice([1, 7, 100, 4096, 30_000])
            reader.feed(text[at : at + size])
            at += size
        assert repr(reader.run()) == repr(read(text)), log


def _runs(log: bytes) -> tuple[RunLog, ...]:
    reader = MllogReader()
    reader.feed(log)
    return reader.runs()
