"""The doctor: every finding says what, why and how to fix it, and is right about it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from lora_tune.base.errors import Finding, LauncherError, Level, free_space
from lora_tune.cli import doctor as checks
from lora_tune.config.study import Study
from lora_tune.config.tables import Site
from lora_tune.doctor import main
from lora_tune.launchers.slurm.submission import as_submitted
from lora_tune.workloads import load, training_files
from lora_tune.workloads.base import Workload
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.contracts.launcher import job_of

STANDIN = Path(__file__).resolve().parents[1] / "standin"


def levels(findings: object) -> list[Level]:
    return [finding.level for finding in findings]  # type: ignore[attr-defined]


def assert_complete(finding: Finding) -> None:
    """What is not good says why and how to fix it."""
    assert finding.what
    assert bool(finding.why) == bool(finding.fix) == (finding.level is not Level.GOOD)


class TestContainer:
    def test_a_squashfs_file_is_good(self, tmp_path: Path) -> None:
        image = tmp_path / "lora.sqsh"
        image.write_bytes(b"hsqs" + bytes(100))
        assert training_files.container(str(image)).level is Level.GOOD

    @pytest.mark.parametrize("content", [b"", b"<html>not found</html>"])
    def test_another_file_is_not(self, tmp_path: Path, content: bytes) -> None:
        image = tmp_path / "lora.sqsh"
        image.write_bytes(content)
        finding = training_files.container(str(image))
        assert finding.level is Level.PROBLEM
        assert_complete(finding)

    @pytest.mark.parametrize("image", [None, "", "/nowhere/lora.sqsh"])
    def test_none(self, image: str | None) -> None:
        assert training_files.container(image).level is Level.PROBLEM

    def test_a_registry_is_slow(self) -> None:
        finding = training_files.container("nvcr.io#nvidia/mlperf/lora:latest")
        assert finding.level is Level.WARNING
        assert "enroot import" in finding.fix


class TestTrees:
    def test_data_is_looked_at_file_by_file(self, tmp_path: Path) -> None:
        (tmp_path / "gov_report").mkdir()
        (tmp_path / "gov_report" / "train.npy").write_bytes(b"\x93NUMPY" + bytes(200))
        (tmp_path / "gov_report" / "validation.npy").write_bytes(b"truncated by a full disk")
        train, validation = training_files.data(str(tmp_path))
        assert (train.level, validation.level) == (Level.GOOD, Level.PROBLEM)
        assert_complete(validation)

    def test_a_missing_array(self, tmp_path: Path) -> None:
        assert levels(training_files.data(str(tmp_path))) == [Level.PROBLEM, Level.PROBLEM]

    @pytest.mark.parametrize(
        ("small", "weights"),
        [
            ("context/model.yaml", "weights/shard"),
            ("model_config.yaml", "model_weights/shard"),
            ("notes.txt", "llama2-70b.nemo"),
            ("model/iter_0000000/run_config.yaml", "model/iter_0000000/__0_0.distcp"),
            ("config.json", "model-00001-of-00015.safetensors"),
        ],
    )
    def test_a_checkpoint_of_any_round_whole_cut_short_and_with_an_empty_file(
        self, tmp_path: Path, small: str, weights: str
    ) -> None:
        for name in (small, weights):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / small).write_text("x")
        with (tmp_path / weights).open("wb") as shard:
            shard.truncate(140 * 10**9)  # sparse: takes no room
        assert levels(training_files.model(str(tmp_path))) == [Level.GOOD]
        (tmp_path / weights).write_bytes(b"x" * 1000)
        (cut,) = training_files.model(str(tmp_path))
        assert cut.level is Level.PROBLEM
        assert "130 GB" in cut.what
        (tmp_path / weights).write_bytes(b"")
        (empty,) = training_files.model(str(tmp_path))
        assert (empty.level, "is empty" in empty.what) == (Level.PROBLEM, True)

    def test_a_checkpoint_of_which_a_part_is_missing_or_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "context").mkdir()
        missing, *_ = training_files.model(str(tmp_path))
        assert str(tmp_path / "weights") in missing.what
        (tmp_path / "context").rmdir()
        (unknown,) = training_files.model(str(tmp_path))
        assert "NeMo 2 (v5.0, v5.1): context, weights" in unknown.what

    def test_nothing(self) -> None:
        assert levels(training_files.data(None)) == levels(training_files.model(None)) == [Level.PROBLEM]


class TestDisks:
    @pytest.mark.parametrize(
        ("kind", "level"),
        [("ext4", Level.GOOD), ("xfs", Level.GOOD), ("nfs4", Level.PROBLEM), ("lustre", Level.PROBLEM)],
    )
    def test_sqlite_and_network_file_systems(self, kind: str, level: Level) -> None:
        mounts = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n40 27 0:40 / /home\\040of rw - {kind} server:/home rw\n"
        finding = checks.database_file(Path("/home of/u/sweeps/h100"), mounts)
        assert finding.level is level
        assert_complete(finding)

    def test_a_database_in_a_folder_that_is_not_there(self, tmp_path: Path) -> None:
        """A sweep cannot begin there; doctor said "ok" and on which file system it was."""
        finding = checks.chosen_database(tmp_path / "not there" / "sweep.db")
        assert finding.level is Level.PROBLEM
        assert_complete(finding)
        assert checks.chosen_database(tmp_path / "sweep.db").level is Level.GOOD

    def test_free_space(self, tmp_path: Path) -> None:
        assert free_space(tmp_path / "not" / "yet", 0.0, "why").level is Level.GOOD
        assert free_space(tmp_path, 1e9, "why").level is Level.PROBLEM


class TestBandwidth:
    """A healthy node's all-reduce has two thirds of its links' rate; across nodes the network decides."""

    @pytest.mark.parametrize(
        ("reading", "device", "system", "nodes", "level"),
        [
            ("334.5", "", "DGXH100", 1, Level.GOOD),
            ("212.7", "", "DGXH100", 1, Level.WARNING),
            ("212.7", "", "DGX-A100", 1, Level.GOOD),
            ("334.5", "", "XE9680Lx8B200", 1, Level.WARNING),
            ("334.5", "#  Rank  0 on n1 device  0 [0x1b] NVIDIA B200", "mine", 1, Level.WARNING),
            ("334.5", "#  Rank  0 on n1 device  0 [0x1b] NVIDIA H100 80GB HBM3", "B200", 1, Level.GOOD),
            ("48.1", "", "DGXH100", 4, Level.GOOD),
            ("48.1", "", "P8000", 1, Level.GOOD),
        ],
    )
    def test_of_the_newest_test(
        self, tmp_path: Path, reading: str, device: str, system: str, nodes: int, level: Level
    ) -> None:
        folder = tmp_path / "trials" / "0001"
        folder.mkdir(parents=True)
        (folder / "x_nccl.log").write_text(f"{device}\n0: # Avg bus bandwidth    : {reading} \n")
        finding = training_files.bandwidth([tmp_path], system, nodes)
        assert finding.level is level
        assert reading.rstrip("0") in finding.what

    def test_none_yet(self, tmp_path: Path) -> None:
        (tmp_path / "x_nccl.log").write_text("all_reduce_perf failed\n")
        assert training_files.bandwidth([tmp_path], "DGXH100", 1).level is Level.GOOD


def test_sudo_calls_of_run_sub(tmp_path: Path) -> None:
    implementation = Path(shutil.copytree(STANDIN, tmp_path / "implementation"))
    text = ': "${DROPCACHE_CMD:="sudo /sbin/sysctl vm.drop_caches=3"}"\nsrun bash -c "sudo nvidia-smi boost-slider"\n'
    (implementation / "run.sub").open("a").write(text)
    assert workload_of(implementation).sudo_calls() == ["/sbin/sysctl", "nvidia-smi"]


def workload_of(implementation: Path, **settings: str) -> Workload:
    return load(
        Study.model_validate(
            {
                "name": "examined",
                "workload": {"kind": "mlperf", "implementation": str(implementation), **settings},
                "space": {"LR": {"type": "float", "low": 1e-4, "high": 1e-3}},
                "budget": {"trials": 1},
            }
        ),
        "examined.toml",
    )


def test_sudo_calls_are_those_of_the_script_that_is_launched(tmp_path: Path) -> None:
    (tmp_path / "run_with_docker.sh").write_text("sudo /usr/local/bin/set_power\n")
    (tmp_path / "config_common.sh").write_text(": ${LR} ${MAX_STEPS}\n")
    (tmp_path / "config_MI300X_1x8x1.sh").write_text("export LR=0.0004\n")
    (tmp_path / "run.sub").write_text("sudo reboot\n")
    assert workload_of(tmp_path, kind="mlperf_docker").sudo_calls() == ["/usr/local/bin/set_power"]


def test_sudo_calls_of_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert workload_of(tmp_path / "nowhere").sudo_calls() == []


OWN_WORKLOAD = """
from lora_tune.base.errors import problem
from lora_tune.workloads.command import CommandWorkload

