"""Finished logs played as trials: the sweep's own decisions, by the logs' own clock."""

from __future__ import annotations

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.cli.replay import as_object
from lora_tune.config.study import load_study
from lora_tune.logs import follower
from lora_tune.logs.log_files import TICK_MS, printed_settings, ticks
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import Announced, RunLog
from lora_tune.replay import main
from lora_tune.review.log_replay import Replay
from lora_tune.store.records import Verdict
from lora_tune.sweep import main as sweep
from lora_tune_simulation.h100 import function as h100
from tests.recorded import recorded

STUDIES = Path(__file__).resolve().parents[2] / "studies"
H100 = load_study(STUDIES / "h100.toml")
GOOD = {"LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "TP": 4, "MINIBS": 4}
KEYS = ["log", "reached", "stop_seconds", "objective_seconds", "low", "high", "evals", "verdicts"]


def log_of(seed: int = 1, **changes: float) -> str:
    """The MLLOG text of a simulated run on 8 H100."""
    return "".join(f"{line}\n" for _, line in h100({**GOOD, **changes}, seed))


def replay(*arguments: object, study: Path | str = "h100"):
    name = str(study) if isinstance(study, Path) else str(STUDIES / f"{study}.toml")
    return CliRunner().invoke(main, ["--study", name, *map(str, arguments)])


def played(folder: Path, *texts: str | bytes, study: Path | str = "h100") -> list[dict]:
    """The JSON objects of these logs, played in this order."""
    files = []
    for number, text in enumerate(texts):
        file = folder / f"{number}.log"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        files.append(file)
    result = replay("--json", *files, study=study)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def kinds(one: dict) -> list[str]:
    return [v["kind"] for v in one["verdicts"]]


def test_a_run_that_reached_the_target_has_its_stop_its_evals_and_an_objective_with_its_interval(tmp_path) -> None:
    text = log_of()
    reader = MllogReader()
    reader.feed(text.encode())
    run = reader.run()
    stop = run.reached(0.925)
    (one,) = played(tmp_path, text)
    assert list(one) == KEYS
    assert one["log"] == str(tmp_path / "0.log")
    assert one["reached"] is True
    assert one["stop_seconds"] == stop.seconds
    assert one["evals"] == [list(e) for e in run.evals]
    assert one["low"] <= one["objective_seconds"] <= one["high"]
    assert one["verdicts"] == []


def test_the_logs_of_a_sweep_get_the_verdicts_that_the_sweep_gave(tmp_path) -> None:
    study = tmp_path / "wide.toml"
    text = (STUDIES / "simulated_h100.toml").read_text(encoding="utf-8")
    for old, new in (('"grey_box"', '"random"'), ("parallel = 8", "parallel = 1"), ("low = 1e-5", "low = 2e-4"),
                     ("node_hours = 15", "trials = 9"), ("gbs = [8, 16, 32]", "gbs = [8]")):  # fmt: skip
        assert old in text
        text = text.replace(old, new)
    study.write_text(text, encoding="utf-8")
    folder = tmp_path / "sweep"
    done = CliRunner().invoke(sweep, ["--study", str(study), "--output", str(folder), "--quiet"])
    assert done.exit_code == 0, done.output
    trials = recorded(folder / "sweep.db", "wide").trials
    logs = [next(folder.glob(f"trials/{number:04d}*/**/*.log")) for number in sorted(trials)]
    objects = [json.loads(line) for line in replay("--json", *logs, study=study).stdout.splitlines()]
    stopped = {n for n, t in trials.items() if t.verdict in (Verdict.PRUNED, Verdict.CAPPED)}
    assert stopped, "the sweep stopped nothing: make its space wider"
    for number, one in enumerate(objects):
        trial = trials[number]
        assert one["reached"] is (trial.verdict is Verdict.REACHED)
        if number in stopped:
            assert (one["verdicts"][0]["kind"], one["verdicts"][0]["sentence"]) == (trial.verdict, trial.sentence)
        if one["reached"]:
            assert one["objective_seconds"] == pytest.approx(trial.metrics.objective)


def test_a_much_slower_run_is_capped_by_the_one_before_it_and_not_by_another_machines(tmp_path) -> None:
    slow = _stretched(log_of(2), 3.0)
    (_, capped) = played(tmp_path, log_of(), slow)
    assert kinds(capped) == ["capped"]
    assert capped["reached"] is True
    assert "saved" in replay(tmp_path / "0.log", tmp_path / "1.log").output
    elsewhere = _announcing("submission_platform", '"64xGB200"') + log_of()
    assert kinds(played(tmp_path, elsewhere, slow)[1]) == []


def test_result_files_that_name_nobody_are_one_sweep_a_folder(tmp_path) -> None:
    """As many submissions are published: SUBMISSION_PLATFORM_PLACEHOLDER in the logs of different machines."""
    nobody = _announcing("submission_platform", '"1xSUBMISSION_PLATFORM_PLACEHOLDER"')
    slow = _stretched(log_of(2), 3.0)
    for place, text in (("one/result_0.txt", log_of()), ("one/result_1.txt", slow), ("other/result_0.txt", slow)):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text(nobody + text, encoding="utf-8")
    shown = replay("--json", tmp_path / "one", tmp_path / "other").stdout.splitlines()
    assert [kinds(json.loads(line)) for line in shown] == [[], ["capped"], []]


def test_another_benchmarks_times_on_the_same_machine_cap_nothing(tmp_path) -> None:
    other = _stretched(log_of(2), 3.0).replace('"value": "llama2_70b_lora"', '"value": "llama31_8b"')
    for loss in (evals := re.findall(r'"eval_accuracy", "value": ([\d.]+)', other)):
        other = other.replace(f'"value": {loss}', f'"value": {3.2 if loss == evals[-1] else 3.6}')  # its target is 3.3
    of_lora, of_the_other = played(tmp_path, log_of(), other)
    assert [one["reached"] for one in (of_lora, of_the_other)] == [True, True]
    assert kinds(of_the_other) == []


def test_a_run_that_was_pruned_and_would_have_reached_the_target_is_called_a_loss(tmp_path) -> None:
    first, second = re.findall(r'"eval_accuracy", "value": ([\d.]+)', log_of())[1:3]
    (tmp_path / "a.log").write_text(log_of().replace(first, "NaN").replace(second, "NaN"), encoding="utf-8")
    result = replay(tmp_path / "a.log")
    assert result.exit_code == 0, result.output
    assert re.search(r"pruned at \d+ s: diverged", result.output)
    assert "LOST: eval loss" in result.output
    assert result.output.endswith("1 pruned (a loss)\n")


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "infeasible"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.", "failed"),
        ("File \"train.py\", line 3\nModuleNotFoundError: No module named 'nemo'", "failed"),
    ],
)
def test_an_aborted_log_ends_with_its_diagnosis(tmp_path, line: str, kind: str) -> None:
    begun = "".join(log_of().splitlines(keepends=True)[:20])
    (one,) = played(tmp_path, begun + line + "\n")
    assert one["reached"] is False
    assert one["objective_seconds"] is None
    assert kinds(one) == [kind]
    assert line.splitlines()[-1] in one["verdicts"][0]["sentence"]


