"""The exported config: what was swept is what is handed over, whatever the values are, and all of it counts."""

from __future__ import annotations

import datetime
import json
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError, SetupError
from lora_tune.cli import commands, export
from lora_tune.review import config_check
from lora_tune.review.summary import time_interval
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial
from lora_tune.workloads import load as load_workload
from tests.builders import HOSTILE, stored, study_of, sweep_of
from tests.tiny import STUDY

TINY = STUDY.read_text(encoding="utf-8")


@pytest.fixture
def swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stored sweep of the tiny study's space, some trials of which reached the target; the present folder."""
    study = study_of(TINY, "mine")
    stored(tmp_path / "sweeps" / "mine", sweep_of(study, trials=8, text=TINY))
    (tmp_path / "studies").mkdir()
    (tmp_path / "studies" / "mine.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*options: str) -> Result:
    return CliRunner().invoke(commands.export, ["--study", "mine", *options])


def the_config(folder: Path) -> Path:
    (config,) = (folder / "sweeps" / "mine" / "best").glob("config_*.sh")
    return config


def test_the_twins_say_what_the_config_sets(swept: Path) -> None:
    assert run().exit_code == 0
    config = the_config(swept)
    told = json.loads(config.with_suffix(".json").read_text())
    assert tomllib.loads(config.with_suffix(".toml").read_text()) == told
    assert told["config"] == config.name
    exported = config_check.sourced_file(config)
    for name in ("LR", "MAX_STEPS", "WARMUP_STEPS", "MINIBS"):
        assert float(exported[name]) == told["parameters"][name]
    assert exported["SEED"] == str(told["trial"]["seed"])
    assert any(told["study"]["hash"] in line for line in told["provenance"])


def test_the_head_names_the_tool_the_study_the_seed_and_the_score_with_its_interval_and_date(swept: Path) -> None:
    assert run().exit_code == 0
    head = [line for line in the_config(swept).read_text().splitlines() if line.startswith("# ")]
    text = "\n".join(head)
    seed = json.loads(the_config(swept).with_suffix(".json").read_text())["trial"]["seed"]
    assert re.search(r"^# Exported by lora_tune \S+ on \d{4}-\d\d-\d\d ", text, re.MULTILINE)
    assert re.search(r"^# study mine, hash \w+, trial \d+, measured on \d{4}-\d\d-\d\d$", text, re.MULTILINE)
    assert re.search(rf"^# time to .* s; .* 1 run, seed {seed}$", text, re.MULTILINE)


def test_a_score_that_is_not_the_time_has_a_line_with_an_interval_of_its_own() -> None:
    study = study_of(TINY)
    best = sweep_of(study, trials=8, text=TINY).best()
    assert best is not None
    assert best.seconds is not None
    scored = replace(best, metrics=replace(best.metrics, objective=2 * best.seconds))
    told = export.provenance(study, scored, datetime.datetime.now(datetime.UTC))
    (line,) = (line for line in told if line.startswith("score, "))
    low, high = (2 * bound for bound in time_interval(best))
    assert line.endswith(f": {2 * best.seconds:.1f} s, 90% interval {low:.1f} to {high:.1f} s")


def test_the_time_of_a_packed_trial_is_told_twice() -> None:
    study = study_of(TINY)
    best = sweep_of(study, trials=8, text=TINY).best()
    assert best is not None
    packed = replace(best, metrics=replace(best.metrics, packed_seconds=213.62))
    now = datetime.datetime.now(datetime.UTC)
    told = set(export.provenance(study, packed, now)) - set(export.provenance(study, best, now))
    assert told == {"this time is that of the trial alone; beside others in a pack it took 213.6 s"}


@pytest.mark.parametrize(
    ("seeds", "words"), [([], ""), ([7], " 7"), ([8, 7], " 7, 8"), ([9, 7, 8], " 7 to 9"), ([7, 9, 12], " 7, 9, 12")]
)
def test_seeds_in_words(seeds: list[int], words: str) -> None:
    assert export.seeds_text(seeds) == words


def test_the_study_as_it_was_swept_counts_not_its_file_as_it_is_now(swept: Path) -> None:
    target = study_of(TINY).objective.target
    (swept / "studies" / "mine.toml").write_text(TINY.replace(f"target = {target}", "target = 9.5"))
    assert run().exit_code == 0
    assert config_check.sourced_file(the_config(swept))["TARGET"] == str(target)
    assert f"time to eval loss {target:g}" in the_config(swept).read_text()


def test_the_interval_of_the_time_knows_the_next_eval_and_the_pace() -> None:
    metrics = TrialMetrics(crossing_low=90.0, crossing_high=110.0)
    trial = Trial(number=0, seed=1, tuned={}, parameters={}, seconds=50.0, samples=100.0, metrics=metrics)
    assert time_interval(trial) == pytest.approx((45.0, 55.0))
    seen_late = replace(trial, metrics=replace(metrics, eval_samples=20.0))
    assert time_interval(seen_late) == pytest.approx((45.0, 65.0))
    low, high = time_interval(replace(trial, metrics=replace(metrics, pace_spread=0.2)))
    assert low < 45.0
    assert high > 55.0
    late = replace(trial, metrics=TrialMetrics(crossing_low=70.0, crossing_high=80.0))
    assert time_interval(late) == pytest.approx((35.0, 50.0)), "the run itself is never outside"


def test_diff_shows_what_changes_against_the_present_config(swept: Path) -> None:
    run()
    lines = the_config(swept).read_text().replace("MAX_STEPS=", "MAX_STEPS=9").splitlines()
    base = swept / "config_now.sh"
    base.write_text("\n".join([x for x in lines if "WARMUP_STEPS" not in x] + ["export ONLY_THERE=1"]))
    said = run("--diff", str(base)).output
    assert "3 variables differ" in said
    assert "  MAX_STEPS: 9" in said
    assert "+ WARMUP_STEPS = " in said
    assert "- ONLY_THERE = 1" in said
    assert "the same as" in run("--diff", str(the_config(swept))).output


def test_diff_against_nothing_is_refused(swept: Path) -> None:
    result = run("--diff", "nowhere.sh")
    assert result.exit_code == 2
    assert "there is no such file" in result.output


def test_check_vouches_for_every_variable(swept: Path) -> None:
    result = run("--check")
    assert result.exit_code == 0, result.output
    assert "variables source cleanly; who reads each:" in result.output
    assert re.search(r"^  LR +the recipe$", result.output, re.MULTILINE)
    assert re.search(r"^  DGXNGPU +\S", result.output, re.MULTILINE)


def test_check_refuses_a_variable_that_nothing_reads(swept: Path) -> None:
    run()
    config = the_config(swept)
    config.write_text(config.read_text() + "export NO_SUCH_KNOB=1\n")
    workload = load_workload(study_of(TINY, "mine"), "mine.toml")
    readers = workload.readers(config_check.exported_by(config, workload))
    assert readers is not None
    assert [name for name, reader in readers.items() if not reader] == ["NO_SUCH_KNOB"]


def test_a_config_that_does_not_source_says_what_bash_says(swept: Path) -> None:
    broken = swept / "config_broken.sh"
    broken.write_text("export A=1\nfalse\n")
    with pytest.raises(SetupError, match=r"config_broken\.sh cannot be sourced"):
        config_check.sourced_file(broken)
    with pytest.raises(InputError, match="no such file"):
        config_check.changed_against(swept / "away.sh", broken)


def test_a_config_is_sourced_as_if_it_lay_beside_the_common_one(tmp_path: Path) -> None:
    site, mine = tmp_path / "site", tmp_path / "mine"
    site.mkdir()
    mine.mkdir()
    (site / "config_common.sh").write_text("export SHARED=1\n")
    (site / "config_base.sh").write_text('source "$(dirname "${BASH_SOURCE[0]}")"/config_common.sh\nexport LR=1e-4\n')
    config = mine / "config_new.sh"
    config.write_text('source "$(dirname "${BASH_SOURCE[0]}")"/config_common.sh\nexport LR=2e-4\n')
    assert [str(d) for d in config_check.changed_against(site / "config_base.sh", config)] == ["  LR: 1e-4 -> 2e-4"]
    assert {f.name for f in site.iterdir()} == {"config_base.sh", "config_common.sh"}


def test_numbers_written_differently_do_not_differ() -> None:
    assert config_check.differences({"LR": "4e-4", "A": "1"}, {"LR": "0.0004", "A": "1.0"}) == []


def test_a_value_that_another_file_overrides_is_noticed() -> None:
    assert config_check.effective({"LR": 4e-4, "TP": 4}, {"LR": "0.0004", "TP": "8"}) == [
        "TP is '8', the trial had '4'"
    ]


texts = st.text(st.characters(blacklist_categories=("Cs",)), max_size=40)
values = st.one_of(texts, st.integers(-(2**53), 2**53), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))