class Licensed(CommandWorkload):
    engine = "podman"

    def findings(self, paths):
        yield problem("no licence", "the trainer asks for one", "export LICENCE=KEY")

    def known_places(self):
        return {}

    def sudo_calls(self):
        return []
"""


def test_a_workload_of_somebody_else_says_what_it_needs(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(OWN_WORKLOAD)
    (tmp_path / "study.toml").write_text(
        f"""
        [workload]
        kind = "{tmp_path / "theirs.py"}:Licensed"
        argv = ["train"]
        log = {{ kind = "mllog" }}
        [objective]
        metric = "eval_loss"
        [space]
        LR = {{ type = "float", low = 1e-4, high = 1e-3 }}
        [budget]
        trials = 1
        """
    )
    done = CliRunner().invoke(main, ["--study", str(tmp_path / "study.toml"), "--output", str(tmp_path / "sweep")])
    assert done.exit_code == 3
    assert "PROBLEM  no licence\n           why:  the trainer asks for one" in done.output


def answering(**outputs: str) -> Callable[..., str]:
    """A cluster that prints ``outputs`` for the commands named, and refuses the others."""

    def ask(*command: str) -> str:
        if command[0] not in outputs:
            raise LauncherError(f"{command[0]} failed: no")
        return outputs[command[0]]

    return ask


H100 = Site(launcher="slurm", gpus_per_node=8, partition="gpu")


class TestCluster:
    @pytest.mark.parametrize(
        ("rows", "level", "word"),
        [
            ("n1|idle|gpu:h100:8|gpu*\nn2|allocated|gpu:h100:8(S:0-1)|gpu*", Level.GOOD, "2 of 2"),
            ("n1|drained|gpu:h100:8|gpu*\nn2|down*|gpu:8|gpu*", Level.WARNING, "0 of 2"),
            ("n1|idle|gpu:a100:4|gpu*", Level.PROBLEM, "0 nodes"),
            ("n1|idle|(null)|gpu*", Level.PROBLEM, "0 nodes"),
            ("", Level.PROBLEM, "no nodes"),
        ],
    )
    def test_partitions(self, rows: str, level: Level, word: str) -> None:
        finding = checks.partition(answering(sinfo=rows), H100)
        assert finding.level is level
        assert word in finding.what
        assert_complete(finding)

    def test_a_cluster_that_knows_no_gpus(self) -> None:
        ask = answering(sinfo="n1|idle|(null)|gpu*\nn2|down|(null)|gpu*")
        finding = checks.partition(ask, H100)
        assert (finding.level, 'gres = "none"' in finding.fix) == (Level.PROBLEM, True)
        finding = checks.partition(ask, H100.model_copy(update={"gres": "none"}))
        assert finding.what == 'partition gpu: 1 of 2 whole nodes (site.gres = "none") are up'
        assert finding.level is Level.GOOD

    @pytest.mark.parametrize(
        ("site", "minutes", "words"),
        [
            ({"partition": "short"}, 60, "a trial asks for 60 minutes, and its partition allows less (short: 30:00)"),
            ({"sbatch_args": ("-p", "short")}, 60, "(short: 30:00)"),
            ({"partition": "short,gpu"}, 60, ""),
            ({"partition": "short,gpu"}, 3000, "(gpu: 1-00:00:00, short: 30:00)"),
            ({}, 3000, "(gpu: 1-00:00:00)"),
            ({}, 60, ""),
            ({"partition": "long"}, 3000, ""),
            ({"partition": "short"}, 30, ""),
            ({"partition": "short"}, 0, ""),
            ({"partition": "odd"}, 60, ""),
        ],
    )
    def test_a_trial_longer_than_its_partition_allows(
        self, tmp_path: Path, site: dict[str, Any], minutes: float, words: str
    ) -> None:
        ask = answering(sinfo="gpu*|1-00:00:00\nshort|30:00\nlong|infinite\nodd|n/a\n")
        submitted = as_submitted(job_of(tmp_path, ""), Site.model_validate({"launcher": "slurm", **site}))
        shown = list(checks.time_limit(ask, submitted, minutes))
        assert [words in finding.what for finding in shown] == [True] * bool(words)
        assert levels(shown) == [Level.PROBLEM] * bool(words)

    def test_a_qos_may_allow_more_than_the_partition(self) -> None:
        site = Site(launcher="slurm", qos="long")
        (finding,) = checks.time_limit(answering(sinfo="gpu*|30:00"), site, 60)
        assert finding.level is Level.WARNING
        assert_complete(finding)

    @pytest.mark.parametrize(
        ("gres", "gpus"),
        [("gpu:8", 8), ("gpu:h100:8(S:0-1)", 8), ("nvme:2,gpu:h100:4", 4), ("(null)", 0), ("mps:gpu:3,shard:8", 0)],
    )
    def test_gpus_in_gres(self, gres: str, gpus: int) -> None:
        assert checks.gpus_of(gres) == gpus

    @pytest.mark.parametrize(("text", "level"), [("--container-image=IMAGE", Level.GOOD), ("Usage", Level.PROBLEM)])
    def test_pyxis(self, text: str, level: Level) -> None:
        assert checks.pyxis(answering(srun=text)).level is level

    def test_mpi_types(self) -> None:
        ask = answering(
            srun="MPI plugin types are...\n\tpmi2\n\tnone\nspecific pmix plugin versions available: pmix_v4\n"
        )
        assert checks.mpi(ask, H100.model_copy(update={"mpi": "pmi2"})).level is Level.GOOD
        finding = checks.mpi(ask, H100.model_copy(update={"mpi": "openmpi"}))
        assert finding.level is Level.PROBLEM
        assert "pmi2" in finding.what

    @pytest.mark.parametrize(
        ("text", "types"),
        [
            ("srun: MPI types are...\nsrun: none\nsrun: pmi2\n", {"none", "pmi2"}),
            (
                "MPI plugin types are...\n\tpmix\n\tnone\nspecific pmix plugin versions available: pmix_v4,pmix_v5\n",
                {"pmix", "none", "pmix_v4", "pmix_v5"},
            ),
        ],
    )
    def test_lists_of_mpi_types_of_old_and_new_slurm(self, text: str, types: set[str]) -> None:
        assert checks.mpi_types(text) == types

    def test_what_does_not_answer_is_a_finding_not_a_crash(self) -> None:
        silent = answering()
        for finding in (
            checks.controller(silent),
            checks.accounting(silent),
            checks.partition(silent, H100),
            checks.pyxis(silent),
            checks.mpi(silent, H100),
            checks.accepted(silent, ["sbatch", "--test-only", "run.sub"]),
        ):
            assert finding.level is not Level.GOOD
            assert_complete(finding)


class TestProbe:
    def test_each_answer_belongs_to_its_question(self) -> None:
        asked = checks.questions_of(H100, {"DATADIR": "/data", "CONT": "/x.sqsh"}, Path("/sweeps"), ["nvidia-smi"])
        log = "\n".join(
            f"doctor: {n} {'no' if q.name in ('mpi', 'sudo nvidia-smi') else 'yes'}" for n, q in enumerate(asked)
        )
        found = list(checks.answers(asked, "noise\n" + log))
        bad = {q.name: f.level for q, f in zip(asked, found, strict=True) if f.level is not Level.GOOD}
        assert bad == {"mpi": Level.PROBLEM, "sudo nvidia-smi": Level.WARNING}
        for finding in found:
            assert_complete(finding)

    def test_no_answer_is_a_problem(self) -> None:
        asked = checks.questions_of(H100, {}, Path("/sweeps"), [])
        assert set(levels(checks.answers(asked, ""))) == {Level.PROBLEM}


STUDY = """
[workload]
kind = "mlperf"
implementation = '{implementation}'
[site]
launcher = "slurm"
gpus_per_node = 8
gres = "gpu:8"
mpi = '{mpi}'
data = '{data}'
[space]
LR = {{ type = "float", low = 1e-4, high = 1e-3 }}
layout = {{ type = "layout", tp = [4], gbs = [8] }}
{extra}
[budget]
trials = 1
"""


def examine(folder: Path, *options: str, extra: str = "", mpi: str = "none") -> tuple[int, str]:
    """The doctor's exit code and words on a study of the stand-in."""
    (folder / "data").mkdir()
    study = folder / "study.toml"
    values: Mapping[str, str] = {"implementation": str(STANDIN), "data": str(folder / "data"), "mpi": mpi}
    study.write_text(STUDY.format(extra=extra, **values))
    done = CliRunner().invoke(main, ["--study", str(study), "--output", str(folder / "sweep"), *options])
    return done.exit_code, done.output


