"""Folders as vendors publish them: other common files, none, code in the container, scripts that need more."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError, SetupError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.controller.runtime import preflight_warnings
from lora_tune.workloads import load
from lora_tune.workloads.base import Job, some_proposal
from lora_tune.workloads.implementation import read_implementation
from lora_tune.workloads.mlperf import MlperfWorkload
from lora_tune.workloads.script_needs import needed_variables, path_warnings, requested_nodes, script_warnings

STANDIN = Path(__file__).resolve().parents[1] / "standin"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder of one's own, as the stand-in has it."""
    return Path(shutil.copytree(STANDIN, tmp_path / "tree"))


def workload(
    tree: Path, system: str = "H100", environment: dict[str, str] | None = None, **settings: object
) -> tuple[Study, MlperfWorkload]:
    study = Study.model_validate(
        {
            "name": "t",
            "workload": {"kind": "mlperf", "implementation": str(tree), **settings},
            "site": {
                "launcher": "slurm",
                "gpus_per_node": 8,
                "system": system,
                "container": "image",
                "data": "/data",
                "model": "/model",
                "environment": environment or {},
            },
            "space": {"LR": 4e-4, "MAX_STEPS": 800, "layout": {"type": "layout", "tp": [4], "gbs": [8]}},
            "budget": {"trials": 1},
        }
    )
    found = load(study, "t.toml")
    assert isinstance(found, MlperfWorkload)
    return study, found


def launch_only(tree: Path) -> None:
    """As Oracle, Lenovo and Lambda publish it: configs and run.sub, the training lies in the image."""
    for name in ("conf", "train.py", "run_and_time.sh", "mountcheck.py"):
        path = tree / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()


class TestCommonFiles:
    def test_the_one_shared_config_is_found_whatever_its_name(self, tree: Path, tmp_path: Path) -> None:
        (tree / "configs").mkdir()
        (tree / "config_common.sh").rename(tree / "configs" / "config_XD670_common.sh")
        study, found = workload(tree)
        job = found.job(some_proposal(study), tmp_path / "a")
        assert found.implementation.common == ("configs/config_XD670_common.sh",)
        lines = f"pushd {tree}/configs >/dev/null\nsource ./config_XD670_common.sh\npopd >/dev/null\n"
        assert lines in next(iter(job.files.values()))

    def test_of_several_the_study_names_those_that_count(self, tree: Path) -> None:
        (tree / "config_common.sh").rename(tree / "config_common_fp8.sh")
        (tree / "config_common_bf16.sh").write_text("export PRECISION=bf16\n")
        with pytest.raises(SetupError, match=r"config_common_bf16.sh, config_common_fp8.sh.*workload.common"):
            read_implementation(tree, "run.sub")
        assert read_implementation(tree, "run.sub", ["config_common_fp8.sh"]).common == ("config_common_fp8.sh",)

    def test_a_folder_may_have_none(self, tree: Path, tmp_path: Path) -> None:
        (tree / "config_common.sh").unlink()
        study, found = workload(tree)
        job = found.job(some_proposal(study), tmp_path / "a")
        assert found.implementation.common == ()
        assert "source" not in next(iter(job.files.values()))

    def test_a_missing_script_names_those_that_are_there(self, tree: Path) -> None:
        (tree / "run.sub").rename(tree / "run_4n.sub")
        with pytest.raises(SetupError, match=r"holds no run.sub.*workload.script may be one of run_4n.sub"):
            read_implementation(tree, "run.sub")