@given(
    st.dictionaries(texts, st.one_of(values, st.lists(texts, max_size=3), st.dictionaries(texts, values, max_size=4)))
)
def test_toml_reads_back_what_was_written(data: dict[str, object]) -> None:
    assert tomllib.loads(config_check.toml_text(data)) == data


def test_hostile_values_arrive_unchanged_and_run_nothing(tmp_path: Path) -> None:
    """A hostile choice is a plain value in bash, JSON and TOML; bash cannot hold a NUL, nothing else is lost."""
    text = TINY.replace("[objective]", f"OPTIMIZER = {json.dumps(HOSTILE)}\n[objective]")
    study = study_of(text, "mine")
    sweep = sweep_of(study, trials=8, text=text)
    best: Trial | None = sweep.best()
    assert best is not None
    written = export.export_trial(study, best, load_workload(study, "mine.toml"), tmp_path)
    assert config_check.sourced_file(written.path)["OPTIMIZER"] == HOSTILE
    assert json.loads(written.path.with_suffix(".json").read_text())["parameters"]["OPTIMIZER"] == HOSTILE
    assert tomllib.loads(written.path.with_suffix(".toml").read_text())["parameters"]["OPTIMIZER"] == HOSTILE
    assert not (Path.cwd() / "owned").exists()


def test_the_line_to_type_names_this_interpreter_and_the_file_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As printed by ``make sweep``: in the folder of the clone, before anybody activates the environment."""
    workload = load_workload(study_of(TINY, "mine"), STUDY)
    written = export.Written(tmp_path / "best of all" / "config_X.sh", "source config_X.sh && python -m lora_tune.x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    assert export.typed(written, workload) == "source 'best of all/config_X.sh' && .venv/bin/python -m lora_tune.x"
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", str(tmp_path / ".venv/bin"))
    assert export.typed(written, workload).endswith(" && python -m lora_tune.x")


def test_a_package_that_is_not_installed_here_is_left_out_of_the_provenance(
    swept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch often comes with a container, and is no package of the environment that exports."""
    monkeypatch.setattr(export, "_PACKAGES", ("optuna", "no-such-package"))
    assert run().exit_code == 0
    text = the_config(swept).read_text()
    assert "# optuna " in text
    assert "no-such-package" not in text
