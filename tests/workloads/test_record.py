"""One effective record of a trial: every reader of a value sees the same one.

Readers: the job's environment, the record that its log is held against, the starting point, rules and doctor, the
eval schedule, disclosures and export.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study, closed_violations
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal, Value
from lora_tune.workloads.base_config import parameters_at
from lora_tune.workloads.mlperf import MlperfWorkload, about_base, findings
from lora_tune.workloads.record import record_of

CONFIG = "config_DGXH100_1x8x4xtp4pp1cp1.sh"
LORA = "export LR=0.0004 MAX_STEPS=800 TP=4 PP=1 CP=1 MBS=1 MINIBS=4 DGXNNODES=1 DGXNGPU=8 VAL_CHECK_INTERVAL=384\n"
EIGHT_B = "export LR=0.0005 MAX_STEPS=1200000 MICRO_BATCH_SIZE=1 MINIBS=4 DGXNNODES=1 DGXNGPU=8\n"
RATE = {"type": "float", "low": 1e-5, "high": 1e-3, "log": True}


def tree(
    folder: Path,
    config: str,
    *,
    yaml: str = "",
    benchmark: str = "llama2_70b_lora",
    space: dict[str, Any] | None = None,
    **study: Any,
) -> MlperfWorkload:
    """A folder whose training reads what ``yaml`` names, and whose config exports ``config``."""
    (folder / "conf").mkdir(parents=True)
    names = ("LR", "MAX_STEPS", "TP", "PP", "CP", "MBS", "MINIBS", "VAL_CHECK_INTERVAL", "SKIP_EVALS")
    lines = [f"x_{name}: ${{oc.env:{name}}}" for name in names if name not in yaml]
    (folder / "conf" / "training.yaml").write_text("\n".join([*lines, yaml, ""]))
    (folder / "run.sub").write_text('#!/bin/bash\nsrun --container-image="${CONT}" ./run_and_time.sh $DATADIR\n')
    (folder / CONFIG).write_text(config)
    made = Study.model_validate(
        {
            "name": "t",
            "workload": {"kind": "mlperf", "implementation": str(folder), "base": CONFIG, "benchmark": benchmark},
            "site": {"launcher": "slurm", "system": "DGXH100", "gpus_per_node": 8, **study.pop("site", {})},
            "space": {"LR": RATE} if space is None else space,
            "budget": {"trials": 3, "trial_minutes": 50},
            **study,
        }
    )
    workload = load(made, "t.toml")
    assert isinstance(workload, MlperfWorkload)
    return workload


def trial(workload: MlperfWorkload, **tuned: Value) -> Proposal:
    """A trial at a point of the space, as the driver makes it; the base's own point where nothing is tuned."""
    start = workload.start()
    assert start is not None
    parameters = parameters_at(start, workload.study.search_space, tuned) if tuned else start.parameters
    return Proposal(number=1, attempt=0, seed=7, parameters=parameters)


def environment(workload: MlperfWorkload, proposal: Proposal, folder: Path) -> dict[str, str]:
    return dict(workload.job(proposal, folder).environment)


@pytest.mark.parametrize("null", ["null", "None", "NULL", "Null", "none"])
def test_null_in_the_base_is_no_value_to_any_reader(tmp_path: Path, null: str) -> None:
    """126 public configs say ``INTERLEAVED_PIPELINE=null``, and the YAML's default is 12."""
    workload = tree(
        tmp_path / "tree",
        LORA + f"export INTERLEAVED_PIPELINE={null}\n",
        yaml="vp: ${oc.env:INTERLEAVED_PIPELINE,12}",
    )
    proposal = trial(workload, LR=5e-4)
    assert environment(workload, proposal, tmp_path / "a")["INTERLEAVED_PIPELINE"] == null
    record = workload.written(proposal)
    assert record.value("VP") is None
    assert "INTERLEAVED_PIPELINE" not in record
    assert (record.layout.vp, workload.proposed(proposal).layout.vp) == (1, 1)
    start = workload.start()
    assert start is not None
    assert "VP" not in start.parameters
    ((_, text),) = workload.export(proposal, ()).files.items()
    assert "INTERLEAVED_PIPELINE" not in text