class TestCodeInTheContainer:
    def test_any_knob_is_passed_on_and_the_sweep_says_why(self, tree: Path, tmp_path: Path) -> None:
        launch_only(tree)
        study, found = workload(tree)
        environment = found.job(some_proposal(study), tmp_path / "a").environment
        assert (environment["LR"], environment["MAX_STEPS"], environment["TP"]) == ("0.0004", "800", "4")
        assert "GBS" not in environment  # it follows from MINIBS, as in every implementation
        assert any("lies in the container" in doubt for doubt in found.check())

    def test_saying_so_silences_it_and_saying_otherwise_refuses_the_knob(self, tree: Path, tmp_path: Path) -> None:
        launch_only(tree)
        _, said = workload(tree, reads="container")
        assert not any("lies in the container" in doubt for doubt in said.check())
        study, denied = workload(tree, reads="folder")
        with pytest.raises(InputError, match=r"no file in .* reads LR"):
            denied.job(some_proposal(study), tmp_path / "a")

    def test_names_may_be_listed_beside_those_that_files_read(self, tree: Path, tmp_path: Path) -> None:
        (tree / "conf" / "megatron_gpt_peft_tuning_config.yaml").write_text("lr: ${oc.decimal:${oc.env:LR,4e-4}}\n")
        study, found = workload(tree, reads=["MAX_STEPS", "TP", "MINIBS", "MBS", "VAL_CHECK_INTERVAL"])
        assert found.job(some_proposal(study), tmp_path / "a").environment["MAX_STEPS"] == "800"

    def test_where_configs_export_a_knob_under_its_other_name_that_name_is_taken(
        self, tree: Path, tmp_path: Path
    ) -> None:
        launch_only(tree)
        for config in tree.glob("config_*.sh"):
            config.write_text(config.read_text().replace("export TP=", "export TENSOR_MODEL_PARALLEL="))
        (tree / "config_common.sh").open("a").write("export TENSOR_MODEL_PARALLEL=8\n")
        study, found = workload(tree)
        environment = found.job(some_proposal(study), tmp_path / "a").environment
        assert environment["TENSOR_MODEL_PARALLEL"] == "4"


def test_a_system_name_may_have_an_underscore(tree: Path, tmp_path: Path) -> None:
    study, found = workload(tree, system="XD670_H200")
    job = found.job(some_proposal(study), tmp_path / "a")
    assert list(job.files) == ["config_XD670_H200_1x8x4xtp4pp1cp1.sh"]
    assert job.environment["DGXSYSTEM"] == "XD670_H200_1x8x4xtp4pp1cp1"