@pytest.mark.slurm
class TestOnTheTestCluster:
    def test_the_probe_looks_from_a_node(self, slurm: Cluster, tmp_path: Path) -> None:
        code, said = examine(tmp_path, "--probe")
        for line in (
            "ok       slurm-wlm",
            "ok       the cluster: 4 of 4 nodes with 8 GPUs are up",
            "ok       MPI type none is offered",
            "ok       sbatch accepts a trial's options",
            "warning  sacct does not work",
            "ok       on a node: 8 tasks a node start with MPI type none",
            "ok       on a node: a step sees 8 GPUs",
            f"ok       on a node: the node sees and writes {tmp_path / 'sweep'}",
            f"ok       on a node: the node reads DATADIR={tmp_path / 'data'}",
        ):
            assert line in said
        assert code == 3  # there is neither a container nor data
        assert f"PROBLEM  {tmp_path / 'data' / 'train.npy'} is not there" in said

    def test_an_mpi_type_that_does_not_work_and_a_knob_that_nothing_reads(self, slurm: Cluster, tmp_path: Path) -> None:
        code, said = examine(tmp_path, extra="LEFTOVER_KNOB = 1", mpi="openmpi")
        assert code == 3
        assert "PROBLEM  MPI type openmpi is not offered; there are cray_shasta, none, pmi2, pmix" in said
        assert "PROBLEM  space.LEFTOVER_KNOB: no file" in said

    def test_a_probe_that_waits_too_long_is_cancelled(self, slurm: Cluster, tmp_path: Path) -> None:
        for node in slurm.nodes:
            slurm.drain(node)
        try:
            code, said = examine(tmp_path, "--probe", "--probe-minutes", "0.05")
        finally:
            for node in slurm.nodes:
                slurm.resume(node)
        assert code == 3
        assert "PROBLEM  the probe is still queued" in said
        assert "0 of 4 suitable nodes of the cluster are up" in said


