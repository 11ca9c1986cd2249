"""The mlperf workload: what it writes for a trial, and what it refuses."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.errors import InputError, Level, SetupError, StudyError
from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.mlperf.benchmark import find_benchmark
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Value
from lora_tune.workloads.implementation import files_reading, sourced, sourced_file
from lora_tune.workloads.mlperf import MlperfWorkload, spelled

STANDIN = Path(__file__).resolve().parents[1] / "standin"
GOLDEN = Path(__file__).resolve().parents[1] / "golden"

BEST: dict[str, Value] = {
    "LR": 4e-4,
    "MAX_STEPS": 800,
    "TP": 4,
    "PP": 1,
    "CP": 1,
    "MINIBS": 4,
    "MBS": 1,
    "SP": 1,
    "GBS": 8,
}


def workload(
    implementation: Path = STANDIN, *, division: str = "open", workload: dict[str, Any] | None = None, **site: Any
) -> MlperfWorkload:
    """A workload of one node with eight GPUs."""
    study = Study.model_validate(
        {
            "name": "h100",
            "division": division,
            "workload": {"kind": "mlperf", "implementation": str(implementation), **(workload or {})},
            "site": {"launcher": "slurm", "system": "DGXH100", "gpus_per_node": 8, **site},
            "space": {"LR": 4e-4, "layout": {"type": "layout", "tp": [4], "minibs": [4]}},
            "budget": {"trials": 1, "trial_minutes": 50},
        }
    )
    found = load(study, "h100.toml")
    assert isinstance(found, MlperfWorkload)
    return found


def proposal(parameters: dict[str, Value] | None = None, **fields: Any) -> Proposal:
    return Proposal(number=7, attempt=0, seed=11, parameters=parameters or BEST, **fields)


CONFIG = "config_DGXH100_1x8x4xtp4pp1cp1.sh"
"""The stand-in's own config."""


@pytest.fixture
def implementation(tmp_path: Path) -> Path:
    """A copy of the stand-in that a test may change."""
    return Path(shutil.copytree(STANDIN, tmp_path / "implementation"))


@pytest.fixture
def bare(implementation: Path) -> Path:
    """The same without any machine's own config."""
    (implementation / CONFIG).unlink()
    return implementation


