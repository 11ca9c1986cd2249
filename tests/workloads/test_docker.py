"""``run_with_docker.sh`` trees: what a trial is given, and whole sweeps with podman and with a stand-in for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.base.errors import SetupError, StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.confirm import main as confirm
from lora_tune.doctor import main as doctor
from lora_tune.export import main as export
from lora_tune.score import main as score
from lora_tune.search.recommendation import recommend
from lora_tune.sweep import main as sweep
from lora_tune.workloads import load
from lora_tune.workloads.base import some_proposal
from lora_tune.workloads.docker import DockerWorkload, base_for
from lora_tune.workloads.implementation import sourced_file
from lora_tune.workloads.script_needs import path_warnings
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recorded import recorded

STANDINS = Path(__file__).resolve().parents[1] / "standins"

STUDY = """
[workload]
kind = "mlperf_docker"
implementation = "{tree}"
[site]
system = "MI300X"
launcher = "{launcher}"
gpus_per_node = 8
container = "localhost/standin:1"
data = "{data}"
[site.environment]
{environment}
[space]
LR = {{ type = "float", low = 2e-4, high = 8e-4, log = true }}
[objective]
target = 0.925
[budget]
trials = 2
trial_minutes = 5
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of one's own, as the stand-in has it."""
    return Path(shutil.copytree(STANDINS / "docker", tmp_path / "tree"))


def study_text(tree: Path, launcher: str = "local", **environment: str) -> str:
    for name in ("data", "model"):
        (tree.parent / "prepared" / name).mkdir(parents=True, exist_ok=True)
    lines = "\n".join(f'{name} = "{value}"' for name, value in environment.items())
    return STUDY.format(tree=tree, launcher=launcher, data=tree.parent / "prepared", environment=lines)


def workload(tree: Path, more: str = "") -> tuple[Study, DockerWorkload]:
    text = study_text(tree).replace('kind = "mlperf_docker"\n', f'kind = "mlperf_docker"\n{more}\n')
    study = parse_study(text, Path("t.toml"))
    found = load(study, "t.toml")
    assert isinstance(found, DockerWorkload)
    return study, found