def test_a_log_that_was_cut_after_some_evals_ended_before_the_target_and_did_not_fail(tmp_path) -> None:
    lines = log_of().splitlines(keepends=True)
    evals = [n for n, line in enumerate(lines) if '"eval_accuracy"' in line]
    (one,) = played(tmp_path, "".join(lines[: evals[1] + 1]))
    assert (one["reached"], len(one["evals"]), one["verdicts"]) == (False, 2, [])


def test_facts_that_the_study_leaves_open_are_the_logs(tmp_path) -> None:
    (tmp_path / "a.log").write_text("fp4: true\n  healing_iter: 350\n" + log_of(), encoding="utf-8")
    result = replay(tmp_path / "a.log")
    for fact in ("GBS 8", "MAX_STEPS 800", "LR 0.0004", "FP4 True", "HEALING_ITER 350"):
        assert fact in result.output


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (b" 0:   fp4: true\n 0:   healing_iter: 350\n", {"fp4": True, "healing_iter": 350}),
        (b"+ export FP4=False\n+ export HEALING_ITER=0\n", {"fp4": False, "healing_iter": 0}),
        (b'{"max_steps" : 800, "global_batch_size": 16}', {"max_steps": 800, "global_batch_size": 16}),
        (b"declare -x HEALING_ITER=\"340\"\nFP4='true'", {"healing_iter": 340, "fp4": True}),
        (b"fp4='e2m1' fp4_recipe: nvfp4 healing_iter: null nofp4: true", {}),
        (b"max_steps = 900\nmax_steps: 800\nmax_steps: 1", {"max_steps": 800}),
    ],
)
def test_printed_configurations_are_read_in_any_form(text: bytes, values: dict) -> None:
    """The last value counts, as a shell's trace has it, and none at the end of a piece, which may be cut there."""
    assert Announced(printed_settings(text)) == values