def test_a_name_that_no_file_reads_is_no_value_where_another_name_is_read(tmp_path: Path) -> None:
    """Dell's v5.1 config exports FP8_ACTIVATION, and its folder reads FP8_ACT alone, with the default 0."""
    workload = tree(
        tmp_path / "tree",
        LORA + "export FP8_ACTIVATION=1\n",
        yaml="act: ${oc.env:FP8_ACT,0}",
        space={"LR": RATE, "FP8_ACT": {"type": "categorical", "choices": [0, 1]}},
    )
    start = workload.start()
    assert start is not None
    assert start.parameters["FP8_ACT"] == 0, "trial 0 runs without it, whatever its config meant"
    assert workload.written(trial(workload)).value("FP8_ACTIVATION") == 0
    assert workload.written(trial(workload)).unread == {"FP8_ACTIVATION": 1}
    assert any("exports FP8_ACTIVATION=1, which no file in" in sentence for sentence in about_base(workload))
    both = tree(tmp_path / "both", LORA + "export FP8_ACTIVATION=1 FP8_ACT=1\n", yaml="act: ${oc.env:FP8_ACT,0}")
    assert not [s for s in about_base(both) if "FP8_ACT" in s], "an export for both rounds is heeded"
    on = trial(workload, LR=4e-4, FP8_ACT=1)
    assert environment(workload, on, tmp_path / "a")["FP8_ACT"] == "1"
    assert workload.written(on).value("FP8_ACT") == 1


def test_a_probe_is_written_with_its_own_steps_and_its_own_evals(tmp_path: Path) -> None:
    space = {"LR": RATE, "MAX_STEPS": {"type": "int", "low": 500, "high": 1000, "step": 50}}
    workload = tree(tmp_path / "tree", LORA, space=space)
    probe = replace(trial(workload, LR=4e-4, MAX_STEPS=850), probe=True)
    there, record = environment(workload, probe, tmp_path / "a"), workload.written(probe)
    assert [there[n] for n in ("MAX_STEPS", "VAL_CHECK_INTERVAL", "SKIP_EVALS")] == ["32", "128", "0"]
    assert [record.value(n) for n in ("MAX_STEPS", "VAL_CHECK_INTERVAL", "SKIP_EVALS")] == [32, 128, 0]
    assert workload.first_eval(probe) == (128, 256)
    assert (record.gbs, record["GBS"]) == (8, 8)


@pytest.mark.parametrize(
    ("benchmark", "config", "interval", "steps", "first"),
    [
        pytest.param("llama2_70b_lora", LORA, 384, False, (384, 6400), id="samples"),
        pytest.param(
            "llama2_70b_lora", LORA.replace("=384", "=48"), 48, True, (384, 6400), id="steps, by the rules' interval"
        ),
        pytest.param("llama31_8b", EIGHT_B + "export VAL_CHECK_INTERVAL=384\n", 384, True, (12288, 38.4e6), id="8B"),
        pytest.param(
            "llama31_8b", EIGHT_B + "export VAL_CHECK_INTERVAL=12288\n", 12288, False, (12288, 38.4e6), id="8B, samples"
        ),
    ],
)
def test_evals_are_counted_as_the_tree_counts_them(
    benchmark: str, config: str, interval: int, steps: bool, first: tuple[float, float], tmp_path: Path
) -> None:
    """A tree whose own interval is the rules' in steps counts steps, and others count samples.

    Told otherwise, trials evaluated eight times too rarely, or at every step.
    """
    workload = tree(tmp_path / "tree", config, benchmark=benchmark)
    assert workload.counts_steps() is steps
    proposal = trial(workload, LR=5e-4)
    assert environment(workload, proposal, tmp_path / "a")["VAL_CHECK_INTERVAL"] == str(interval)
    record = workload.written(proposal)
    skipped = int(record.number("SKIP_EVALS") or 0)
    assert record.value("VAL_CHECK_INTERVAL") == interval
    assert workload.first_eval(proposal) == (first[0] * (1 + skipped), first[1])
    assert not [s for s in about_base(workload) if "evaluates otherwise" in s and "VAL_CHECK" in s]


