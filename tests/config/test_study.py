"""A study file is read whole, or refused with the file, the key and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tune.base.errors import StudyError
from lora_tune.config.study import SHIPPED, find_study, load_study, parse_study, study_changes
from lora_tune.workloads import load as load_workload
from tests.conftest import REPOSITORY
from tests.fakes import command_study

GOOD = """
[workload]
kind = "command"
argv = ["true"]
[space]
LR = { type = "float", low = 1e-4, high = 1e-2, log = true }
STEPS = { type = "int", low = 100, high = 400, step = 50 }
WARMUP = { type = "derived", formula = "ceil(0.1 * STEPS)" }
layout = { type = "layout", minibs = [4, 8] }
DROPOUT = 0.1
[budget]
trials = 4
"""


def test_resolves_what_a_trial_reads() -> None:
    study = parse_study(GOOD, Path("good.toml"))
    values = study.search_space.resolve({"LR": 0.001, "STEPS": 150, "layout": "tp1 pp1 cp1 minibs8 mbs1"})
    assert values == {
        "LR": 0.001, "STEPS": 150, "TP": 1, "PP": 1, "CP": 1, "MINIBS": 8, "MBS": 1, "GBS": 8, "DROPOUT": 0.1,
        "WARMUP": 15,
    }  # fmt: skip
    assert study.search_space.tuned(values) == {"LR": 0.001, "STEPS": 150, "layout": "tp1 pp1 cp1 minibs8 mbs1"}


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        (
            ("low = 1e-4, high = 1e-2", "low = 1e-2, high = 1e-4"),
            "space.LR",
            "low = 0.01 is above high = 0.0001; swap them",
        ),
        (("low = 1e-4", "low = 0.0"), "space.LR", "log = true needs low above 0"),
        (("step = 50", "stepp = 50"), "space.STEPS.stepp", "unknown key"),
        (("trials = 4", "trails = 4"), "budget.trails", "unknown key; did you mean trials?"),
        (("trials = 4", "node_hours = -3"), "budget.node_hours", "must be above 0, not -3"),
        (("trials = 4", "trials = 0"), "budget.trials", "must be at least 1, not 0"),
        (("trials = 4", "trials = 2.5"), "budget.trials", "must be a whole number, not 2.5"),
        (("trials = 4", 'trials = "x"'), "budget.trials", "must be a whole number, not 'x'"),
        (
            ("[budget]", '[search]\nsampler = "cma"\n[budget]'),
            "search.sampler",
            "known are auto, tpe, random, requests, gp, cmaes, grey_box",
        ),
        (("DROPOUT = 0.1", 'D = { type = "categorical", choices = [] }'), "space.D.choices", "at least 1 entry"),
        (("[budget]", "[site]\ngres = 8\n[budget]"), "site.gres", "must be text, not 8"),
        (("trials = 4", ""), "budget", "no end: give at least one of trials, node_hours and wall_hours"),
        (("minibs = [4, 8]", "tp = [3], minibs = [1]"), "space.layout", "no layout of 1 GPUs satisfies"),
        (("ceil(0.1 * STEPS)", "ceil(0.1 * NOPE)"), "space.WARMUP", "needs the number NOPE"),
        (("ceil(0.1 * STEPS)", "WARMUP + 1"), "space.WARMUP", "need each other"),
        (("ceil(0.1 * STEPS)", "__import__('os')"), "space.WARMUP", "not allowed"),
        (("DROPOUT = 0.1", "TP = 2"), "space.TP", "set by the layout"),
        (('type = "float"', 'type = "flaot"'), "space.LR", "needs type = one of float"),
        (
            ("[budget]", "[search]\nenqueue = [{ LR = 1.0 }]\n[budget]"),
            "search.enqueue.0.LR",
            "is not within 0.0001 to 0.01",
        ),
        (("[budget]", "[search]\nenqueue = [{ NO = 1.0 }]\n[budget]"), "search.enqueue.0.NO", "is not tuned"),
        (("DROPOUT = 0.1", '"a b" = 1'), "space.a b", "is not a variable name"),
        (("[budget]", '[site]\nprofile = "no.toml"\n[budget]'), "site.profile", "cannot be read"),
        (("[budget]", '[budget]\nname = "../x"\n'), "budget.name", "unknown key"),
        (("[workload]", 'name = "../x"\n[workload]'), "name", "must be made of letters"),
        (("DROPOUT = 0.1", "DROPOUT = nan"), "space.DROPOUT.value", "finite"),
        (("DROPOUT = 0.1", f"DROPOUT = {'9' * 400}"), "space.DROPOUT.value", "finite"),
        (("DROPOUT = 0.1", f'N = {{ type = "int", low = 1, high = {"9" * 400} }}'), "space.N.high", "at most 18"),
    ],
)
def test_names_the_file_the_key_and_the_remedy(change: tuple[str, str], key: str, problem: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study(GOOD.replace(*change), Path("bad.toml"))
    message = str(caught.value)
    assert message.startswith(f"bad.toml: {key}: ")
    assert problem in message
    assert "\n" not in message
    assert "Input should" not in message


@pytest.mark.parametrize(
    ("change", "key", "problem"),
    [
        (('["true"]', "[]"), "workload.argv", "must have at least 1 entry"),
        (('["true"]', '["true", "{LRR}"]'), "workload", "{LRR} is unknown"),
        (('["true"]', '["true"]\nlog = { kind = "json" }'), "workload.log", "known are mllog, hf_trainer"),
    ],
)
def test_a_workload_names_the_file_too(change: tuple[str, str], key: str, problem: str) -> None:
    study = parse_study(GOOD.replace(*change), Path("bad.toml"))
    with pytest.raises(StudyError) as caught:
        load_workload(study, Path("bad.toml"))
    assert str(caught.value).startswith(f"bad.toml: {key}: ")
    assert problem in str(caught.value)


def test_broken_toml_names_the_line() -> None:
    with pytest.raises(StudyError, match=r"bad.toml: is not valid TOML: .*line 2"):
        parse_study("[budget]\ntrials = = 3\n", Path("bad.toml"))


def test_an_integer_of_more_digits_than_python_reads_is_said() -> None:
    with pytest.raises(StudyError, match=r"bad.toml: is not valid TOML: .*digits"):
        parse_study(f"seed = {'9' * 5000}\n", Path("bad.toml"))


def test_an_unknown_study_is_answered_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(GOOD)
    with pytest.raises(StudyError, match="there is no study 'tinny'; did you mean tiny"):
        find_study("tinny", tmp_path)


def test_an_unknown_study_of_a_folder_is_answered_with_the_nearest_there() -> None:
    with pytest.raises(StudyError, match="there is no study 'mlperf/h200_lora_fp9'; did you mean mlperf/h200_lora_fp8"):
        find_study("mlperf/h200_lora_fp9", SHIPPED)
    with pytest.raises(StudyError, match="nowhere/h200: is not a study: a study file ends in"):
        find_study("nowhere/h200", SHIPPED)


def test_a_file_that_windows_wrote_is_read_as_any_other(tmp_path: Path) -> None:
    study = command_study(trials=3)
    for name, text in (("plain.toml", study), ("windows.toml", "\ufeff" + study.replace("\n", "\r\n"))):
        (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    plain, windows = (load_study(tmp_path / name) for name in ("plain.toml", "windows.toml"))
    assert windows.model_copy(update={"name": "plain"}) == plain


def test_an_unreadable_file_is_said(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(StudyError, match="is not UTF-8"):
        load_study(bad)
    with pytest.raises(StudyError, match=r"bad.toml: is not UTF-8"):
        parse_study(GOOD + '[site]\nprofile = "bad.toml"\n', tmp_path / "good.toml")


def test_changes_are_named_and_comments_do_not_count() -> None:
    before = parse_study(GOOD, Path("a.toml"))
    after = parse_study("# new comment\n" + GOOD.replace("high = 1e-2", "high = 2e-2"), Path("a.toml"))
    assert study_changes(before, after) == ["space.LR.high: 0.01 -> 0.02"]
    assert before.digest != after.digest
    assert parse_study("# comment\n" + GOOD, Path("a.toml")).digest == before.digest


def test_a_study_cannot_be_changed() -> None:
    study = parse_study(GOOD, Path("a.toml"))
    with pytest.raises(ValueError, match="frozen"):
        study.budget.trials = 9  # type: ignore[misc]


@pytest.mark.parametrize("file", sorted((REPOSITORY / "studies").glob("*.toml")), ids=lambda p: p.stem)
def test_every_shipped_study_loads(file: Path) -> None:
    study = load_study(file)
    assert study.description
    study.search_space.resolve(study.search_space.corner())


def test_the_default_study_names_a_workload_that_loads() -> None:
    file = REPOSITORY / "studies" / "tiny.toml"
    load_workload(load_study(file), file)