class TestJob:
    def test_the_config_lies_where_the_unchanged_script_looks_and_holds_all_of_the_base(
        self, tree: Path, tmp_path: Path
    ) -> None:
        study, found = workload(tree)
        job = found.job(some_proposal(study), tmp_path / "attempt")
        assert job.argv == ("bash", "run_with_docker.sh")
        assert job.files["run_with_docker.sh"] == (tree / "run_with_docker.sh").read_text()
        (tmp_path / "attempt").mkdir()
        for name, text in job.files.items():
            (tmp_path / "attempt" / name).write_text(text)
        config = tmp_path / "attempt" / f"config_{job.environment['DGXSYSTEM']}.sh"
        base, trial = sourced_file(tree / "config_MI300X_1x8x1.sh"), sourced_file(config)
        assert base.keys() <= trial.keys()
        changed = {name for name in base if base[name] != trial[name]}
        assert changed == {"LR", "DGXSYSTEM"}
        # What the script passes on by name alone it takes from its own environment.
        assert {name: job.environment[name] for name in trial if name != "WALLTIME"} == {
            name: value for name, value in trial.items() if name != "WALLTIME"
        }

    def test_a_script_that_looks_in_configs_finds_it_there(self, tree: Path, tmp_path: Path) -> None:
        (tree / "configs").mkdir()
        (tree / "config_MI300X_1x8x1.sh").rename(tree / "configs" / "config_MI300X_1x8x1.sh")
        script = tree / "run_with_docker.sh"
        script.write_text(script.read_text().replace("./config_", "./configs/config_"))
        study, found = workload(tree)
        files = found.job(some_proposal(study), tmp_path / "a").files
        assert "configs/config_MI300X_1x8x1xtp1pp1cp1.sh" in files

    def test_a_script_that_cuts_paths_at_blanks_counts_where_trials_run(self, tree: Path, tmp_path: Path) -> None:
        """The scripts are copied to the trial, so its folder may have no blanks; that of the tree may."""
        script = tree / "run_with_docker.sh"
        script.write_text(script.read_text().replace('cd "$(dirname', 'SCRIPT_DIR="$(dirname') + "cd $SCRIPT_DIR\n")
        study, found = workload(tree.rename(tmp_path / "my tree"))
        job = {name: found.job(some_proposal(study), tmp_path / name) for name in ("sweep", "my sweep")}
        assert path_warnings(job["sweep"]) == []
        (doubt,) = path_warnings(job["my sweep"])
        assert doubt.startswith(f"{tmp_path}/my sweep has a space in it")

    @pytest.mark.parametrize("named", ["config_shared.sh", "$(dirname ${BASH_SOURCE[0]})/config_shared.sh"])
    def test_what_the_base_sources_from_its_folder_reaches_a_trial(
        self, tree: Path, tmp_path: Path, named: str
    ) -> None:
        """By a name that counts from where its user stands, or without quotes, in a folder whose name has spaces."""
        spaced = tree.rename(tmp_path / "my tree")
        (spaced / "config_shared.sh").write_text("export HSA_FORCE_FINE_GRAIN_PCIE=1\n")
        base = spaced / "config_MI300X_1x8x1.sh"
        base.write_text(f"{base.read_text()}source {named}\n")
        study, found = workload(spaced, f'base = "{base.name}"')
        for name, text in found.job(some_proposal(study), tmp_path / "attempt").files.items():
            (tmp_path / name).write_text(text)
        (config,) = tmp_path.glob("config_MI300X_1x8x1*.sh")
        shell = f". {shlex.quote(f'./{config.name}')} && echo $HSA_FORCE_FINE_GRAIN_PCIE $LR $PWD"
        said = subprocess.run(["env", "-i", "bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True)
        assert said.stdout.split(maxsplit=2)[::2] == ["1", f"{tmp_path}\n"], said.stderr

    def test_which_config_is_the_base(self, tree: Path) -> None:
        (tree / "config_MI325X_1x8x1.sh").write_text("export LR=1\n")
        assert base_for(tree, "MI325X") == "config_MI325X_1x8x1.sh"
        with pytest.raises(SetupError, match=r"workload.base.*config_MI300X_1x8x1.sh, config_MI325X_1x8x1.sh"):
            base_for(tree, "MI400")
        _, found = workload(tree, 'base = "config_MI325X_1x8x1.sh"')
        assert found.implementation.values["LR"] == "1"

    def test_an_export_keeps_the_time_limit_of_the_base(self, tree: Path) -> None:
        """Nothing starts the script with a limit: that of the trials is the sweep's own."""
        study, found = workload(tree)
        (text,) = found.export(some_proposal(study), ()).files.values()
        assert study.budget.trial_minutes == 5
        assert "WALLTIME" not in text, text
        (tree / "exported.sh").write_text(text)
        assert sourced_file(tree / "exported.sh")["WALLTIME"] == "50"

    def test_the_ending_of_the_bases_name_stays_where_a_trial_does_not_contradict_it(self, tree: Path) -> None:
        base = tree / "config_MI300X_1x8x1_fp4_sharp.sh"
        (tree / "config_MI300X_1x8x1.sh").rename(base)
        base.write_text(base.read_text() + "export FP4=True\n")
        study, found = workload(tree, f'base = "{base.name}"')
        plain = some_proposal(study)
        without = replace(plain, parameters={**plain.parameters, "FP4": False})
        as_there = replace(plain, parameters={**plain.parameters, "FP4": True})
        names = [found.file_name(proposal) for proposal in (plain, as_there, without)]
        assert names == [f"config_MI300X_1x8x1xtp1pp1cp1_{end}.sh" for end in ("fp4_sharp", "fp4_sharp", "sharp")]
        start = found.start()
        assert start is not None
        assert found.file_name(replace(plain, parameters=start.parameters)) == base.name
        assert next(iter(found.export(plain, ()).files)) == names[0]
        _, own = workload(tree, f'base = "{base.name}"\nsuffix = "mine"')
        assert own.file_name(plain) == "config_MI300X_1x8x1xtp1pp1cp1_mine.sh", "the study's own word is the last"


class TestCheck:
    def test_without_an_engine_on_a_bare_host(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "/nowhere")
        _, found = workload(tree)
        with pytest.raises(SetupError, match="docker is not on PATH"):
            found.check()

    def test_a_script_that_sets_its_places_or_sources_its_config_itself(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As Dell's of v5.0 does: then the study's would not count."""
        engine(tree, monkeypatch)
        script = tree / "run_with_docker.sh"
        script.write_text(
            script.read_text().replace("set -e", "export DATADIR=/mnt\nsource config_MI300X_1x8x1.sh\nset -e", 1)
        )
        _, found = workload(tree)
        doubts = " ".join(found.check())
        assert "sets DATADIR itself" in doubts
        assert "sources config_MI300X_1x8x1.sh itself" in doubts

    def test_doctor_looks_for_image_data_and_model_where_the_script_mounts_them(
        self, tree: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tree.parent / "docker.toml").write_text(study_text(tree))
        (tree.parent / "prepared" / "data" / "train.npy").write_bytes(b"\x93NUMPY")
        monkeypatch.setenv("PATH", "/nowhere")
        said = CliRunner().invoke(doctor, ["--study", str(tree.parent / "docker.toml")]).output
        assert "NCCL" not in said, "the script makes no such test"
        assert "docker is not on PATH here" in said
        assert f"ok       {tree.parent}/prepared/data/train.npy" in said
        assert f"{tree.parent}/prepared holds no model of a known form" in said
        engine(tree, monkeypatch)
        monkeypatch.setenv("STANDIN_IMAGE", str(tree.parent / "image"))
        said = CliRunner().invoke(doctor, ["--study", str(tree.parent / "docker.toml")]).output
        assert "container localhost/standin:1 is not among the images" in said


def engine(tree: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in engine as ``docker`` on PATH; returns the folder that is its image."""
    place = tree.parent / "bin"
    place.mkdir(exist_ok=True)
    shutil.copy(STANDINS / "docker_engine.sh", place / "docker")
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    image = tree.parent / "image"
    image.mkdir(exist_ok=True)
    shutil.copy(tree / "run_and_time.sh", image)
    return image


def swept(tree: Path, text: str) -> Path:
    """The folder of a finished sweep of the study ``text``."""
    (tree.parent / "docker.toml").write_text(text)
    folder = tree.parent / "sweep"
    arguments = ["--study", str(tree.parent / "docker.toml"), "--output", str(folder), "--quiet"]
    done = CliRunner().invoke(sweep, arguments)
    assert done.exit_code == 0, done.output
    return folder


def expect_two_reached(folder: Path) -> None:
    trials = recorded(folder / "sweep.db", "docker").trials.values()
    assert [trial.verdict for trial in trials] == ["reached", "reached"]
    for trial in trials:
        log = next(folder.glob(f"trials/{trial.number:04d}*/**/job.log")).read_text()
        assert f'"key": "seed", "value": {trial.metrics.seed},' in log
        assert f'"key": "opt_base_learning_rate", "value": {trial.parameters["LR"]}' in log
        passed = next(line for line in log.splitlines() if line.startswith("trained with:")).split()
        assert "NVTE_USE_HIPBLASLT" in passed
        assert "LOGDIR" not in passed  # the config does not export it


class TestSweep:
    def test_on_a_bare_host(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        image = engine(tree, monkeypatch)
        folder = swept(tree, study_text(tree, STANDIN_IMAGE=str(image)))
        expect_two_reached(folder)
        assert "container rm -f mlperf_llama2sft" in (image / "asked").read_text()
        told = CliRunner().invoke(
            export,
            ["--study", str(tree.parent / "docker.toml"), "--output", str(folder), "--to", str(tree.parent / "o")],
        )
        assert told.exit_code == 0, told.output
        (config,) = (tree.parent / "o").glob("config_MI300X_1x8x1*.sh")
        handed_over = recommend(load_study(tree.parent / "docker.toml"), recorded(folder / "sweep.db", "docker"))
        assert handed_over is not None
        assert f"seed {handed_over.trial.metrics.seed}" in config.read_text()
        assert (
            'pushd "$(dirname "${BASH_SOURCE[0]}")" >/dev/null\nsource ./config_MI300X_1x8x1.sh' in config.read_text()
        )

    @pytest.mark.slurm
    def test_under_slurm(self, tree: Path, slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        image = engine(tree, monkeypatch)
        expect_two_reached(swept(tree, study_text(tree, "slurm", STANDIN_IMAGE=str(image))))


def test_further_seeds_and_the_rules_of_the_score_apply_as_for_run_sub(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several seeds are one job, which the script runs one after another; each has the log that it writes."""
    image = engine(tree, monkeypatch)
    lines = 'score = "mlperf_score"\ncurves = "llama2_70b_lora"\n'
    text = study_text(tree, STANDIN_IMAGE=str(image)).replace("target = 0.925\n", f"target = 0.925\n{lines}")
    folder = swept(tree, text)
    options = ["--study", str(tree.parent / "docker.toml"), "--output", str(folder)]
    done = CliRunner().invoke(confirm, [*options, "--top", "1", "--seeds", "3", "--quiet"])
    assert done.exit_code == 0, done.output
    (job,) = (folder / "confirm" / "trials").glob("*/attempt-*")
    written = sorted(job.glob("results/result_*.txt"))
    assert [file.name for file in written] == ["result_0.txt", "result_1.txt", "result_2.txt"]
    drawn = [int(re.findall(r'"key": "seed", "value": (\d+)', file.read_text())[0]) for file in written]
    trials = recorded(folder / "sweep.db", "docker").trials.values()
    (best,) = [trial for trial in trials if trial.metrics.confirmed is not None]
    assert sorted(best.metrics.confirmed.seeds) == sorted(drawn), "the script's own, as the logs say"
    (config,) = (folder / "best").glob("config_*.sh")
    head = [line for line in config.read_text().splitlines() if line.startswith("# ")]
    assert any(line.startswith("# chosen with further seeds ") and str(drawn[0]) in line for line in head)
    assert any("RCP-normalised" in line or "olympic mean of 3 runs" in line for line in head)
    said = CliRunner().invoke(score, [str(SweepPaths(folder).confirm(best.number)), "--json"])
    (told,) = map(json.loads, said.stdout.splitlines())
    assert told["olympic_minutes"] is None or told["olympic_minutes"] > 0
    assert any("3" in sentence for sentence in told["sentences"]), "three of the ten runs that the rules want"


def test_the_closed_divisions_evals_and_the_machine_are_checked_as_for_run_sub(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine(tree, monkeypatch)
    base = tree / "config_MI300X_1x8x1.sh"
    base.write_text(base.read_text() + "export SKIP_EVALS=0 VAL_CHECK_INTERVAL=96\n")
    study, found = workload(tree)
    exports = found.exports(some_proposal(study))
    assert (exports["SKIP_EVALS"], exports["VAL_CHECK_INTERVAL"]) == (3, 384)
    (doubt,) = [doubt for doubt in found.check() if "evaluates otherwise than the rules" in doubt]
    assert "VAL_CHECK_INTERVAL=96 there and 384 in every other trial" in doubt
    base.write_text(re.sub(r"export (SKIP_EVALS|VAL_CHECK_INTERVAL)=.*\n", "", base.read_text()))
    silent = workload(tree)[1].check()
    assert not any("evaluates otherwise" in d for d in silent), "v5.1's training computes what no config sets"
    base.write_text(base.read_text() + "export DGXNGPU=4\n")
    with pytest.raises(SetupError, match=r"set site\.gpus_per_node = 4"):
        workload(tree)[1].check()
    several = study_text(tree).replace("gpus_per_node = 8", "gpus_per_node = 8\nnodes = 2").replace("local", "slurm")
    with pytest.raises(StudyError, match=r"site\.nodes.*on the one node"):
        load(parse_study(several, Path("t.toml")), "t.toml")


def test_a_starter_of_its_own_is_driven_as_the_page_says(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MangoBoost's folders: the training's own config as the base, in a container that the command starts."""
    image = engine(tree, monkeypatch)
    (image / "conf").mkdir()
    shutil.copy(tree / "config_MI300X_1x8x1.sh", image / "conf" / "config_MI325X_1x8x1.sh")
    page = (REPOSITORY / "docs" / "mlperf.md").read_text(encoding="utf-8")
    (text,) = (block for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if 'kind = "command"' in block)
    for old, new in (
        ("trials = 24", "trials = 2"),
        ('launcher = "local"', 'launcher = "local"\nenvironment = {{ {} }}'),
    ):
        assert old in text
        text = text.replace(old, new.format(f'STANDIN_IMAGE = "{image}"'))
    for name in ("data", "model"):
        (tree.parent / name).mkdir()
        text = text.replace(f'"/data/mlperf_llama2/{name}"', f'"{tree.parent / name}"')
    folder = swept(tree, text)
    first, second = recorded(folder / "sweep.db", "docker").trials.values()
    assert (first.verdict, second.verdict) == ("reached", "reached")
    assert first.parameters["LR"] == 4.5e-4
    for trial in (first, second):
        log = next(folder.glob(f"trials/{trial.number:04d}*/**/job.log")).read_text()
        assert f'"key": "opt_base_learning_rate", "value": {trial.parameters["LR"]}' in log
        assert "NVTE_USE_HIPBLASLT" in log, "of the folder's own config"