@pytest.mark.parametrize(
    ("default", "config", "system", "told"),
    [
        ("b", "", "DGXH100", "by the default in"),
        ("b", "", "XE9680x8H200", "by the default in"),
        ("blackwell", "export GPU_ARCH=b\n", "H100", f"by {CONFIG}"),
        ("h", "", "B200", "by the default in"),
        ("b", "export GPU_ARCH=h\n", "DGXH100", ""),
        ("b", "", "GB200", ""),
        ("b", "", "P8000", ""),
    ],
)
@pytest.mark.parametrize("python", [False, True])
def test_another_machines_architecture_is_told_of(
    default: str, config: str, system: str, told: str, python: bool, tmp_path: Path
) -> None:
    """v5.0 and v5.1 take Blackwell's tables of tensor-parallel overlap unless GPU_ARCH says otherwise."""
    yaml = "" if python else f"arch: ${{oc.env:GPU_ARCH,{default}}}"
    workload = tree(tmp_path / "tree", LORA + config, yaml=yaml, site={"system": system})
    if python:
        (tmp_path / "tree" / "train.py").write_text(f'import os\narch = os.getenv("GPU_ARCH", "{default}")\n')
    sentences = [s for s in about_base(workload) if "GPU_ARCH" in s]
    assert [told in s for s in sentences] == ([True] if told else [])
    stated = workload.written(trial(workload, LR=5e-4))["GPU_ARCH"]
    assert stated == (config.strip().rpartition("=")[2] or default)


@pytest.mark.parametrize(
    ("config", "layout", "told"),
    [
        ("export TP=1 SP=1\n", None, "trial 0 has SP on with TP=1"),
        ("export TP=1 SP=0\n", None, ""),
        ("export TP=4 SP=1\n", None, ""),
        (
            "export TP=4 SP=True\n",
            {"type": "layout", "tp": [1, 4], "gbs": [8]},
            "a trial with tp1 pp1 cp1 minibs1 mbs1",
        ),
        ("export TP=4 SP=1\n", {"type": "layout", "tp": [1, 4], "sp": [0, 1], "gbs": [8]}, ""),
    ],
)
def test_sequence_parallel_without_tensor_parallel_is_told_of(
    config: str, layout: dict[str, Any] | None, told: str, tmp_path: Path
) -> None:
    """Megatron-Core refuses it: "can not use sequence paralllelism without tensor parallelism"."""
    space = {"LR": RATE} if layout is None else {"LR": RATE, "layout": layout}
    workload = tree(tmp_path / "tree", LORA + config, yaml="sp: ${oc.env:SP,0}", space=space)
    sentences = [s for s in about_base(workload) if "sequence parallel needs TP >= 2" in s]
    assert [s.startswith(told) for s in sentences] == ([True] if told else [])


