"""``lora-tune package``: confirmed runs become a tree that MLPerf's own checkers accept, and no log is changed."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.package import (
    FIELDS,
    check_description,
    counted,
    described_by_logs,
    described_by_machine,
    remedy,
    template,
    tree,
)
from lora_tune.package import main
from tests.mlperf.logs import result_folder, run_log

LORA = read_benchmark("llama2_70b_lora", "5.1")
SAID = {"submission_org": "lora_tune", "submission_division": "closed", "submission_status": "onprem"}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Ten good runs, an implementation with an exported config, and a filled-in system description."""
    runs(tmp_path, 10)
    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / ".git" / "HEAD").write_text("ref")
    (code / "run.sub").write_text("#!/bin/bash\n")
    (tmp_path / "config_DGXH100.sh").write_text("export LR=4e-4\n")
    (tmp_path / "DGXH100.json").write_text(json.dumps(filled()))
    return tmp_path


def runs(folder: Path, count: int, *, samples: float = 3456) -> Path:
    logs = [
        run_log(LORA, {"global_batch_size": 8, "seed": i}, seconds=1500 + i, progress=samples) for i in range(count)
    ]
    return result_folder(folder / "results", logs)


def filled(**changed: object) -> dict[str, object]:
    known = template({**described_by_logs(SAID), "submitter": "lora_tune"})
    return {**{field: value or "1" for field, value in known.items()}, **changed}


def package(place: Path, *more: str) -> Result:
    arguments = [
        str(place / "results"), "--system", str(place / "DGXH100.json"), "--code", str(place / "code"),
        "--config", str(place / "config_DGXH100.sh"), "--out", str(place / "out"), "--ruleset", "5.1", *more,
    ]  # fmt: skip
    return CliRunner().invoke(main, arguments, catch_exceptions=False)


@pytest.mark.long
def test_mlperfs_checkers_accept_the_package_of_ten_good_runs(place: Path) -> None:
    done = package(place)
    assert done.exit_code == 0, done.output
    assert "package_checker  accepts it" in done.output
    assert "repo_checker     accepts it" in done.output
    assert "score 25.075 min under 5.1.0" in done.output
    top = place / "out" / "lora_tune"
    for i in range(10):
        copy = top / "results" / "DGXH100" / "llama2_70b_lora" / f"result_{i}.txt"
        assert copy.read_text() == (place / "results" / f"result_{i}.txt").read_text()
    code = top / "benchmarks" / "llama2_70b_lora" / "implementations" / "code"
    assert {p.name for p in code.iterdir()} == {"run.sub", "config_DGXH100.sh", "REPRODUCE.md"}
    assert package(place).output == done.output, "what the checkers wrote beside the results is no other package"
    (place / "code" / "run.sub").write_text("#!/bin/bash\n# changed since\n")
    again = package(place)
    assert again.exit_code == 2
    changed = "lora_tune/benchmarks/llama2_70b_lora/implementations/code/run.sub"
    assert f"out: exists, and {changed} is another there; name another --out" in again.output