def test_a_log_whose_clock_ran_backwards_is_no_result(tmp_path) -> None:
    lines = log_of().splitlines(keepends=True)
    late = next(n for n, line in enumerate(lines) if '"eval_accuracy"' in line)
    lines[late] = re.sub(r'"time_ms": 17', '"time_ms": 18', lines[late])
    (one,) = played(tmp_path, "".join(lines))
    assert kinds(one) == ["failed"]
    assert "clock" in one["verdicts"][0]["sentence"]
    assert one["objective_seconds"] is None


@pytest.mark.parametrize(
    ("name", "evals", "stop"),
    [
        ("llama31_8b", [4.1, 3.6, 3.31, 3.29], 3),  # to 3.3
        ("retinanet", [0.21, 0.30, 0.33, 0.35], 3),  # rises to 0.34
        ("nobody's own", [0.97, 0.94, 0.93, 0.91], 2),  # its log says 0.935
    ],
)
def test_a_log_of_another_benchmark_is_measured_by_that_ones_metric(
    tmp_path, name: str, evals: list, stop: int
) -> None:
    text = log_of().replace('"value": "llama2_70b_lora"', f'"value": "{name}"')
    printed = re.findall(r'"eval_accuracy", "value": ([\d.]+)', text)
    for old, new in zip(printed, [*evals, *evals[-1:] * 9], strict=False):
        text = text.replace(f'"value": {old}', f'"value": {new}')
    text = text.replace("\n", "\n" + _announcing("target_accuracy", "0.935"), 1) if "own" in name else text
    (one,) = played(tmp_path, text)
    assert [loss for _, loss, _ in one["evals"]][:4] == evals
    assert one["stop_seconds"] == one["evals"][stop][2]
    assert one["low"] <= one["objective_seconds"] <= one["high"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (r'"eval_accuracy", "value": [\d.]+(.*)', r'"eval_accuracy", "value": -Infinity\1'),
        (r'"time_ms": \d+', '"time_ms": 0'),
    ],
    ids=["no loss can be that", "no clock"],
)
def test_what_a_sweep_would_not_believe_is_no_result(tmp_path, change: str, words: str) -> None:
    """An infinite loss reached the target; a run of no time ended in an error."""
    (one,) = played(tmp_path, re.sub(change, words, log_of()))
    assert (one["objective_seconds"], kinds(one)) == (None, ["failed"])


def test_a_training_that_only_the_target_ends_is_played(tmp_path) -> None:
    text = log_of().replace(
        '"opt_learning_rate_training_steps", "value": 800', '"opt_learning_rate_training_steps", "value": -1'
    )
    (one,) = played(tmp_path, text)
    assert one["reached"] is True


