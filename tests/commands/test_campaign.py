"""A campaign: several benchmarks of one machine, swept one after another under one budget of node-hours."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.base.errors import StudyError
from lora_tune.commands.report import main as report
from lora_tune.commands.status import main as status
from lora_tune.commands.sweep import main as sweep
from lora_tune.config.campaign import Campaign, Member, allotments, load_campaign
from lora_tune.config.study import parse_study
from lora_tune.store.records import Verdict
from tests.commands.two_benchmarks import write
from tests.conftest import REPOSITORY
from tests.recorded import recorded
from tests.waiting import wait_for


def called(command: object, file: Path, folder: Path, *more: str) -> Result:
    return CliRunner().invoke(command, ["--study", str(file), "--output", str(folder), *more])  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A campaign of real trainings whose driver was killed in its second sweep; the same command went on."""
    folder = tmp_path_factory.mktemp("campaign")
    file, output = write(folder), folder / "out"
    begin = "import sys; from lora_tune.commands.sweep import main; main(sys.argv[1:])"
    first = subprocess.Popen(
        [sys.executable, "-c", begin, "--study", str(file), "--output", str(output)],
        stdout=subprocess.DEVNULL, cwd=REPOSITORY, start_new_session=True,
    )  # fmt: skip
    wait_for(lambda: list(output.glob("rising/trials/*/attempt-0/started.json")) or first.poll() is not None, 400, "it")
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    done = called(sweep, file, output)
    assert done.exit_code == 0, done.output
    assert "machine: rising, sweep 2 of 2" in done.output
    return folder


def test_each_sweep_ran_whole_and_none_of_its_trials_twice(campaign: Path) -> None:
    for name in ("falling", "rising"):
        found = recorded(campaign / "out" / name / "sweep.db", name)
        assert len(found.trials) == 3
        by_rate = {trial.parameters["LR"]: trial for trial in found.trials.values()}
        assert by_rate[1.0].verdict is Verdict.REACHED
        assert list((campaign / "out" / name / "best").iterdir())
    logs = sorted((campaign / "out").glob("falling/trials/*/attempt-*/job.log"))
    assert len(logs) == 3, "the first sweep had ended before the kill"


def test_status_shows_every_sweep_and_what_each_may_spend(campaign: Path) -> None:
    done = called(status, campaign / "machine.toml", campaign / "out", "--json")
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert (found["campaign"], found["state"], found["node_hours_budget"]) == ("machine", "ended", 6)
    first, second = found["sweeps"]
    assert [s["benchmark"] for s in found["sweeps"]] == ["flux1", "dlrmv4"]
    assert [s["status"]["trials"] for s in found["sweeps"]] == [3, 3]
    assert first["node_hours_allotted"] == pytest.approx(4)
    assert second["node_hours_allotted"] == pytest.approx(6 - first["status"]["node_hours"])
    assert found["node_hours"] == pytest.approx(sum(s["status"]["node_hours"] for s in found["sweeps"]))
    shown = called(status, campaign / "machine.toml", campaign / "out").output
    assert "machine: ended" in shown
    assert "rising" in shown


def test_the_page_leads_to_the_report_of_each_sweep(campaign: Path) -> None:
    (campaign / "out" / "rising" / "report.html").unlink()
    done = called(report, campaign / "machine.toml", campaign / "out")
    assert done.exit_code == 0, done.output
    page = (campaign / "out" / "report.html").read_text()
    for name in ("falling", "rising"):
        assert f'<a href="{name}/report.html">' in page
        assert (campaign / "out" / name / "report.html").is_file()
    assert called(report, campaign / "machine.toml", campaign / "out", "--svg", "x").exit_code == 2


def test_before_it_begins_every_sweep_waits(tmp_path: Path) -> None:
    done = called(status, write(tmp_path), tmp_path / "out", "--json")
    assert [s["state"] for s in json.loads(done.output)["sweeps"]] == ["waiting", "waiting"]
    assert done.exit_code == 3, "nobody drives it"


