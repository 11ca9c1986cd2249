"""The shipped study of every recipe: it loads, its proposals are legal, its page is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import StudyError
from lora_tune.config.layout import LayoutAxes, parse_layout
from lora_tune.config.study import Study, load_study, parse_study
from lora_tune.config.tables import Site
from lora_tune.workloads import load
from lora_tune.workloads.base import Job, Proposal
from lora_tune.workloads.mlperf import MlperfWorkload
from tests.conftest import REPOSITORY

STUDIES = REPOSITORY / "studies"
PAGES = {
    "p8000": "mlperf",
    "gb200": "mlperf",
    "llama31_405b": "mlperf",
    "peft_fsdp": "trainers",
    "torchrun_peft": "trainers",
    "command": "own-scripts",
}
"""Each recipe, and the page that names its study."""
RECIPES = tuple(PAGES)
STANDINS = REPOSITORY / "tests" / "standins"


def study_of(recipe: str, *changes: tuple[str, str]) -> Study:
    text = (STUDIES / f"{recipe}.toml").read_text(encoding="utf-8")
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    return parse_study(text, STUDIES / f"{recipe}.toml")


def job_of(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **parameters: object) -> Job:
    """The job of the study's first point, against the stand-in's folder where the recipe has one."""
    monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(STANDINS / recipe))
    study = study_of(recipe)
    point = {**study.search_space.corner(), **(study.search.enqueue[0] if study.search.enqueue else {}), **parameters}
    proposal = Proposal(number=3, attempt=0, seed=11, parameters=study.search_space.resolve(point))
    return load(study, f"{recipe}.toml").job(proposal, tmp_path / "attempt-0")


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_loads_and_has_a_page_that_names_it(recipe: str) -> None:
    study = load_study(STUDIES / f"{recipe}.toml")
    load(study, f"{recipe}.toml")
    page = (REPOSITORY / "docs" / f"{PAGES[recipe]}.md").read_text(encoding="utf-8")
    assert f"studies/{recipe}.toml" in page


@pytest.mark.parametrize("recipe", [r for r in RECIPES if r != "command"])
def test_every_layout_that_it_offers_divides_its_nodes(recipe: str) -> None:
    study = study_of(recipe)
    per_node = study.site.gpus_per_node
    found = 0
    for values in study.search_space.each_layout():
        gpus = int(values.get("NODES", study.site.nodes)) * per_node
        ranks = int(values["TP"]) * int(values["PP"]) * int(values["CP"])
        assert gpus % ranks == 0
        assert ranks <= gpus
        assert int(values["MINIBS"]) % int(values["MBS"]) == 0
        assert (int(values["MINIBS"]) * (gpus // (int(values["TP"]) * int(values["PP"])))) // int(values["CP"]) == (
            values["GBS"]
        ), "what the implementation's floored formula makes of it"
        found += 1
    assert found


@given(st.data())
def test_a_node_count_that_varies_is_never_offered_a_layout_that_it_cannot_hold(data: st.DataObject) -> None:
    axis = st.lists(st.integers(1, 16), min_size=1, max_size=4, unique=True)
    axes = {name: data.draw(axis, name) for name in ("nodes", "tp", "pp", "cp", "mbs", "gbs")}
    per_node = data.draw(st.sampled_from([1, 4, 8]))

    table = LayoutAxes.model_validate({**axes, "gbs": [8 * g for g in axes["gbs"]]}).enumerate(per_node, per_node)
    for layout in table.layouts:
        gpus = layout.nodes * per_node
        assert layout.nodes in axes["nodes"]
        assert gpus % (layout.tp * layout.pp * layout.cp) == 0
        assert layout.gbs(gpus) in [8 * g for g in axes["gbs"]]
        assert parse_layout(str(layout)) == layout


class TestPeftFsdp:
    def test_the_node_count_reaches_slurm_and_the_script(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        job = job_of("peft_fsdp", tmp_path, monkeypatch, layout="tp1 pp1 cp1 minibs8 mbs2 nodes64")
        assert (job.resources.nodes, job.resources.gpus_per_node) == (64, 8)
        assert job.argv[:3] == ("launch_70b.sh", "--per_device_train_batch_size=2", "--gradient_accumulation_steps=4")
        assert (job.environment["NODES"], job.environment["GPUS"], job.environment["GBS"]) == ("64", "512", "4096")
        assert job.script

    def test_the_grey_box_sampler_is_refused(self) -> None:
        with pytest.raises(StudyError, match=r"search\.sampler: grey_box models trials of one size"):
            study_of("peft_fsdp", ("[search]\n", '[search]\nsampler = "grey_box"\n'))


class TestNodesAsAPlainKnob:
    TEXT = """