def test_compressed_cut_and_empty_files_folders_and_names_that_are_not_there(tmp_path) -> None:
    packed = gzip.compress(log_of().encode())
    (tmp_path / "whole.gz").write_bytes(packed)
    (tmp_path / "cut.txt").write_bytes(packed[: len(packed) // 2])  # by its bytes, not by its name
    (tmp_path / "empty.log").write_bytes(b"")
    result = replay("--json", tmp_path)
    objects = [json.loads(line) for line in result.stdout.splitlines()]
    assert [Path(one["log"]).name for one in objects] == ["cut.txt", "empty.log", "whole.gz"]
    assert [one["reached"] for one in objects] == [False, False, True]
    assert "cut.txt: cannot be read" in result.stderr
    assert kinds(objects[1]) == ["failed"]
    (tmp_path / "broken.gz").write_bytes(b"\x1f\x8bnonsense")
    broken = replay("--json", tmp_path / "broken.gz")
    assert broken.exit_code == 4
    (one,) = [json.loads(line) for line in broken.stdout.splitlines()]
    assert (one["reached"], one["evals"], kinds(one)) == (False, [], ["failed"])
    assert "cannot be read" in one["verdicts"][0]["sentence"]
    missing = replay(tmp_path / "whole.gz", tmp_path / "nowhere.log")
    assert missing.exit_code == 2
    assert "nowhere.log: there is no such file" in missing.stderr


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_no_log_whatever_it_holds_ends_in_a_traceback(data) -> None:
    text = log_of().encode()
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(st.binary(max_size=40)) + text[at + data.draw(st.integers(0, 3000)) :]
    one = as_object("x.log", Replay(H100, lambda parameters: MllogReader()).play(text))
    assert list(one) == KEYS
    numbers = [one["stop_seconds"], one["objective_seconds"], *(x for e in one["evals"] for x in e)]
    assert all(x is None or math.isfinite(x) for x in numbers)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.text(alphabet="ab \n", max_size=9)), max_size=30))
@settings(deadline=None)
def test_ticks_are_the_whole_log_in_pieces_of_a_second_by_its_stamps(rows) -> None:
    at, text = 1_700_000_000_000, ""
    for step, noise in rows:
        at += step
        text += f'{noise}\n0: :::MLLOG {{"namespace": "", "time_ms": {at}, "key": "x"}}\n'
    pieces = list(ticks(text.encode()))
    assert b"".join(pieces) == text.encode()
    for piece in pieces:
        stamps = [int(part.split(b",")[0]) for part in piece.split(b'"time_ms": ')[1:]]
        assert not stamps or max(stamps) - min(stamps) < TICK_MS


def _announcing(key: str, value: str) -> str:
    """A hyperparameter in front of a log, as the training announces it."""
    first = log_of().splitlines()[1]
    stamp = first[: first.index('"key"')]
    return f'{stamp}"key": "{key}", "value": {value}, "metadata": {{"file": "x", "lineno": 1}}}}\n'


def _stretched(text: str, factor: float) -> str:
    """The same run on a machine ``factor`` times as slow."""
    begin = int(re.search(r'"time_ms": (\d+)', text)[1])
    return re.sub(r'"time_ms": (\d+)', lambda m: f'"time_ms": {begin + round(factor * (int(m[1]) - begin))}', text)


class CountingReader(MllogReader):
    """A reader that counts the runs that are made of it."""

    made = 0

    def run(self) -> RunLog:
        CountingReader.made += 1
        return super().run()


def test_a_log_with_an_eval_at_every_step_is_judged_at_a_share_of_them_and_still_stopped(monkeypatch) -> None:
    monkeypatch.setattr(follower, "EACH", 50)
    rows = [("run_start", None, {})]
    rows += [("eval_accuracy", 1.0 if i < 600 else math.nan, {"samples_count": 8 * i}) for i in range(1, 1000)]
    log = "".join(
        f':::MLLOG {{"time_ms": {1_700_000_000_000 + 1000 * at}, "event_type": "POINT_IN_TIME", "key": "{key}", '
        f'"value": {json.dumps(value)}, "metadata": {json.dumps(more)}}}\n'
        for at, (key, value, more) in enumerate(rows)
    )
    CountingReader.made = 0
    shown = Replay(load_study(STUDIES / "h100.toml"), lambda _: CountingReader()).play(log.encode())
    assert CountingReader.made < 50 + 50 / follower.LATER * math.log(1000 / 50) + 20, "three seconds for each fifty"
    assert len(shown.run.evals) == 999
    assert [v.kind for v in shown.verdicts] == ["pruned"]
    assert 600 / 0.9 <= shown.verdicts[0].at_seconds <= 600 / 0.9 + follower.LATER * 667 / 50 + 2
