"""``python -m lora_tune.score``: a result folder as MLPerf's own tools see it, whatever lies in it."""

from __future__ import annotations

import gzip
import io
import json
import logging
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from mlperf_logging.compliance_checker.mlp_parser.ruleset_610 import parse_generator
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker
from mlperf_logging.result_summarizer import result_summarizer

from lora_tune.cli.confirm_outcome import check
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.log_check import parse, records
from lora_tune.mlperf.submission import olympic_of, passes, read_submission, result_folders
from lora_tune.score import main
from tests.mlperf.logs import result_folder, run_log

LORA = read_benchmark("llama2_70b_lora", "6.1")
KEYS = ["folder", "score_minutes", "olympic_minutes", "factor", "passes", "compliant", "sentences"]


def score(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments], catch_exceptions=False)


def ten(folder: Path, *, samples: float = 3456, batch: int = 8) -> Path:
    logs = [
        run_log(LORA, {"global_batch_size": batch, "seed": i}, seconds=1500 + i, progress=samples) for i in range(10)
    ]
    return result_folder(folder, logs)


def test_a_compliant_submission_is_scored(tmp_path: Path) -> None:
    shown = score("--json", ten(tmp_path / "ten"))
    found = json.loads(shown.output)
    assert shown.exit_code == 0
    assert list(found) == KEYS
    assert found["olympic_minutes"] == pytest.approx(1504.5 / 60)
    assert (found["factor"], found["passes"], found["compliant"]) == (1.0, True, True)
    assert found["score_minutes"] == found["olympic_minutes"]
    assert not any("refused" in sentence for sentence in found["sentences"])


def test_converging_faster_than_the_reference_is_taken_back(tmp_path: Path) -> None:
    found = json.loads(score("--json", ten(tmp_path / "ten", samples=3072)).output)
    assert found["factor"] == pytest.approx(3178.6667 / 3072)
    assert found["score_minutes"] == pytest.approx(found["olympic_minutes"] * found["factor"])
    assert "because it converges faster than the reference" in found["sentences"][0]


def test_converging_much_faster_is_refused(tmp_path: Path) -> None:
    found = json.loads(score("--json", ten(tmp_path / "ten", samples=2688)).output)
    assert not found["passes"]
    assert (
        "refused: the RCP check fails: RCP found; the runs converge 1.183 times as fast as the reference"
        in found["sentences"]
    )