def test_a_job_of_several_packs_wants_nodes_with_a_gpu_for_each() -> None:
    site = Site.model_validate({"launcher": "slurm", "gpus_per_node": 1, "slots": 4, "packs": 8})

    def shown(gpus: int) -> str:
        return checks.partition(lambda *_: f"node1|idle|gpu:h100:{gpus}(S:0-1)|batch*", site).what

    assert shown(4) == "0 nodes of the cluster have 8 GPUs; a job needs 1"
    assert shown(8) == "the cluster: 1 of 1 nodes with 8 GPUs are up"


def test_without_slurm_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    code, said = examine(tmp_path)
    assert code == 3
    assert "sbatch, squeue, scancel" in said
    assert "--study tiny runs without Slurm" in said


class TestOtherRecipes:
    """The doctor with the studies of other MLPerf folders."""

    @staticmethod
    def told(study: str, folder: Path, *options: str, replaced: tuple[str, str] = ("", "")) -> str:
        text = (REPOSITORY / "studies" / f"{study}.toml").read_text(encoding="utf-8").replace(*replaced)
        (folder / "studies").mkdir()
        (folder / "studies" / f"{study}.toml").write_text(text)
        shutil.copytree(REPOSITORY / "studies" / "sites", folder / "studies" / "sites")
        file = folder / "studies" / f"{study}.toml"
        return CliRunner().invoke(main, ["--study", str(file), "--output", str(folder / "sweep"), *options]).output

    def test_405b_names_the_mounts_that_are_missing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(STANDIN.parent / "standins" / "llama31_405b"))
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "tokens").touch()
        monkeypatch.setenv("PREPROC_DATA", str(tmp_path / "data"))
        monkeypatch.setenv("LOAD_CHECKPOINTS_PATH", str(tmp_path / "nowhere"))
        monkeypatch.delenv("TOKENIZER", raising=False)
        told = self.told("llama31_405b", tmp_path)
        assert f"PREPROC_DATA: {tmp_path / 'data'}\n" in told
        assert f"LOAD_CHECKPOINTS_PATH: {tmp_path / 'nowhere'} is not there or empty" in told
        assert "TOKENIZER is not set" in told
        assert "Llama-2-70B" not in told

    def test_p8000_takes_what_env_sh_says(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("CONT", "CONT_FILE", "DATADIR", "MODEL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(STANDIN.parent / "standins" / "p8000"))
        told = self.told("p8000", tmp_path)
        assert "container /images/lora.sqsh is not there" in told
        assert "/data/gov_report/train.npy is not there" in told

    @pytest.mark.slurm
    def test_what_env_sh_names_is_looked_for_on_a_node_too(
        self, slurm: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("CONT", "CONT_FILE", "DATADIR", "MODEL"):
            monkeypatch.delenv(name, raising=False)
        shutil.copytree(STANDIN.parent / "standins" / "p8000", tmp_path / "p8000")
        (tmp_path / "p8000" / "run.sub").rename(tmp_path / "p8000" / "their.sub")
        with (tmp_path / "p8000" / "their.sub").open("a") as script:
            script.write("sudo nvidia-smi boost-slider --vboost 1\n")
        monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(tmp_path / "p8000"))
        real = 'kind = "mlperf"\n'
        told = self.told("p8000", tmp_path, "--probe", replaced=(real, real + 'script = "their.sub"\n'))
        assert "srun knows no --container-image" in told
        assert "not true on a node: the node has enroot" in told
        assert "not true on a node: the node reads CONT=/images/lora.sqsh" in told
        assert "not true on a node: the node reads DATADIR=/data/gov_report" in told
        assert "sudo nvidia-smi needs no password" in told