[workload]
kind = "command"
argv = ["train.sub", "{NODES}", "{GPUS}"]
script = true
[site]
launcher = "slurm"
gpus_per_node = 4
[space]
NODES = NODES_HERE
PER_GPU = { type = "derived", formula = "64 // GPUS" }
[budget]
trials = 1
"""

    def test_it_sets_the_allocation_and_the_formulas(self, tmp_path: Path) -> None:
        study = parse_study(
            self.TEXT.replace("NODES_HERE", '{ type = "categorical", choices = [1, 2, 4] }'), Path("x.toml")
        )
        values = study.search_space.resolve({"NODES": 4})
        assert values["PER_GPU"] == 4
        job = load(study, "x.toml").job(Proposal(number=0, attempt=0, seed=1, parameters=values), tmp_path)
        assert (job.argv, job.resources.nodes) == (("train.sub", "4", "16"), 4)
        usage = load(study, "x.toml").export(Proposal(number=0, attempt=0, seed=1, parameters=values), ()).usage
        assert usage == "source config_LOCAL_4x4x1xtp1pp1cp1.sh && sbatch -N 4 train.sub 4 16"

    @pytest.mark.parametrize(
        ("nodes", "problem"),
        [
            ("0", "0 is not a node count"),
            ('{ type = "float", low = 1, high = 2 }', "cannot be float"),
            ('{ type = "categorical", choices = ["two"] }', "'two' is not a node count"),
            ('{ type = "derived", formula = "2" }', "cannot be derived"),
        ],
    )
    def test_what_is_no_node_count_is_refused(self, nodes: str, problem: str) -> None:
        with pytest.raises(StudyError, match=re.escape(problem)):
            parse_study(self.TEXT.replace("NODES_HERE", nodes), Path("x.toml"))

    def test_a_layout_has_an_axis_of_its_own(self) -> None:
        text = self.TEXT.replace("NODES_HERE", "2").replace(
            "PER_GPU", 'layout = { type = "layout", minibs = [1] }\nPER_GPU'
        )
        with pytest.raises(StudyError, match="NODES is set by the layout"):
            parse_study(text, Path("x.toml"))


class TestGb200:
    def test_a_trial_takes_the_rack_and_evaluates_every_387_samples(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job = job_of("gb200", tmp_path, monkeypatch)
        assert (job.resources.nodes, job.resources.gpus_per_node) == (18, 4)
        assert list(job.files) == ["config_GB200_18x4x1xtp1pp1cp8.sh"], "the published name"
        assert (job.environment["VAL_CHECK_INTERVAL"], job.environment["DGXNNODES"]) == ("387", "18")

    def test_no_batch_of_eight_exists_on_eighteen_nodes(self) -> None:
        with pytest.raises(StudyError, match="no layout of 72 GPUs satisfies"):
            study_of("gb200", ("gbs = [9, 18, 36, 72]", "gbs = [8]"))


class TestP8000:
    def test_env_sh_comes_first_and_the_site_settings_reach_every_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("CONT_FILE", raising=False)
        job = job_of("p8000", tmp_path, monkeypatch)
        assert job.environment["CONT_FILE"] == "/images/lora.sqsh", "what env.sh exports"
        assert (job.environment["GLOBAL_BATCH_SIZE"], job.environment["TP"]) == ("8", "4")
        assert job.environment["LOGDIR"].startswith(str(tmp_path)), "a log folder of its own, whatever env.sh says"
        monkeypatch.setenv("CONT_FILE", "/mine.sqsh")
        told = job_of("p8000", tmp_path, monkeypatch).environment["CONT_FILE"]
        assert told == "/images/lora.sqsh", "as by hand, where env.sh is sourced in the user's shell"

    def test_trial_zero_is_the_config_that_is_run_by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LORA_TUNE_IMPLEMENTATION", str(STANDINS / "p8000"))
        workload = load(study_of("p8000"), "p8000.toml")
        assert isinstance(workload, MlperfWorkload)
        begin = workload.start()
        assert begin is not None
        assert begin.name == "config_P8000_1x8x1xtp8pp1cp1.sh"
        assert (begin.parameters["TP"], begin.parameters["GBS"], begin.parameters["LR"]) == (8, 8, 4e-4)
        assert begin.tuned is not None, begin.outside


class TestLlama31405b:
    def test_the_published_layout_under_its_own_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("PREPROC_DATA", "LOAD_CHECKPOINTS_PATH", "TOKENIZER"):
            monkeypatch.setenv(name, f"/shared/{name.lower()}")
        job = job_of("llama31_405b", tmp_path, monkeypatch)
        assert list(job.files) == ["config_GB200_128x4x112xtp4pp8cp2_cg-dplast.sh"]
        wanted = {
            "TENSOR_MODEL_PARALLEL": "4",
            "PIPELINE_MODEL_PARALLEL": "8",
            "INTERLEAVED_PIPELINE": "8",
            "CONTEXT_PARALLEL": "2",
            "MINIBS": "112",
            "MODEL_SIZE": "405b",
            "PREPROC_DATA": "/shared/preproc_data",
            "LOAD_CHECKPOINTS_PATH": "/shared/load_checkpoints_path",
            "TOKENIZER": "/shared/tokenizer",
        }
        assert wanted.items() <= job.environment.items()
        assert float(job.environment["LR"]) == pytest.approx(8e-5 * 896 / 1152)
        assert "VAL_CHECK_INTERVAL" not in job.environment, "this implementation keeps the schedule by itself"
        assert job.resources.nodes == 128

    @pytest.mark.parametrize(
        ("line", "problem"),
        [
            (
                "LR = 8e-5",
                "LR = 8e-05 at GBS 896: in the closed division of llama31_405b opt_base",
            ),
            ('LR = { type = "float", low = 1e-5, high = 1e-4 }', "LR is tuned"),
            (
                "WEIGHT_DECAY = 0.01",
                "WEIGHT_DECAY = 0.01 at GBS 896: in the closed division of",
            ),
            (
                "WARMUP_STEPS = 8000",
                "WARMUP_STEPS = 8000 at GBS 896: in the closed division of",
            ),
        ],
    )
    def test_the_rules_tie_the_rate_to_the_batch(self, line: str, problem: str) -> None:
        rate = 'LR = { type = "derived", formula = "8e-5 * GBS / 1152" }'
        replaced = line if line.startswith("LR") else f"{rate}\n{line}"
        with pytest.raises(StudyError, match=re.escape(problem)):
            study_of("llama31_405b", (rate, replaced))
        study_of("llama31_405b", (rate, replaced), ('division = "closed"', 'division = "open"'))


class TestTheLineThatIsTypedByHand:
    def test_names_the_site_s_options_and_as_many_nodes_as_the_trial_has(self) -> None:
        site = Site.model_validate(
            {"nodelist": "p8000-[1-4],x", "account": "a b", "gres": "gpu:8", "mpi": "pmi2", "sbatch_args": ["--nice=5"]}
        )
        assert site.sbatch_arguments(1) == ("-A", "a b", "-w", "p8000-1", "--gres=gpu:8", "--nice=5")
        assert site.sbatch_arguments(2)[3] == "p8000-1,p8000-2"
        assert site.step_variables() == {"SLURM_GRES": "gpu:8", "SLURM_MPI_TYPE": "pmi2"}
        assert Site.model_validate({}).sbatch_arguments(3) == ()