def test_one_run_may_fail_and_two_may_not(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    unconverged = [run_log(LORA, {"global_batch_size": 8, "seed": i}, loss=0.93) for i in range(2)]
    (folder / "result_0.txt").write_text(unconverged[0])
    one = json.loads(score("--json", folder).output)
    assert one["compliant"]
    assert one["passes"]
    assert one["olympic_minutes"] == pytest.approx(sum(1502 + i for i in range(8)) / 8 / 60)
    (folder / "result_1.txt").write_text(unconverged[1])
    two = json.loads(score("--json", folder).output)
    assert (two["score_minutes"], two["passes"], two["compliant"]) == (None, False, False)


def test_the_complaint_names_the_files_and_the_rule(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    for number in (2, 5):
        log = folder / f"result_{number}.txt"
        log.write_text(log.read_text().replace('"lora_rank", "value": 16', '"lora_rank", "value": 8'))
    found = json.loads(score("--json", folder).output)
    assert not found["compliant"]
    assert any("result_2.txt, result_5.txt: CHECK for 'lora_rank'" in s for s in found["sentences"])
    assert "refused: 2 files do not comply, 1 of a submission may" in found["sentences"]


def test_too_few_files_are_refused(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_9.txt").unlink()
    found = json.loads(score("--json", folder).output)
    assert "refused: llama2_70b_lora needs 10 result files, 9 are there" in found["sentences"]


@pytest.mark.parametrize("runs", [1, 2])
def test_one_run_or_two_are_too_few_for_the_rcp_check_and_every_number_is_one(runs: int, tmp_path: Path) -> None:
    logs = [run_log(LORA, {"global_batch_size": 8, "seed": i}) for i in range(runs)]
    text = score("--json", result_folder(tmp_path / "few", logs)).output
    assert "NaN" not in text
    found = json.loads(text)
    assert (found["factor"], found["passes"]) == (1.0, False)
    why = f"too few runs for the RCP check: {runs} of the 10 that the rules ask for"
    assert f"RCP check FAILED: {why}, factor 1.0000" in found["sentences"]
    assert f"refused: the RCP check fails: {why}" in found["sentences"]


def test_runs_that_needed_no_samples_have_no_factor(tmp_path: Path) -> None:
    text = score("--json", ten(tmp_path / "ten", samples=0)).output
    assert "Infinity" not in text
    assert json.loads(text)["factor"] == 1.0
    assert "refused: the RCP check fails: RCP found, but the runs' mean convergence is 0" in text


def test_gzipped_logs_and_odd_folder_names_are_read_and_nothing_is_written(tmp_path: Path) -> None:
    plain = ten(tmp_path / "plain")
    odd = tmp_path / "odd [1] *? name"
    odd.mkdir()
    for log in plain.iterdir():
        (odd / f"{log.name}.gz").write_bytes(gzip.compress(log.read_bytes()))
    handlers = logging.getLogger().handlers[:]
    ours, same = read_submission(odd), read_submission(plain)
    assert (ours.score_minutes, ours.convergence) == (same.score_minutes, same.convergence)
    assert sorted(p.name for p in odd.iterdir()) == [f"result_{i}.txt.gz" for i in range(10)]
    assert logging.getLogger().handlers == handlers


def test_several_folders_stand_side_by_side(tmp_path: Path) -> None:
    ten(tmp_path / "results" / "a" / "llama2_70b_lora")
    ten(tmp_path / "results" / "b" / "llama2_70b_lora", samples=2688)
    shown = score(tmp_path / "results")
    heading, first, second, *_ = shown.output.splitlines()
    assert heading.split()[:2] == ["folder", "benchmark"]
    assert first.split()[-1] == "ok"
    assert second.split()[-1] == "REFUSED"
    assert len(score("--json", tmp_path / "results").output.splitlines()) == 2


def test_without_a_ruleset_the_newest_is_taken_and_an_older_one_that_fits_is_named(tmp_path: Path) -> None:
    older = read_benchmark("llama2_70b_lora", "5.1")
    folder = result_folder(tmp_path / "old", [run_log(older, {"global_batch_size": 8})] * 10)
    newest = json.loads(score("--json", folder).output)
    assert not newest["compliant"]
    assert any("comply with 6.0.0" in s or "comply with 5.1.0" in s for s in newest["sentences"])
    assert json.loads(score("--json", "--ruleset", "v5.1", folder).output)["compliant"]


def test_a_folder_without_results_ends_with_2_and_the_others_are_scored(tmp_path: Path) -> None:
    good, empty = ten(tmp_path / "good"), tmp_path / "empty"
    empty.mkdir()
    shown = score("--json", empty, tmp_path / "absent", good)
    lines = [json.loads(line) for line in shown.output.splitlines()]
    assert shown.exit_code == 2
    assert [line["score_minutes"] is None for line in lines] == [True, True, False]
    assert "holds no result_*.txt" in lines[0]["sentences"][0]
    assert all(list(line) == KEYS for line in lines)


def test_an_unknown_ruleset_is_the_users_error(tmp_path: Path) -> None:
    shown = score("--ruleset", "4711", tmp_path)
    assert shown.exit_code == 2
    assert "ruleset '4711' is not in the installed mlperf_logging" in shown.output


def sentences_of(folder: Path) -> list[str]:
    return list(json.loads(score("--json", folder).output)["sentences"])


def test_the_verdict_is_the_same_where_the_caller_has_switched_logging_off(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_7.txt").write_text((folder / "result_3.txt").read_text())
    heard = read_submission(folder)
    logging.disable(logging.CRITICAL)
    try:
        assert read_submission(folder) == heard
    finally:
        logging.disable(logging.NOTSET)


def test_a_run_that_is_there_twice_fails_the_seed_check_by_the_checkers_own_words(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_7.txt").write_text((folder / "result_3.txt").read_text())
    assert (
        "refused: the seed check fails: Result file result_7.txt logs seed 3 on t.py:1. However, result file "
        "result_3.txt already logs the same seed on the same line" in sentences_of(folder)
    )
    assert score(folder).output.splitlines()[1].split()[-1] == "REFUSED"


def test_two_benchmarks_in_one_folder_are_named_and_have_no_score(tmp_path: Path) -> None:
    folder, other = ten(tmp_path / "two"), read_benchmark("llama31_8b", "6.1")
    for number in (0, 1):
        (folder / f"result_{number}.txt").write_text(run_log(other, {"global_batch_size": 8, "seed": number}))
    found = json.loads(score("--json", folder).output)
    assert found["score_minutes"] is None
    assert found["sentences"][0] == "no score: the logs are not of one benchmark"
    assert (
        "refused: the runs differ in submission_benchmark: llama31_8b (result_0.txt, result_1.txt), "
        "llama2_70b_lora (8 files)" in found["sentences"]
    )


def test_files_of_another_name_are_named_as_not_read(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_2.txt").rename(folder / "RESULT_2.TXT")
    (folder / "result_3.txt").rename(folder / "run_3.log")
    (folder / "notes.md").write_text("8 x B300")
    assert "not read: RESULT_2.TXT, run_3.log; a run counts as result_N.txt alone" in sentences_of(folder)


def test_an_empty_log_is_said_in_one_sentence(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_5.txt").write_text("")
    about = [s for s in sentences_of(folder) if s.startswith("result_5.txt")]
    assert about == ["result_5.txt: holds no :::MLLOG line, so that nothing in it counts"]


def test_logs_of_two_rounds_are_told_apart_and_the_round_of_all_is_named(tmp_path: Path) -> None:
    folder, older = ten(tmp_path / "ten"), read_benchmark("llama2_70b_lora", "5.1")
    for number in (8, 9):
        (folder / f"result_{number}.txt").write_text(run_log(older, {"global_batch_size": 8, "seed": number}))
    said = sentences_of(folder)
    assert "10 result files, 2 of them do not comply with 6.1.0" in said
    assert any(s.startswith("result_8.txt, result_9.txt: Required EXACTLY_ONE occurrence of 'config_f") for s in said)
    assert "the files comply with 6.0.0: --ruleset 6.0.0 scores them by that round" in said


def test_in_the_open_division_nothing_is_checked_against_the_reference(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten", samples=2688)
    for log in folder.iterdir():
        log.write_text(log.read_text().replace('"closed"', '"open"'))
    found = json.loads(score("--json", folder).output)
    assert found["score_minutes"] == found["olympic_minutes"]
    assert "open division: convergence and seeds are not checked, and nothing is scaled" in found["sentences"]
    assert not any(s.startswith("refused") for s in found["sentences"])


def test_runs_that_differ_in_batch_size_are_no_submission_in_the_open_division_either(tmp_path: Path) -> None:
    logs = [run_log(LORA, {"global_batch_size": 8 if i % 2 else 16, "seed": i}, seconds=1500 + i) for i in range(10)]
    folder = result_folder(tmp_path / "ten", [log.replace('"closed"', '"open"') for log in logs])
    assert "refused: the runs differ in global_batch_size: 16 (5 files), 8 (5 files)" in sentences_of(folder)
    assert score(folder).output.splitlines()[1].split()[-1] == "REFUSED"
    assert not check(folder).passes


def test_what_the_package_checker_refuses_score_refuses(tmp_path: Path) -> None:
    """The seed check is the package checker's own, on the same files."""
    folder = ten(tmp_path / "ten")
    assert SeedChecker("6.1.0").check_seeds([str(p) for p in folder.iterdir()])
    assert passes(read_submission(folder))
    log = folder / "result_0.txt"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"seed"' not in line))
    assert not SeedChecker("6.1.0").check_seeds([str(p) for p in folder.iterdir()])
    assert "refused: the seed check fails: Result file result_0.txt logs no seed" in sentences_of(folder)
    assert not passes(read_submission(folder))


STRANGE = {
    "empty": "",
    "no log": "nothing to see\n",
    "binary": "\x00\x01\xff" * 100,
    "cut": ':::MLLOG {"namespace": "", "time_ms": 1',
    "no metadata": ':::MLLOG {"time_ms": 1, "key": "run_start", "value": 1}',
    "a list": ":::MLLOG [1, 2]",
    "nested": ":::MLLOG " + "[" * 100_000,
    "another benchmark": run_log(LORA, {"global_batch_size": 8}).replace("llama2_70b_lora", "no_such_benchmark"),
    "a path": run_log(LORA, {"global_batch_size": 8}).replace('"llama2_70b_lora"', '"../../../../tmp/x"'),
    "a division that is a path": run_log(LORA, {"global_batch_size": 8}).replace('"closed"', '"../../tmp/x"'),
    "a number for a name": run_log(LORA, {"global_batch_size": 8}).replace('"llama2_70b_lora"', "7"),
    "no batch": run_log(LORA, {"global_batch_size": 8}).replace("global_batch_size", "batch"),
    "text for a batch": run_log(LORA, {"global_batch_size": "eight"}),
    "null loss": run_log(LORA, {"global_batch_size": 8}).replace(': 0.925', ': null'),
    "epochs of text": run_log(LORA, {"global_batch_size": 8}).replace('"samples_count": 3456', '"samples_count": "x"'),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_strange_logs_get_a_verdict_and_never_a_traceback(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    for number in range(3):
        (folder / f"result_{number}.txt").write_text(STRANGE[name], encoding="latin-1")
    found = json.loads(score("--json", folder).output)
    assert list(found) == KEYS
    assert not (found["passes"] and found["compliant"])
    assert any(s.startswith("refused") for s in found["sentences"])


@given(st.lists(st.text(alphabet=':MLOG {}"[]a1\\\n\r', max_size=40).map(lambda t: f"x:::MLLOG {t}\n"), max_size=5))
def test_records_are_cut_and_parsed_as_the_packages_parser_does(lines: list[str]) -> None:
    text = "".join(lines)
    ours = parse(io.StringIO(text), "6.1.0")
    try:
        theirs, failed = parse_generator(io.StringIO(text))
    except (KeyError, TypeError):  # it ends where a record is no record; ours says so
        theirs, failed = [], [""]
    assert list(ours.lines) == theirs
    assert len(ours.errors) == len(failed)
    assert parse(records(io.StringIO(text)), "6.1.0") == ours, "whether a log is kept whole or as its records"


def test_a_broken_archive_and_a_folder_of_that_name_count_as_files_that_do_not_comply(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_0.txt").unlink()
    (folder / "result_0.txt.gz").write_bytes(b"\x1f\x8b nothing")
    found = json.loads(score("--json", folder).output)
    assert found["compliant"]
    assert "refused: the seed check fails: Result file result_0.txt logs no seed" in found["sentences"]
    (folder / "result_1.txt").unlink()
    (folder / "result_1.txt").mkdir()
    assert not json.loads(score("--json", folder).output)["compliant"]


def test_a_pipe_of_that_name_is_a_file_that_cannot_be_read_and_holds_nothing_up(tmp_path: Path) -> None:
    folder = ten(tmp_path / "ten")
    (folder / "result_1.txt").unlink()
    os.mkfifo(folder / "result_1.txt")
    assert "result_1.txt cannot be read: not a regular file" in score(folder).output


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=12), st.integers(0, 2))
def test_the_olympic_mean_is_the_summarizers_to_the_last_digit(minutes: list[float], failed: int) -> None:
    theirs = result_summarizer._compute_olympic_average(list(minutes), failed, 1) if failed <= 1 else None
    assert olympic_of(minutes, failed) == theirs


CHOSEN = (
    "v5.0/ASUSTeK/ESC_N8_E11/bert",
    "v5.0/ASUSTeK/ESC_N8_E11/retinanet",
    "v5.0/ASUSTeK/ESC_N8_E11/dlrm_dcnv2",
    "v5.0/ASUSTeK/ESC_N8_E11_n2/rgat",
    "v5.0/Dell/16xXE9712x4GB200/stable_diffusion",
    "v5.0/IBM+CoreWeave+NVIDIA/carina_ngpu1024_ngc25.04_nemo/llama31_405b",
    "v5.1/AMD/MI355X_EPYC_9575F_pytorch/llama31_8b",
    "v5.1/NVIDIA/theia_ngpu72_ngc25.09_nemo/flux1",
    "v5.1/Nebius/nebius_b200_n2/llama2_70b_lora",
)
"""A public submission of each benchmark; python -m benchmarks.score_agreement compares all."""


@pytest.mark.public_data
@pytest.mark.parametrize("name", CHOSEN)
def test_public_submissions_score_as_mlperf_scores_them(name: str, public_data: Path, tmp_path: Path) -> None:
    folder = public_data / "more_logs" / name
    for log in folder.glob("*.gz"):
        (tmp_path / log.stem).write_bytes(gzip.decompress(log.read_bytes()))
    ruleset = name[1:4] + ".0"
    ours = read_submission(folder, ruleset)
    theirs = result_summarizer._compute_strong_score_standalone(
        ours.benchmark, "", False, str(tmp_path), "training", ruleset
    )[0]
    passes, _, factor = rcp_checker.check_directory(
        str(tmp_path), "training", ruleset, False, False, rcp_pass="pruned_rcps"
    )
    assert (ours.olympic_minutes, ours.factor, ours.convergence.passes) == (theirs, factor, passes)


def test_confirm_says_of_its_result_folder_what_score_says(tmp_path: Path) -> None:
    found = check(ten(tmp_path / "ten"))
    assert (found.applies, found.passes) == (True, True)
    assert "10 result files, all comply with 6.1.0" in found.sentences
    other = result_folder(tmp_path / "other", [run_log(LORA, {"submission_benchmark": "mine", "global_batch_size": 8})])
    assert not check(other).applies
    assert "the logs name the benchmark mine" in check(other).sentences[0]


def test_linked_systems_are_found_and_hidden_folders_are_left_out(tmp_path: Path) -> None:
    for name in ("scratch/B300/llama2_70b_lora", "package/.ipynb_checkpoints", "package/H200/llama2_70b_lora"):
        ten(tmp_path / name)
    package = tmp_path / "package"
    for name in ("B300", "B300_again"):
        (package / name).symlink_to(tmp_path / "scratch" / "B300")
    (tmp_path / "scratch" / "B300" / "up").symlink_to(package)
    assert result_folders(package) == [package / s / "llama2_70b_lora" for s in ("B300", "B300_again", "H200")]
