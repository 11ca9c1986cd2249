"""Old runs as prior observations: read from logs, kept beside the sweep, believed as long as they deserve it."""

from __future__ import annotations

import gzip
import math
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.laboratory import arena
from benchmarks.laboratory.ours import GreyBox
from benchmarks.laboratory.problems import h100_wide
from lora_tune.base.errors import InputError
from lora_tune.config.study import load_study
from lora_tune.ingest import main as ingest
from lora_tune.logs.mllog import MllogReader
from lora_tune.review.summary import prior_text
from lora_tune.search import priors
from lora_tune.store.records import StudyRecords
from lora_tune_simulation.h100 import function as h100

STUDY = Path(__file__).resolve().parents[2] / "studies" / "simulated_h100.toml"
GOOD = {"LR": 4e-4, "MAX_STEPS": 1024, "WARMUP_STEPS": 0, "TP": 4, "MINIBS": 4}


def log_of(seed: int, parameters=GOOD) -> bytes:
    """The MLLOG text of a simulated run."""
    return "".join(line + "\n" for _, line in h100(parameters, seed)).encode()


def take(tmp_path: Path, *arguments: object):
    """Run the command on the study, into a folder of its own."""
    given = ["--study", str(STUDY), "--output", str(tmp_path / "sweep"), *map(str, arguments)]
    return CliRunner().invoke(ingest, given)


def taken(tmp_path: Path) -> tuple:
    return priors.read(tmp_path / "sweep" / "priors.jsonl")


def test_files_folders_gz_and_tar_are_read_with_provenance_and_their_own_curves(tmp_path) -> None:
    folder = tmp_path / "old cluster"
    folder.mkdir()
    (folder / "a.log").write_bytes(log_of(1))
    (folder / "b.txt.gz").write_bytes(gzip.compress(log_of(2)))
    (folder / "notes.txt").write_text("no log")
    (tmp_path / "c.log").write_bytes(log_of(3))
    with tarfile.open(tmp_path / "d.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "c.log", "c.log")
        archive.add(folder / "b.txt.gz", "b.txt.gz")
    (tmp_path / "e.log").write_bytes(log_of(4))
    with tarfile.open(tmp_path / "f.tar", "w") as archive:
        archive.add(tmp_path / "e.log", "deep/e.log")
    found = take(tmp_path, folder, tmp_path / "d.tar.gz", tmp_path / "f.tar")
    assert found.exit_code == 0, found.output
    assert "notes.txt: holds no MLLOG line" in found.output
    runs = taken(tmp_path)
    assert [r.log.rpartition("/")[2] for r in runs] == ["a.log", "b.txt.gz", "d.tar.gz:c.log", "e.log"]
    assert runs[3].log.endswith("f.tar:deep/e.log")
    assert [r.source for r in runs] == ["old cluster", "old cluster", "d.tar.gz", "f.tar"]
    assert "1 known already" in found.output
    assert all(r.values == {"LR": 4e-4, "MAX_STEPS": 1024, "WARMUP_STEPS": 0, "GBS": 8} for r in runs)
    assert all(len(r.evals) >= 2 and r.evals[-1].loss <= 0.925 for r in runs)
    assert len({r.digest for r in runs}) == len(runs) == 4


def test_a_log_of_another_benchmark_among_the_studys_own_teaches_it_nothing(tmp_path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "own.log").write_bytes(log_of(1))
    (folder / "other.log").write_bytes(log_of(2).replace(b"llama2_70b_lora", b"llama31_8b"))
    found = take(tmp_path, folder)
    assert found.exit_code == 0, found.output
    assert [Path(r.log).name for r in taken(tmp_path)] == ["own.log"]
    assert "1 left out: it is of llama31_8b, and this study trains llama2_70b_lora" in found.output


def test_the_same_log_again_changes_nothing_and_a_log_that_teaches_nothing_says_why(tmp_path) -> None:
    (tmp_path / "a.log").write_bytes(log_of(1))
    assert take(tmp_path, tmp_path / "a.log").exit_code == 0
    again = take(tmp_path, tmp_path / "a.log")
    assert again.exit_code == 0
    assert "1 known already" in again.output
    assert len(taken(tmp_path)) == 1
    (tmp_path / "b.log").write_bytes(log_of(2).replace(b"opt_base_learning_rate", b"something_else"))
    nothing = take(tmp_path, tmp_path / "b.log")
    assert nothing.exit_code == 4
    assert "does not state LR; give it with --set LR=VALUE" in nothing.output
    assert take(tmp_path, tmp_path / "b.log", "--set", "LR=3e-4", "--source", "the old cluster").exit_code == 0
    assert [r.values["LR"] for r in taken(tmp_path)] == [4e-4, 3e-4]
    assert taken(tmp_path)[1].source == "the old cluster"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.log"], "there is no such file or folder"),
        ([Path(__file__), "--set", "LR"], "--set LR: write NAME=VALUE"),
    ],
)
def test_bad_input_names_what_came_and_what_is_wanted(tmp_path, arguments, words) -> None:
    found = take(tmp_path, *arguments)
    assert found.exit_code == 2
    assert words in found.output