def test_the_dry_run_shows_each_and_starts_nothing(tmp_path: Path) -> None:
    done = called(sweep, write(tmp_path), tmp_path / "out", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "falling, sweep 1 of 2, 4 node-hours" in done.output
    assert "rising, sweep 2 of 2, 2 node-hours" in done.output
    assert not (tmp_path / "out").exists()


def test_before_it_begins_every_sweep_waits_in_a_database_of_their_own_too(tmp_path: Path) -> None:
    """Which the first sweep makes."""
    storage = ("--storage", f"sqlite:///{tmp_path}/all.db")
    done = called(status, write(tmp_path), tmp_path / "out", "--json", *storage)
    assert [s["state"] for s in json.loads(done.output)["sweeps"]] == ["waiting", "waiting"]
    done = called(sweep, write(tmp_path), tmp_path / "out", "--dry-run", *storage)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("hours", ["nan", "inf", "0", "-3"])
def test_a_budget_that_is_none_is_refused(tmp_path: Path, hours: str) -> None:
    done = called(sweep, write(tmp_path), tmp_path / "out", "--budget-node-hours", hours)
    assert done.exit_code == 2, done.output
    assert f"{hours} is not a number of node-hours above 0" in done.stderr


def test_what_is_about_one_study_is_refused(tmp_path: Path) -> None:
    done = called(sweep, write(tmp_path), tmp_path / "out", "--register")
    assert done.exit_code == 2
    assert "--register is about one study" in done.stderr


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        ('"rising.toml"', '"falling.toml"', "two studies are called falling"),
        ('"rising.toml"', '"gone.toml"', "cannot be read"),
        ("node_hours = 6", "node_hours = 0", "must be above 0"),
        ("node_hours = 6", "", "budget.node_hours: is missing"),
        ("share = 2", "shares = 2", "unknown key"),
        ("share = 2", "share = -1", "must be above 0"),
    ],
)
def test_mistakes_are_told_before_anything_runs(tmp_path: Path, before: str, after: str, problem: str) -> None:
    file = write(tmp_path)
    file.write_text(file.read_text().replace(before, after))
    with pytest.raises(StudyError, match=problem):
        load_campaign(file)


def test_one_budget_is_of_one_machine(tmp_path: Path) -> None:
    file = write(tmp_path)
    rising = tmp_path / "rising.toml"
    rising.write_text(rising.read_text().replace("[site]", '[site]\nsystem = "B300"'))
    with pytest.raises(StudyError, match="node-hours of B300 and LOCAL do not make one budget"):
        load_campaign(file)


ONE = parse_study('name = "one"\n[workload]\nkind = "command"\nargv = ["true"]\n'
                  '[space]\nLR = 1\n[objective]\ntarget = 1\n[budget]\ntrials = 1\n', Path("one.toml"))  # fmt: skip


def made(node_hours: float, shares: list[float], own: list[float | None]) -> Campaign:
    """A campaign with these shares; own: what each study itself allows."""
    members = (
        Member(ONE.with_options({"budget": {"node_hours": hours}}), Path("s"), share)
        for hours, share in zip(own, shares, strict=True)
    )
    return Campaign("c", "", node_hours, tuple(members))


def test_what_a_sweep_leaves_goes_to_those_behind_it() -> None:
    campaign = made(12, [1, 2, 1], [None, None, None])
    assert allotments(campaign, [0, 0, 0], [False] * 3) == [3, 6, 3]
    assert allotments(campaign, [1, 0, 0], [False] * 3) == [3, 6, 3], "a sweep that runs may use all of its part"
    assert allotments(campaign, [0.6, 0, 0], [True, False, False]) == pytest.approx([3, 7.6, 3.8])
    assert allotments(campaign, [3, 9, 0], [True, True, False]) == [3, 6, 0], "the second one exceeded its part"
    assert allotments(made(12, [1, 1], [2, None]), [0, 0], [False] * 2) == [2, 10], "its own study allows no more"


@settings(max_examples=30, deadline=None)
@given(
    hours=st.floats(0.1, 1e4),
    sweeps=st.lists(st.tuples(st.floats(0.01, 100), st.floats(0, 1), st.booleans()), min_size=1, max_size=4),
)
def test_sweeps_that_keep_to_their_parts_keep_to_the_budget(
    hours: float, sweeps: list[tuple[float, float, bool]]
) -> None:
    campaign = made(hours, [share for share, _, _ in sweeps], [None] * len(sweeps))
    spent, ended = [0.0] * len(sweeps), [False] * len(sweeps)
    for number, (_, used, _) in enumerate(sweeps):
        parts = allotments(campaign, spent, ended)
        spent[number], ended[number] = parts[number] * used, True
        assert sum(spent[:number]) + parts[number] <= hours * (1 + 1e-9)
    assert allotments(campaign, spent, ended)[-1] == pytest.approx(hours - sum(spent[:-1]), abs=hours * 1e-9)


def test_a_sweep_that_spends_its_part_ends_and_the_next_has_its_turn(tmp_path: Path) -> None:
    """On the simulated machine, whose hours take seconds: a trial may take one."""
    simulated = (REPOSITORY / "studies" / "simulated_h100.toml").read_text()
    for before, after in (("node_hours = 15", "trials = 99"), ("grey_box", "random"), ("parallel = 8", "parallel = 2")):
        assert before in simulated
        simulated = simulated.replace(before, after)
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text(simulated)
    file = tmp_path / "both.toml"
    file.write_text('[budget]\nnode_hours = 4\n[[sweeps]]\nstudy = "one.toml"\n[[sweeps]]\nstudy = "two.toml"\n')
    done = called(sweep, file, tmp_path / "out")
    assert done.exit_code in (0, 4), done.output
    assert "the budget of 2 node-hours is spent" in done.output
    found = json.loads(called(status, file, tmp_path / "out", "--json").output)
    first, second = (s["status"]["node_hours"] for s in found["sweeps"])
    assert 2 <= first < 4.5, "it is exceeded by no more than what runs"
    assert second > 0
    assert first + second < 4 + 2.5