class TestConfig:
    def test_the_file_of_the_best_public_configuration(self, tmp_path: Path) -> None:
        job = workload().job(proposal(), tmp_path)
        (name,) = job.files
        assert name == "config_DGXH100_1x8x4xtp4pp1cp1.sh"
        text = job.files[name].replace(str(STANDIN), "/opt/llama2_70b_lora")
        assert text == (GOLDEN / "mlperf_config.sh").read_text()

    def test_the_job_is_run_sub_in_its_own_folder_with_a_log_folder_of_its_own(self, tmp_path: Path) -> None:
        job = workload().job(proposal(), tmp_path)
        assert (job.argv, job.script, job.cwd) == (("run.sub",), True, STANDIN)
        assert job.name == "h100-0007-0"
        assert job.environment["LOGDIR"] == str(tmp_path / "results")
        assert job.environment["SEED_BASE"] == "11"
        assert (job.resources.nodes, job.resources.gpus_per_node, job.resources.minutes) == (1, 8, 60.0)

    def test_what_sbatch_is_given_is_what_sourcing_the_file_exports(self, tmp_path: Path) -> None:
        job = workload().job(proposal(), tmp_path)
        ((name, text),) = job.files.items()
        exported = sourced(text, name)
        assert {key: job.environment[key] for key in exported} == exported
        assert exported["DGXSYSTEM"] == "DGXH100_1x8x4xtp4pp1cp1"
        assert exported["WALLTIME"] == "60"

    def test_nothing_of_the_submitting_shell_is_in_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("MAX_STEPS", "1")
        monkeypatch.setenv("HEALING_ITER", "350")
        environment = workload().job(proposal(), tmp_path).environment
        assert environment["MAX_STEPS"] == "800"
        assert "HEALING_ITER" not in environment

    def test_container_data_and_model_come_from_the_site_or_from_the_shell(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CONT", "/images/lora.sqsh")
        monkeypatch.setenv("DATADIR", "/elsewhere")
        environment = workload(data="/data").job(proposal(), tmp_path).environment
        assert environment["CONT"] == "/images/lora.sqsh"
        assert environment["DATADIR"] == "/data"

    def test_common_files_may_lie_in_configs_and_be_several(self, implementation: Path, tmp_path: Path) -> None:
        (implementation / "configs").mkdir()
        (implementation / "config_common.sh").rename(implementation / "configs" / "config_common.sh")
        (implementation / "configs" / "config_common_fp8attn.sh").write_text("export FP8_AMAX_ALGO=most_recent\n")
        found = workload(implementation, workload={"common": ["config_common_fp8attn.sh"]})
        job = found.job(proposal(), tmp_path / "a")
        assert job.environment["FP8_AMAX_ALGO"] == "most_recent"
        usage = found.export(proposal(), ()).usage
        assert f"{implementation}/configs/" in usage
        assert "source configs/config_DGXH100_1x8x4xtp4pp1cp1.sh" in usage

    def test_replicates_are_run_subs_own_experiments(self, tmp_path: Path) -> None:
        job = workload().job(proposal(replicates=10), tmp_path)
        assert job.environment["NEXP"] == "10"
        assert job.environment["WALLTIME"] == str(5 + 10 * 55)
        assert job.resources.minutes == 555.0

    def test_a_probe_ends_after_a_cold_and_a_warm_block(self, tmp_path: Path) -> None:
        environment = workload().job(proposal(probe=True), tmp_path).environment
        assert (environment["VAL_CHECK_INTERVAL"], environment["SKIP_EVALS"]) == ("128", "0")
        assert environment["MAX_STEPS"] == "32"

    def test_many_nodes(self, tmp_path: Path) -> None:
        parameters = {**BEST, "MINIBS": 1, "CP": 2, "GBS": 8}
        job = workload(nodes=8).job(proposal(parameters), tmp_path)
        assert list(job.files) == ["config_DGXH100_8x8x1xtp4pp1cp2.sh"]
        assert job.environment["DGXNNODES"] == "8"


class TestEvals:
    @pytest.mark.parametrize(
        ("gbs", "skip", "interval"), [(8, 3, 384), (16, 4, 384), (32, 6, 384), (48, 8, 384), (9, 3, 387)]
    )
    def test_the_schedule_follows_from_the_batch(self, tmp_path: Path, gbs: int, skip: int, interval: int) -> None:
        environment = workload().job(proposal({**BEST, "GBS": gbs}), tmp_path).environment
        assert environment["SKIP_EVALS"] == str(skip)
        assert environment["VAL_CHECK_INTERVAL"] == str(interval)

    def test_earlier_evals_outside_of_the_closed_division(self, tmp_path: Path) -> None:
        found = workload(workload={"first_eval": 768, "eval_every": 192})
        environment = found.job(proposal(), tmp_path).environment
        assert (environment["VAL_CHECK_INTERVAL"], environment["SKIP_EVALS"]) == ("192", "3")

    def test_the_closed_division_refuses_them(self) -> None:
        with pytest.raises(StudyError, match="the closed division fixes the evals"):
            workload(division="closed", workload={"first_eval": 384})

    @pytest.mark.parametrize("interval", [50, 384, 1152])
    def test_a_tuned_interval_alone_moves_no_other_variable_of_the_schedule(
        self, interval: int, tmp_path: Path
    ) -> None:
        """SKIP_EVALS was added, to leave the first eval where the closed division has it: 50 died at sample 1,150."""
        values = proposal({**BEST, "VAL_CHECK_INTERVAL": interval})
        (config,) = workload().job(values, tmp_path).files.values()
        assert "SKIP_EVAL" not in config
        assert workload().first_eval(values) == (interval, 6400)
        stated = workload(workload={"first_eval": 1152})
        assert f"SKIP_EVALS={round(1152 / interval) - 1}" in next(iter(stated.job(values, tmp_path).files.values()))

    def test_it_is_left_alone_where_the_implementation_derives_it(self, implementation: Path, tmp_path: Path) -> None:
        conf = implementation / "conf" / "megatron_gpt_peft_tuning_config.yaml"
        conf.write_text(conf.read_text().replace("  skip_evals: ${oc.env:SKIP_EVALS,0}\n", ""))
        environment = workload(implementation).job(proposal(), tmp_path / "a").environment
        assert "SKIP_EVALS" not in environment


class TestNames:
    def test_a_knob_that_nothing_reads_is_refused_with_what_is_near(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"space.FP8_AMAX_ALG: .* no effect; it reads FP8_AMAX_ALGO"):
            workload().job(proposal({**BEST, "FP8_AMAX_ALG": "max"}), tmp_path)

    def test_a_variable_that_configs_only_export_is_not_read(self, tmp_path: Path) -> None:
        assert "LEFTOVER_KNOB" not in files_reading(STANDIN)
        with pytest.raises(InputError, match="LEFTOVER_KNOB"):
            workload().job(proposal({**BEST, "LEFTOVER_KNOB": 1}), tmp_path)

    @pytest.mark.parametrize("name", ["NCCL_NVLS_ENABLE", "NVTE_FUSED_ATTN", "CUDA_DEVICE_MAX_CONNECTIONS"])
    def test_what_libraries_read_is_allowed(self, tmp_path: Path, name: str) -> None:
        assert workload().job(proposal({**BEST, name: 1}), tmp_path).environment[name] == "1"

    def test_rounds_differ_in_names(self, implementation: Path, tmp_path: Path) -> None:
        """FP8_ACTIVATION, WARMUP_RATIO and SKIP_EVALS of v4.x are FP8_ACT, WARMUP_STEPS and SKIP_EVAL in v5.0."""
        parameters = {**BEST, "FP8_ACT": 1, "WARMUP_STEPS": 40}
        old = workload().job(proposal(parameters), tmp_path / "a").environment
        assert (old["FP8_ACTIVATION"], old["WARMUP_RATIO"], old["SKIP_EVALS"]) == ("1", "0.05", "3")
        conf = implementation / "conf" / "megatron_gpt_peft_tuning_config.yaml"
        text = conf.read_text().replace("FP8_ACTIVATION", "FP8_ACT").replace("SKIP_EVALS", "SKIP_EVAL")
        conf.write_text(text.replace("WARMUP_RATIO,0.0", "WARMUP_STEPS,0"))
        new = workload(implementation).job(proposal(parameters), tmp_path / "b").environment
        assert (new["FP8_ACT"], new["WARMUP_STEPS"], new["SKIP_EVAL"]) == ("1", "40", "3")
        assert not {"FP8_ACTIVATION", "WARMUP_RATIO", "SKIP_EVALS"} & set(new)

    @pytest.mark.parametrize(
        ("file", "line", "read"),
        [
            ("a.sh", 'echo "${KNOB:-1}"', True),
            ("a.sub", "[ $KNOB -gt 0 ]", True),
            ("a.py", "os.environ['KNOB']", True),
            ("a.py", 'int(os.getenv("KNOB", 1))', True),
            ("a.py", 'get_env_bool("KNOB")', True),
            ("a.yaml", "knob: ${oc.decode:${oc.env:KNOB,1}}", True),
            ("config_x.sh", "export KNOB=1", False),
            ("a.py", "KNOB = 1", False),
            ("README.md", "export KNOB; $KNOB", False),
            ("results/a.sh", "$KNOB", False),
        ],
    )
    def test_what_counts_as_reading(self, tmp_path: Path, file: str, line: str, read: bool) -> None:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(line + "\n")
        assert ("KNOB" in files_reading(tmp_path)) is read

    def test_a_degree_of_one_needs_no_reader(self, implementation: Path) -> None:
        conf = implementation / "conf" / "megatron_gpt_peft_tuning_config.yaml"
        conf.write_text("\n".join(line for line in conf.read_text().splitlines() if "env:CP" not in line))
        found = workload(implementation).implementation
        found = type(found)(folder=found.folder, common=found.common, reads=found.reads - {"CP"}, values={})
        assert "CP" not in spelled({"CP": 1, "MINIBS": 1}, found)
        with pytest.raises(InputError, match="CP"):
            spelled({"CP": 2, "MINIBS": 1}, found)

    def test_an_implementation_with_a_batch_size_of_its_own_gets_it(self, implementation: Path, tmp_path: Path) -> None:
        (implementation / "run_and_time.sh").open("a").write('echo "$GLOBAL_BATCH_SIZE"\n')
        assert workload(implementation).job(proposal(), tmp_path / "a").environment["GLOBAL_BATCH_SIZE"] == "8"

    @pytest.mark.parametrize("values", [{"FP8": "True", "FP4": "True"}, {"CP_EVAL": 2}])
    def test_illegal_combinations(self, implementation: Path, tmp_path: Path, values: dict[str, Value]) -> None:
        (implementation / "run_and_time.sh").open("a").write('echo "$FP4 $CP_EVAL"\n')
        with pytest.raises(InputError):
            workload(implementation).job(proposal({**BEST, **values}), tmp_path / "a")


class TestExport:
    def test_the_export_sources_from_its_own_folder_and_gives_the_same_values(self, bare: Path, tmp_path: Path) -> None:
        found = workload(bare)
        export = found.export(proposal(), ("trial 7 of study h100", "reached 0.9236\nwith a newline"))
        ((name, text),) = export.files.items()
        assert name == "config_DGXH100_1x8x4xtp4pp1cp1.sh"
        assert "# trial 7 of study h100" in text.splitlines()
        (bare / name).write_text(text)
        by_hand = sourced_file(bare / name)
        environment = found.job(proposal(), tmp_path / "a").environment
        assert {key: environment[key] for key in by_hand} == by_hand

    def test_a_common_file_in_a_folder_whose_name_has_spaces(self, bare: Path, tmp_path: Path) -> None:
        """It sources what lies beside it from its own name without quotes, as the public ones do."""
        spaced = bare.rename(tmp_path / "my tree")
        (spaced / "more.sh").write_text("export NCCL_TUNER=here\n")
        (spaced / "config_common.sh").open("a").write("source $(dirname ${BASH_SOURCE[0]})/more.sh\n")
        found = workload(spaced)
        job = found.job(proposal(), tmp_path / "a")
        ((name, text),) = found.export(proposal(), ()).files.items()
        (spaced / name).write_text(text)
        assert sourced_file(spaced / name)["NCCL_TUNER"] == job.environment["NCCL_TUNER"] == "here"
        (config,) = job.files.values()
        assert sourced(config, name)["NCCL_TUNER"] == "here"


class TestSurroundings:
    def test_a_missing_folder_says_where_it_was_looked_for(self, tmp_path: Path) -> None:
        with pytest.raises(SetupError, match=r"nowhere does not exist; .*LORA_TUNE_IMPLEMENTATION"):
            workload(tmp_path / "nowhere").job(proposal(), tmp_path)

    def test_a_common_file_that_fails(self, implementation: Path, tmp_path: Path) -> None:
        (implementation / "config_common.sh").write_text("echo broken >&2\nfalse\n")
        with pytest.raises(SetupError, match="cannot be sourced: broken"):
            workload(implementation).job(proposal(), tmp_path)

    def test_mounts_cannot_reach_run_subs_steps(self) -> None:
        with pytest.raises(StudyError, match=r"site\.container_mounts"):
            workload(container_mounts=["/a:/a"])

    @pytest.mark.parametrize("folder", ["with space", "quo'te", 'dou"ble', "dol$lar", "back`tick", "semi;colon", "é"])
    def test_hostile_folders(self, tmp_path: Path, folder: str) -> None:
        """A trial's folder may be called anything; what its config exports stays the same."""
        place = tmp_path / folder
        implementation = Path(shutil.copytree(STANDIN, place / "implementation"))
        job = workload(implementation).job(proposal(), place / "trial")
        place.joinpath("trial").mkdir()
        ((name, text),) = job.files.items()
        (place / "trial" / name).write_text(text)
        exported = sourced_file(place / "trial" / name)
        assert exported["DGXSYSTEM"] == "DGXH100_1x8x4xtp4pp1cp1"
        assert exported["LR"] == "0.0004"
        assert job.environment["LOGDIR"] == str(place / "trial" / "results")


class TestCheck:
    """What every trial needs is looked for before the first is proposed."""

    def test_container_data_and_model_have_to_be_set(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
    ) -> None:
        for name in ("CONT", "DATADIR", "MODEL"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(SetupError, match=r"CONT is not set, and .* needs it; set site\.container"):
            workload().check()
        with pytest.raises(SetupError, match=r"set site\.data"):
            workload(container="registry/image:1").check()
        monkeypatch.setenv("MODEL", str(tmp_path))
        assert workload(bare, container="registry/image:1", data=tmp_path).check() == []

    @pytest.mark.parametrize("benchmark", ["llama2_70b_lora", "llama31_8b"])
    def test_the_doctor_speaks_of_each_missing_place_once(
        self, benchmark: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
    ) -> None:
        """run.sub's own demand and the place's finding were two problems, with two remedies."""
        places = {"CONT": "container", "DATADIR": "data folder", "MODEL": "model folder"}
        for name in places:
            monkeypatch.delenv(name, raising=False)
        script = (bare / "run.sub").read_text().replace(': "${CONT', ': "${DATADIR}${MODEL}${ELSEWHERE}"\n: "${CONT')
        (bare / "run.sub").write_text(script)
        made = workload(bare, workload={"benchmark": benchmark})
        whats = [f.what for f in made.findings(SweepPaths(tmp_path / "s")) if f.level is Level.PROBLEM]
        for name, words in places.items():
            about = [what for what in whats if name in what.split() or words in what or f"needs {name}" in what]
            assert len(about) == 1, (name, whats)
        assert [what for what in whats if "needs ELSEWHERE" in what]

    def test_a_path_that_only_a_node_may_see_is_a_doubt(self, tmp_path: Path, bare: Path) -> None:
        (doubt,) = workload(bare, container="registry/image:1", data="/raid/nowhere", model=tmp_path).check()
        assert "DATADIR=/raid/nowhere is not there as this machine sees it" in doubt

    def test_a_script_that_has_a_value_of_its_own_needs_none(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bare: Path
    ) -> None:
        monkeypatch.delenv("CONT", raising=False)
        script = (bare / "run.sub").read_text().replace("${CONT:?CONT not set}", "${CONT:=registry/image}")
        (bare / "run.sub").write_text(script)
        assert workload(bare, data=tmp_path, model=tmp_path).check() == []


@pytest.mark.parametrize(
    ("line", "stated"),
    [
        (': "${MLPERF_RULESET:=5.1.0}"', "5.1.0"),
        ("export MLPERF_RULESET=4.1.0", None),  # an old line, which public trees of later benchmarks have
        ('export MLPERF_RULESET="6.1.0"', "6.1.0"),
        ("export MLPERF_RULESET=9.9.9", None),
        ("true", None),
    ],
)
def test_the_ruleset_is_the_one_that_the_script_names(line: str, stated: str | None, tmp_path: Path) -> None:
    (tmp_path / "run.sub").write_text(f"#!/bin/bash\n{line}\n")
    study = Study.model_validate(
        {
            "name": "t",
            "workload": {"kind": "mlperf", "implementation": str(tmp_path), "benchmark": "llama31_8b"},
            "space": {"LR": 4e-4},
            "budget": {"trials": 1},
        }
    )
    newest = find_benchmark("llama31_8b").ruleset
    assert study.ruleset("llama31_8b") == stated
    assert study.benchmark is not None
    assert study.benchmark.ruleset == (stated or newest), "score, recommendation and rules judge by one round"


def test_the_target_is_that_of_the_round_that_the_script_names(tmp_path: Path) -> None:
    (tmp_path / "run.sub").write_text("#!/bin/bash\nexport MLPERF_RULESET=1.1.0\n")
    table = {
        "name": "t",
        "workload": {"kind": "mlperf", "implementation": str(tmp_path), "benchmark": "ssd"},
        "space": {"LR": 4e-4},
        "budget": {"trials": 1},
    }
    assert Study.model_validate(table).objective.target == 0.23, "later rounds ask for 0.34"
    assert Study.model_validate({**table, "objective": {"ruleset": "4.1"}}).objective.target == 0.34
    assert Study.model_validate({**table, "objective": {"target": 0.3}}).objective.target == 0.3