class TestPlaces:
    """Container, data and model by relative paths: jobs start in the implementation's folder."""

    def test_one_that_jobs_do_not_find_is_told_with_its_whole_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "here").mkdir()
        (tmp_path / "here" / "lora.sqsh").write_bytes(b"hsqs")
        monkeypatch.chdir(tmp_path / "here")
        workload = tree(tmp_path / "tree", LORA + "export CONT=./lora.sqsh\n", site={"data": "d", "model": "/"})
        assert workload.written(trial(workload))["CONT"] == "./lora.sqsh"
        assert environment(workload, trial(workload), tmp_path / "a")["CONT"] == "./lora.sqsh"
        told = [f for f in findings(workload, SweepPaths(tmp_path / "sweep")) if "is relative" in f.what]
        assert [f.what.partition("=")[0] for f in told] == ["CONT", "DATADIR"]
        assert told[0].fix == f"name it by its whole path, {tmp_path / 'here' / 'lora.sqsh'}"
        assert any(s.startswith("CONT=./lora.sqsh is relative, and jobs start in") for s in workload.check())

    def test_doctor_looks_at_the_places_that_jobs_have_whatever_the_shell_exports(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CONT", "/images/of_the_shell.sqsh")
        workload = tree(tmp_path / "tree", LORA + "export CONT=/images/of_the_config.sqsh\n")
        assert environment(workload, trial(workload), tmp_path / "a")["CONT"] == "/images/of_the_config.sqsh"
        assert workload.known_places()["CONT"] == "/images/of_the_config.sqsh"

    @pytest.mark.parametrize(
        ("container", "told"),
        [
            ("./lora.sqsh", False), ("lora.sqsh", True), ("images/other.sqsh", True), ("../lora.sqsh", True),
            ("nvcr.io/nvidia/pytorch:25.04-py3", False), ("mlperf-nvidia:llama2_70b_lora-pyt", False),
        ],
    )  # fmt: skip
    def test_what_lies_in_the_folder_is_found_where_pyxis_takes_it_for_a_file(
        self, container: str, told: bool, tmp_path: Path
    ) -> None:
        workload = tree(tmp_path / "tree", LORA, site={"container": container, "data": "/", "model": "/"})
        (tmp_path / "tree" / "lora.sqsh").write_bytes(b"hsqs")
        assert bool([s for s in workload.check() if "is relative" in s]) is told
        whats = [f.what for f in findings(workload, SweepPaths(tmp_path / "sweep"))]
        assert not [what for what in whats if "25.04-py3 is not there" in what], "an image of a registry is no file"


class TestTreesOfOtherBenchmarks:
    """What doctor said of NVIDIA's own configs of v5.1, which were submitted as they are."""

    def test_training_without_a_number_of_steps_has_no_end_that_is_too_soon(self, tmp_path: Path) -> None:
        config = "export BATCHSIZE=1024 MBS=64 MAX_STEPS=-1 DGXNNODES=1 DGXNGPU=8\n"
        workload = tree(
            tmp_path / "tree", config, yaml="b: ${oc.env:BATCHSIZE}", benchmark="flux1", division="closed"
        )  # fmt: skip
        assert not [s for s in about_base(workload) if "ends training after" in s]

    def test_the_name_of_a_model_is_no_path(self, tmp_path: Path) -> None:
        workload = tree(
            tmp_path / "tree", LORA + "export MODEL=schnell CONT=img DATADIR=/\n", yaml="m: ${oc.env:MODEL}"
        )
        assert not [s for s in workload.check() if s.startswith("MODEL=")]
        assert not [f for f in findings(workload, SweepPaths(tmp_path / "s")) if f.what.startswith("MODEL=")]

    def test_a_place_that_the_site_sets_for_every_job_is_set(self, tmp_path: Path) -> None:
        environment = {"PREPROC_DATA": str(tmp_path), "CONT": "img"}
        workload = tree(
            tmp_path / "tree", EIGHT_B, yaml="d: ${oc.env:PREPROC_DATA}", benchmark="llama31_8b",
            site={"environment": environment}, objective={"benchmark": "llama31_8b"},
        )  # fmt: skip
        assert workload.known_places()["PREPROC_DATA"] == str(tmp_path)
        assert not [
            f.what for f in findings(workload, SweepPaths(tmp_path / "s")) if f.what.startswith("PREPROC_DATA is")
        ]

    @pytest.mark.parametrize(("decay", "told"), [(1_200_000, False), (1_199_984, False), (1_100_000, True)])
    def test_the_decay_is_announced_less_the_warm_up(self, decay: int, told: bool, tmp_path: Path) -> None:
        config = EIGHT_B.replace("MINIBS=4", f"MINIBS=2 WARMUP_STEPS=16 OPT_LR_DECAY_STEPS={decay}")
        names = "l: ${oc.env:LR}\nm: ${oc.env:MAX_STEPS}\nw: ${oc.env:WARMUP_STEPS}\nd: ${oc.env:OPT_LR_DECAY_STEPS}"
        workload = tree(tmp_path / "tree", config, yaml=names, benchmark="llama31_8b", division="closed")
        assert bool([s for s in about_base(workload) if "OPT_LR_DECAY_STEPS =" in s]) is told


def test_one_output_names_one_smallest_batch(tmp_path: Path) -> None:
    """Ruleset 5.0 has a reference at 1008 for 405B, the newest has 1152 as its smallest: the tree's script decides."""
    config = "export LR=8e-5 MAX_STEPS=450 MINIBS=63 DGXNNODES=4 DGXNGPU=8 TP=4 CP=1 PP=1\n"
    layout = {"type": "layout", "tp": [4], "gbs": [896]}
    workload = tree(
        tmp_path / "tree", config, benchmark="llama31_405b", space={"layout": layout}, site={"nodes": 4},
        division="closed",
    )  # fmt: skip
    (tmp_path / "tree" / "run.sub").write_text('#!/bin/bash\n: "${MLPERF_RULESET:=5.0.0}"\nsrun ./run_and_time.sh\n')
    (tmp_path / "tree" / CONFIG).write_text(config.replace("MINIBS=63", "MINIBS=112"))
    told = [v.sentence for v in closed_violations(workload.study)]
    told += about_base(workload)
    smallest = {match for s in told for match in re.findall(r"below (\d+), the smallest", s)}
    assert smallest == {"1008"}


def test_what_the_site_sets_for_every_job_is_what_trials_find(tmp_path: Path) -> None:
    workload = tree(tmp_path / "tree", LORA, site={"environment": {"MBS": "2", "CONT": "img"}})
    proposal = trial(workload, LR=5e-4)
    assert environment(workload, proposal, tmp_path / "a")["MBS"] == "2"
    assert (workload.written(proposal)["MBS"], workload.written(trial(workload))["MBS"]) == (2, 2)


def test_an_export_asks_the_record_what_the_config_leaves_to_the_shell(tmp_path: Path) -> None:
    """A default of the tree's own is not the machine's: ``${DGXNGPU:-4}`` would start half of the ranks."""
    yaml = "gpus: ${oc.env:DGXNGPU,4}\nsystem: ${oc.env:DGXSYSTEM,DGXA100}"
    workload = tree(tmp_path / "tree", LORA.replace(" DGXNGPU=8", ""), yaml=yaml)
    record = workload.record({})
    assert (record["DGXNGPU"], "DGXNGPU" in record.assumed, "DGXNGPU" in record.exports) == (4, True, False)
    usage = workload.export(trial(workload), ()).usage
    assert f"export DGXSYSTEM={CONFIG.removeprefix('config_').removesuffix('.sh')} DGXNGPU=8" in usage


def test_a_thing_is_stated_once_whatever_its_names_are() -> None:
    record = record_of(
        {"LR": 5e-4, "NODES": 2},
        {"LEARNING_RATE": "1e-3", "WARMUP_RATIO": "0.1", "MAX_STEPS": "800", "SEQ_PARALLEL": "True", "TP": ""},
        {"WARMUP_STEPS": "40", "TP": "4", "GBS": "64", "PP": "null"},
        gpus_per_node=8,
    )
    assert (record.value("LR"), record.value("LEARNING_RATE"), "LEARNING_RATE" in record) == (5e-4, 5e-4, False)
    assert [record.value(n) for n in ("WARMUP_STEPS", "SP", "TP", "PP")] == [80, 1, 4, None]
    assert (record.gpus, record.gbs, record.layout.minibs) == (16, 64, 16)


def test_a_layout_that_needs_more_gpus_than_there_are_has_no_batch() -> None:
    record = record_of({}, {"TP": "8", "PP": "8", "MINIBS": "4"}, {}, gpus_per_node=8)
    assert record.gbs is None
    assert "GBS" not in record.with_batch()