class TestWhatAScriptNeeds:
    def needed(self, tmp_path: Path, text: str) -> list[str]:
        (tmp_path / "run.sub").write_text(text)
        return [found.name for found in needed_variables(tmp_path / "run.sub")]

    @pytest.mark.parametrize(
        ("text", "names"),
        [
            ('set -eux\n: "${CONT:?CONT not set}"\nmounts="${WORK_DIR}:/work"\n', ["CONT", "WORK_DIR"]),
            ("set -euxo pipefail\necho $A ${B} ${C%.sh} ${D[0]} ${#E} $A\n", ["A", "B", "C", "D", "E"]),
            ("set -o nounset\necho $A\n", ["A"]),
            ('echo $A\n: "${B:?}"\n', ["B"]),  # without set -u an unset name is empty
            ("set -u\n: ${A:=1} ${B:-2} ${C-} ${D:+x}\nE=1; export F=2; readonly G=3\necho $A $E $F $G\n", []),
            ("set -u\nfor i in 1 2; do echo $i $A; done\nread -r B; echo $B\n", ["A"]),
            ("set -u\nif [[ $A ]]; then\n  echo $B\nfi\ncase x in y) echo $C;; esac\necho $D\n", ["A", "D"]),
            ("set -u\n# $A\nbash -c 'echo $B' ; echo \\$C # $D\necho \"it's $E\"\n", ["E"]),
            ("set -u\ncat <<'EOF'\n$A\nEOF\ncat <<EOF\n\\$B $C\nEOF\n", ["C"]),
            ("#!/bin/bash -eu\necho $A\n", ["A"]),
            ("set -Eeuo pipefail\necho $A\nset +u\necho $B\nset -e -o nounset\necho $C\n", ["A", "C"]),
            ("echo $A  # as empty\nset -u\necho $B\n", ["B"]),
            ("set -u\nread -r A B <<<'1 2'\nmapfile -t C < <(ls)\nprintf -v D '%s' x\necho $A $B $C $D\n", []),
            ("set -u\nwhile getopts 'a:' A; do echo $A $OPTARG; done\nlet B=1; echo $B\n", []),
            ("set -u\necho $SLURM_JOB_ID $HOME $RANDOM ${BASH_SOURCE[0]}\n", []),
        ],
    )
    def test_names_without_which_it_ends_at_once(self, tmp_path: Path, text: str, names: list[str]) -> None:
        assert self.needed(tmp_path, text) == names

    def test_what_a_file_beside_it_sets_or_needs_counts(self, tmp_path: Path) -> None:
        (tmp_path / "config_mounts.sh").write_text('_mounts="${DATADIR}:/data"\n')
        text = 'set -u\nsource ${RUNSUB_DIR:-.}/config_mounts.sh\necho "$_mounts"\n'
        assert self.needed(tmp_path, text) == ["DATADIR"]

    @given(st.text(alphabet="set -u$A{}:?'\"#\n\\<EOFif;case ", max_size=80))
    def test_no_text_is_too_odd(self, text: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            assert all(name.isidentifier() for name in self.needed(Path(folder), text))

    def test_each_doubt_says_what_ends_and_what_to_do(self, tmp_path: Path) -> None:
        (tmp_path / "run.sub").write_text(
            "set -eux\nsource config_DGXB200_1x8x1xtp1pp1cp1.sh\necho ${WORK_DIR} ${KNOWN}\n"
            "srun ./run_and_time.sh\nbash ./tunables.sh\n"
        )
        for name in ("run_and_time.sh", "tunables.sh"):  # bash reads the second, whatever its mode
            (tmp_path / name).write_text("true\n")
        needs, sources, started = script_warnings(tmp_path / "run.sub", {"KNOWN"})
        assert "needs WORK_DIR, which nothing sets" in needs
        assert "set WORK_DIR in [site.environment]" in needs
        assert "sources config_DGXB200_1x8x1xtp1pp1cp1.sh itself" in sources
        assert f"chmod +x {tmp_path}/run_and_time.sh" in started
        (tmp_path / "run_and_time.sh").chmod(0o755)
        assert len(script_warnings(tmp_path / "run.sub", {"KNOWN", "WORK_DIR"})) == 1

    @pytest.mark.parametrize(
        "line",
        [
            'export -p > "${LOGDIR}/${SLURM_JOB_ID}_${i}.env"',
            'srun env | sort >> "${LOGDIR}/${SLURM_JOB_ID}_${i}.env"',
        ],
    )
    def test_a_script_that_saves_its_whole_environment_is_told_of(self, tmp_path: Path, line: str) -> None:
        """v6.0's run.sub does, and the folder of the logs is read by more than those who may read a token."""
        (tmp_path / "run.sub").write_text(f"for i in 1 2; do\n  {line}\ndone\nenv FOO=1 echo > out\nexport -p\n")
        (doubt,) = script_warnings(tmp_path / "run.sub", ())
        assert '"${LOGDIR}/${SLURM_JOB_ID}_${i}.env"' in doubt
        assert "keep secrets out of [site.environment]" in doubt

    @pytest.mark.parametrize("line", ["#SBATCH -w hpf-s[0-15]", "#SBATCH --nodelist=hpf-s[0-15]"])
    def test_nodes_that_a_script_asks_for_by_name(self, tmp_path: Path, line: str) -> None:
        (tmp_path / "run.sub").write_text(f"#!/bin/bash\n#SBATCH --mem=0\n{line}\nset -eux\n")
        assert requested_nodes(tmp_path / "run.sub") == "hpf-s[0-15]"
        (tmp_path / "run.sub").write_text("#!/bin/bash\n#SBATCH --nodes=2\n")
        assert requested_nodes(tmp_path / "run.sub") == ""

    def test_the_sweep_and_its_dry_run_say_it_beforehand(self, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WORK_DIR", "/work")  # of the shell's variables few reach a job
        (tree / "run.sub").open("a").write('echo "${WORK_DIR}"\n')
        _, found = workload(tree)
        assert any("needs WORK_DIR" in doubt for doubt in found.check())
        _, told = workload(tree, environment={"WORK_DIR": "/work"})
        assert not any("needs WORK_DIR" in doubt for doubt in told.check())


class TestPathsWithBlanks:
    """Launch scripts name their own folder and the log folder without quotes: where these have blanks no trial runs."""

    @pytest.mark.parametrize(
        ("line", "cut"),
        [
            ("export HERE=$(dirname $(scontrol show job $SLURM_JOB_ID | sed -n s/Command=//p))", "tree"),
            ("cd $SCRIPT_DIR", "tree"),
            ("source ${RUNSUB_DIR}/config_mounts.sh", "tree"),
            (". $(dirname $0)/mounts.sh", "tree"),
            ('srun --container-mounts="$(realpath ${LOGDIR}):/results" true', "logs"),
            ('cd "${SCRIPT_DIR}" && source "$(dirname "$0")/mounts.sh" && ls $(realpath "$LOGDIR")', ""),
            ("# cd $SCRIPT_DIR", ""),
            ("cd ..", ""),
        ],
    )
    def test_are_told_with_the_line_that_cuts_them(self, tmp_path: Path, line: str, cut: str) -> None:
        places = {name: tmp_path / f"my {name}" for name in ("tree", "logs")}
        places["tree"].mkdir()
        (places["tree"] / "run.sub").write_text(f"set -eux\n{line}\n")
        job = Job(
            name="x", folder=tmp_path, argv=("run.sub",), cwd=places["tree"], log=tmp_path / "log",
            environment={"LOGDIR": str(places["logs"])},
        )  # fmt: skip
        told = path_warnings(job)
        assert [f"{places[cut]} has a space in it" in words and line in words for words in told] == [True] * bool(cut)
        plain = replace(job, environment={"LOGDIR": "/logs"}, cwd=places["tree"].rename(tmp_path / "tree"))
        assert path_warnings(plain) == []

    def test_a_command_that_ends_like_a_script_is_none(self, tmp_path: Path) -> None:
        words = f"export A=1; {'python train.py && ' * 30}bash finish.sh"
        job = Job(name="x", folder=tmp_path, argv=("bash", "-c", words), log=tmp_path / "log", environment={})
        assert path_warnings(job) == []

    def test_a_sweep_says_it_before_its_first_trial(self, tree: Path, tmp_path: Path) -> None:
        (tree / "run.sub").open("a").write("cd $SCRIPT_DIR\n")
        for place, told in ((tree, False), (tmp_path / "my tree", True)):
            study, found = workload(tree.rename(place))
            said = preflight_warnings(found, study, SweepPaths(tmp_path / "sweep"))
            assert any(f"{place} has a space in it" in words for words in said) is told
            tree = place


class TestStartersOfTheirOwn:
    """Folders without a script that a workload drives: what starts the training there is said in plain words."""

    @pytest.mark.parametrize(
        ("scripts", "words"),
        [
            (
                {"docker_run.sh": "docker run --rm $IMAGE sleep inf\ndocker exec $C x --config_sh conf/config_$X.sh\n"},
                r"docker_run\.sh starts a container by itself, .* takes conf/config_\$X\.sh from the image; .*command",
            ),
            ({"start.sh": "sudo podman run -e A $IMAGE\n"}, "passes on only the variables that it names"),
            (
                {"batch.sh": "for i in 1; do\n  mpirun -np 64 bash launch.sh 1\ndone\n",
                 "launch.sh": "source $HERE/config_H100_8x8x1xtp4pp1cp2.sh\n"},
                r"batch\.sh starts ranks by mpirun.*launch\.sh sources config_H100_8x8x1xtp4pp1cp2\.sh itself",
            ),
            ({"run_and_time.sh": "CMD=( 'torchrun' )\n${CMD[@]} src/train.py\n"}, "in a container that runs already"),
            ({"run_with_docker.sh": "docker run x\n"}, 'workload.kind = "mlperf_docker"'),
            ({"notes.sh": "# docker run, says its comment\necho done\n"}, "is it the implementation's folder"),
        ],
        ids=["own config", "container", "mpirun", "bare training", "of another workload", "none"],
    )  # fmt: skip
    def test_are_named_with_what_can_drive_them(self, tmp_path: Path, scripts: dict[str, str], words: str) -> None:
        for name, text in scripts.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(SetupError, match=words):
            read_implementation(tmp_path, "run.sub")