def test_a_package_that_was_killed_on_the_way_is_made_by_the_same_command(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the tree is moved to its place there is nothing, after that the whole; either way it is run again."""
    monkeypatch.setattr("lora_tune.cli.package.CHECKERS", ())
    with monkeypatch.context() as killed:
        killed.setattr("shutil.move", Mock(side_effect=KeyboardInterrupt))
        assert package(place).exit_code != 0
    assert not (place / "out").exists()
    with monkeypatch.context() as killed:
        killed.setattr("lora_tune.cli.package._judge", Mock(side_effect=KeyboardInterrupt))
        assert package(place).exit_code != 0
    made = {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")}
    assert package(place).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (place / "out").rglob("*")} == made


def test_a_gzipped_log_is_unpacked_and_nothing_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that are no text stay what they are; a checker that hangs is a refusal in a line, not a traceback."""
    first = place / "results" / "result_0.txt"
    log = first.read_bytes() + b"\xff a line of a progress bar\n"
    (place / "results" / "result_0.txt.gz").write_bytes(gzip.compress(log))
    first.unlink()
    monkeypatch.setattr("lora_tune.cli.package.CHECKER_SECONDS", 0.01)
    done = package(place)
    assert done.exit_code == 2
    assert "did not end within 0.01 s; run it by hand: " in done.output
    copy = place / "out" / "lora_tune" / "results" / "DGXH100" / "llama2_70b_lora" / "result_0.txt"
    assert copy.read_bytes() == log


@pytest.mark.long
def test_what_a_checker_finds_is_printed_and_ends_with_2(place: Path) -> None:
    """Runs that pass the reference far too early are refused by the RCP checker, and nothing is repaired."""
    runs(place, 10, samples=768)
    done = package(place)
    assert done.exit_code == 2
    assert "package_checker  REFUSES it" in done.output
    assert re.search(r"RCP Test Failed.*\n    -> the runs converge too fast", done.output)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ruleset", "batch"),
    [("llama31_8b", "5.1", 32), ("gpt_oss_20b", "6.0", 16), ("gpt_oss_20b", "6.1", 16), ("llama2_70b_lora", "6.1", 8)],
)
def test_the_checkers_accept_each_benchmark_of_each_round(place: Path, name: str, ruleset: str, batch: int) -> None:
    benchmark = read_benchmark(name, ruleset)
    reference = benchmark.reference(batch)
    assert reference is not None
    schedule = benchmark.eval_schedule(batch)
    step = schedule.interval_samples if schedule else 1
    needed = step * -(-reference.mean // step)
    logs = [run_log(benchmark, {"global_batch_size": batch, "seed": i}, seconds=6000 + i, progress=needed)
            for i in range(benchmark.runs)]  # fmt: skip
    for old in (place / "results").iterdir():
        old.unlink()
    result_folder(place / "results", logs)
    done = package(place, "--ruleset", ruleset)
    assert "repo_checker     accepts it" in done.output, done.output
    assert "package_checker  accepts it" in done.output, done.output
    assert done.exit_code == 0


def test_the_chance_is_said_before_all_runs_are_there_and_nothing_is_written(place: Path) -> None:
    for number in (7, 8, 9):
        (place / "results" / f"result_{number}.txt").unlink()
    done = package(place, "--dry-run")
    assert done.exit_code == 0, done.output
    assert not (place / "out").exists()
    first, against, lacking, more = done.output.splitlines()
    assert first.startswith("a submission would score 25.")
    assert first.endswith("judged from 7 runs")
    assert "the runs converge at 3456, the reference at 3" in against
    assert lacking == "3 more of 10 runs are needed: 1.25 node-hours"
    assert more.startswith("a further node-hour is 2 runs: the 90% interval, 0.")
    before, after = re.findall(r"\d+\.\d\d", more)
    assert float(after) <= float(before)


def test_what_another_submitter_s_hyperparameters_would_give_is_said_from_their_logs(place: Path) -> None:
    """Their convergence at this machine's pace: a tenth fewer samples take about a tenth less time."""
    logs = [run_log(LORA, {"global_batch_size": 8, "seed": i}, seconds=600, progress=3072 + 0 * i) for i in range(10)]
    other = result_folder(place / "theirs", logs)
    done = package(place, "--dry-run", "--borrow", str(other))
    words = next(line for line in done.output.splitlines() if "theirs" in line)
    assert "(10 runs) at this machine's pace: 2" in words
    assert "-" in words.split("), ")[1].split("%")[0]
    small = result_folder(
        place / "small", [run_log(LORA, {"global_batch_size": 16, "seed": i}, progress=3456) for i in range(10)]
    )
    assert (
        "not to be compared: its logs are of llama2_70b_lora at GBS 16"
        in package(place, "--dry-run", "--borrow", str(small)).output
    )


def test_without_results_a_study_is_asked_for_and_results_need_their_code(place: Path) -> None:
    neither = CliRunner().invoke(main, ["--system", "s.json"])
    assert (neither.exit_code, "or --study NAME to run what its sweep recommends" in neither.output) == (2, True)
    both = CliRunner().invoke(main, [str(place / "results"), "--system", "s.json"])
    assert (both.exit_code, "--code is missing" in both.output) == (2, True)


def test_every_finding_that_the_checkers_can_print_has_a_remedy_of_its_own() -> None:
    """Read from their source: the words of each logging call of level warning or error, power aside."""
    unknown = remedy("something new")
    for part in PARTS:
        spec = importlib.util.find_spec(f"mlperf_logging.{part}")
        assert spec is not None
        assert spec.origin is not None
        for words in printed_by(ast.parse(Path(spec.origin).read_text())):
            assert remedy(words) != unknown, words


PARTS = (
    "package_checker.package_checker", "package_checker.seed_checker", "repo_checker.repo_checker",
    "rcp_checker.rcp_checker", "system_desc_checker.system_desc_checker",
)  # fmt: skip
IRRELEVANT = ("power", "Power", "node_x", "sw_x", "number of sw", "RCP bypass", "reviewed", "specified json")
"""Of power measurements, and of options that package never gives."""


def printed_by(tree: ast.Module) -> Iterator[str]:
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("logging.error", "logging.warning"):
            words = call.args[0]
            if isinstance(words, ast.Constant) and not any(part in words.value for part in IRRELEVANT):
                yield str(words.value)


def test_runs_that_the_rules_refuse_have_no_chance_and_the_reason_is_said(place: Path) -> None:
    runs(place, 5)
    log = place / "results" / "result_1.txt"
    log.write_text(log.read_text().replace('"seed", "value": 1', '"seed", "value": 0'))
    for number in range(5, 10):
        (place / "results" / f"result_{number}.txt").unlink()
    assert "P(all checks) is 0 as these logs are: the seed check fails" in package(place, "--dry-run").output


def test_a_license_goes_with_the_code_and_its_lack_is_said(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_tune.cli.package.CHECKERS", ())
    assert "no license in the code's folder" in package(place).output
    (place / "LICENSE").write_text("Apache License")
    done = package(place, "--license", str(place / "LICENSE"), "--out", str(place / "second"))
    assert "no license" not in done.output
    code = place / "second" / "lora_tune" / "benchmarks" / "llama2_70b_lora" / "implementations" / "code"
    assert (code / "LICENSE").read_text() == "Apache License"


def test_a_description_knows_what_the_machine_says_of_itself() -> None:
    thread = "processor : {0}\nmodel name\t: AMD EPYC 9654\nphysical id\t: {1}\ncpu cores\t: 2\n\n"
    texts = {
        "cpuinfo": "".join(thread.format(n, n % 2) for n in range(8)),
        "meminfo": "MemTotal:       2113444123 kB\nMemFree: 1 kB\n",
        "os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.4 LTS"\n',
        "gpus": "NVIDIA H100 80GB HBM3, 81559 MiB, 550.54.15\n" * 8,
        "infiniband": "mlx5_0 mlx5_1",
    }
    known = described_by_machine(texts)
    assert known["host_processor_model_name"] == "AMD EPYC 9654"
    assert (known["host_processors_per_node"], known["host_processor_core_count"]) == ("2", "2")
    assert (known["host_memory_capacity"], known["operating_system"]) == ("2016 GB", "Ubuntu 22.04.4 LTS")
    assert (known["accelerators_per_node"], known["accelerator_memory_capacity"]) == ("8", "80 GB")
    assert known["host_networking"] == "2 x RDMA (mlx5_0, mlx5_1)"
    assert described_by_machine({}) == {}
    assert set(known) < set(FIELDS)


@given(st.dictionaries(st.sampled_from(["cpuinfo", "meminfo", "os-release", "uname", "gpus", "infiniband"]), st.text()))
def test_whatever_a_machine_prints_fills_fields_or_none(texts: dict[str, str]) -> None:
    assert set(described_by_machine(texts)) <= set(FIELDS)


def test_a_missing_description_is_begun_with_what_the_logs_say(place: Path) -> None:
    (place / "DGXH100.json").unlink()
    done = package(place)
    assert done.exit_code == 2
    assert "is begun with what the logs and this machine say" in done.output
    begun = json.loads((place / "DGXH100.json").read_text())
    assert tuple(begun) == FIELDS
    assert (begun["submitter"], begun["division"], begun["status"]) == ("lora_tune", "closed", "Available on-premise")
    assert begun["operating_system"]
    assert "nothing stands in number_of_nodes, " in package(place).output


def test_too_few_runs_are_refused_and_of_more_the_first_count() -> None:
    names = [f"result_{i}.txt" for i in range(12)]
    assert counted(names, 10, "results") == (names[:10], names[10:])
    with pytest.raises(InputError, match="holds 9 result files, and a submission has 10"):
        counted(names[:9], 10, "results")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"accelerator_model_name": " "}, "nothing stands in accelerator_model_name; fill it in"),
        ({"status": "available"}, "status 'available': allowed are"),
        ({"submitter": "Other"}, "submitter is 'Other', and the logs say 'lora_tune'"),
        ({"division": "open"}, "division is 'open', and the logs say 'closed'"),
    ],
)
def test_a_description_that_contradicts_the_logs_is_refused(changed: dict[str, object], message: str) -> None:
    check_description(filled(), SAID, "DGXH100.json")
    with pytest.raises(InputError, match=message):
        check_description(filled(**changed), SAID, "DGXH100.json")


def test_a_submitter_of_two_words_has_a_folder_of_one() -> None:
    files = tree("Juniper Networks", "s", "b", description={}, results=[b"log"], implementation="i", code={})
    assert {path.parts[0] for path in files} == {"JuniperNetworks"}


@given(st.text())
def test_a_name_is_a_folder_of_its_own_or_refused(name: str) -> None:
    """Whatever a submitter is called, nothing is written beside the package."""
    try:
        files = tree(name, "s", "b", description={}, results=[b"log"], implementation="i", code={})
    except InputError:
        return
    assert all(path.parts[0] == "".join(name.split()) and ".." not in path.parts for path in files)