def test_a_cut_gz_is_said_and_the_other_logs_are_taken(tmp_path) -> None:
    (tmp_path / "cut.log.gz").write_bytes(gzip.compress(log_of(1))[:-400])
    (tmp_path / "good.log").write_bytes(log_of(2))
    found = take(tmp_path, tmp_path / "cut.log.gz", tmp_path / "good.log")
    assert found.exit_code == 0
    assert "cut.log.gz: cannot be read" in found.output
    assert len(taken(tmp_path)) == 1


def test_a_broken_line_of_the_file_is_named(tmp_path) -> None:
    (tmp_path / "priors.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"priors\.jsonl, line 1: is not a prior run"):
        priors.read(tmp_path / "priors.jsonl")


def run_at(seed: int, **said: object):
    """A prior run of the surface's good configuration, its values replaced by what its log would claim."""
    reader = MllogReader()
    reader.feed(log_of(seed))
    values = {"LR": 4e-4, "MAX_STEPS": 1024, "WARMUP_STEPS": 0, "GBS": 8, **said}
    found = priors.prior_run(reader.run(), values, ("elsewhere", f"{seed}.log", str(seed)), 0.0)
    assert found is not None
    return found


def test_a_running_sweep_takes_new_runs_into_account_at_its_next_proposal(tmp_path) -> None:
    path = tmp_path / "sweep" / "priors.jsonl"
    live = priors.live(path, 0.925)
    assert live() == ()
    priors.write(path, [run_at(1)])
    assert [o.values["LR"] for o in live()] == [4e-4]
    priors.write(path, [run_at(1), run_at(2, LR=5e-4)])
    assert [o.values["LR"] for o in live()] == [4e-4, 5e-4]
    assert all(math.isfinite(o.reached) and o.source == "elsewhere" for o in live())


def test_a_run_counts_by_the_target_of_the_study_that_takes_it() -> None:
    reached, not_reached = priors.observations([run_at(1)], 0.925)[0], priors.observations([run_at(1)], 0.5)[0]
    assert reached.reached == reached.bound
    assert math.isnan(not_reached.reached)
    assert not_reached.bound > 2000


def test_a_misleading_prior_costs_a_few_runs_at_most() -> None:
    """Twenty logs whose learning rates are written down ten times too high praise rates at which runs diverge."""
    lies = priors.observations([run_at(seed, LR=4e-3) for seed in range(20)], 0.925)
    problem = h100_wide(4)
    method = GreyBox(problem, 4, prior=lies)
    trace = arena.play(problem, method, slots=1, budget=5.0, seed=4)
    a_run = 0.5  # node-hours
    believed = [t for t in method._study.trials if t.params["LR"] > 2e-3 and t.user_attrs["kind"] == "full"]
    assert sum(t.user_attrs.get("node_hours", 0.0) for t in believed) < 3 * a_run
    assert trace.points[-1][1] < 0.03


def test_report_and_explain_say_how_many_old_runs_the_search_starts_from() -> None:
    study = load_study(STUDY)
    sweep = StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0)
    assert prior_text(study, sweep) == "149 published MLPerf submissions"
    known = replace(sweep, priors=(run_at(1), run_at(2)))
    assert prior_text(study, known).endswith(" and 2 old runs of 1 source")
    plain = study.with_options({"search": {"sampler": "tpe"}})
    assert prior_text(plain, known) == ""
