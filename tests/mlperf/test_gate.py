"""The closed division's gate: the compliance checker decides on the log that a configuration would print."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.base.errors import StudyError
from lora_tune.config.study import closed_violations, parse_study
from lora_tune.mlperf import log_check
from lora_tune.mlperf.benchmark import read_benchmark
from lora_tune.mlperf.gate import (
    announced,
    check_range,
    check_space,
    check_values,
    disclosure_exports,
    disclosures,
    keys_of,
    log_lines,
    precisions,
)
from lora_tune.mlperf.log_check import complaints, findings, parse
from lora_tune.mlperf.rulesets import benchmarks_of
from lora_tune.review.advice import rcp_normalised_gain
from lora_tune.store.records import StudyRecords, Trial, TrialState, Verdict
from tests.conftest import REPOSITORY

LORA = read_benchmark("llama2_70b_lora")
KEYS = [
    "global_batch_size", "opt_base_learning_rate", "opt_learning_rate_warmup_steps", "opt_end_learning_rate",
    "opt_adamw_weight_decay", "opt_gradient_clip_norm", "max_sequence_length", "max_steps", "lora_rank", "eval_samples",
    "opt_learning_rate_decay_steps", "micro_batch_size", "tensor_parallelism", "evaluation_frequency",
]  # fmt: skip
NUMBERS = st.one_of(
    st.sampled_from([0, 1, 4, 8, 16, 512, 1024, 8192, 16384, 12000, 1_200_000, 262144, 0.1, 1.0, 1e-4, 2.4e-5, 1e-6]),
    st.floats(1e-7, 1e5, allow_nan=False),
    st.integers(1, 20_000),
)
SIMULATED = REPOSITORY / "studies" / "simulated_h100.toml"


def says(benchmark: str, **values: object) -> str:
    return " | ".join(v.sentence for v in check_values(read_benchmark(benchmark), values))


def test_free_hyperparameters_pass() -> None:
    assert check_values(LORA, {"GBS": 8, "LR": 4e-4, "MAX_STEPS": 800, "WARMUP_RATIO": 0.1, "MBS": 1, "TP": 4}) == []
    assert check_values(LORA, {"LORA_DROPOUT": 0.1, "WEIGHT_DECAY": "1e-4", "LORA_RANK": "16", "GBS": 8}) == []


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("LORA_RANK", 8, "lora_rank must be 16"),
        ("lora_dim", 32, "lora_rank must be 16"),
        ("LORA_ALPHA", 64, "lora_alpha must be 32 (training rules, Hyperparameters"),
        ("LORA_DROPOUT", 0.05, "lora_dropout must be 0.1"),
        ("GRADIENT_CLIP_VAL", 1.0, "opt_gradient_clip_norm must be 0.3"),
        ("WEIGHT_DECAY", 0.0, "opt_adamw_weight_decay must be 0.0001"),
        ("MAX_SEQLEN", 4096, "max_sequence_length must be 8192"),
    ],
)
def test_what_is_fixed_is_refused_with_its_rule(name: str, value: object, wanted: str) -> None:
    (found,) = check_values(LORA, {"GBS": 8, name: value})
    assert found.fatal
    assert found.name == name
    assert f"{name} = {value} at GBS 8" in found.sentence
    assert wanted in found.sentence


def test_formulas_are_refused_with_the_value_that_they_give() -> None:
    assert "opt_base_learning_rate must be 2.4e-05" in says("deepseekv3_671b", GBS=16384, LR=3e-5)
    assert says("deepseekv3_671b", GBS=16384, LR=2.4e-5) == ""
    assert "GBS = 8192" in says("deepseekv3_671b", GBS=8192)
    assert "must be 1e-06" in says("qwen35_397b_grpo", GBS=256, LR=2e-6)
    assert "opt_base_learning_rate" in says("dlrmv4", GBS=8192, LEARNING_RATE=2e-6)
    assert says("dlrmv4", GBS=8192, LEARNING_RATE=1.4e-6) == ""
    assert "opt_end_learning_rate must be 5e-05" in says("llama31_8b", GBS=32, LR=5e-4, MIN_LR=1e-5)
    assert "max_steps must be 1200000" in says("gpt_oss_20b", GBS=24, MAX_STEPS=500)


@pytest.mark.parametrize("benchmark", sorted({*benchmarks_of("6.1.0")} - {"maskrcnn"}))
def test_what_a_study_does_not_state_is_no_line_of_it(benchmark: str) -> None:
    """A study of flux1 that tunes LEARNING_RATE was refused for "global_batch_size = None: remove the line"."""
    judged = read_benchmark(benchmark)
    for name, value in {"LEARNING_RATE": 2e-4, "MAX_STEPS": 900}.items():
        assert {v.name for v in check_values(judged, {name: value})} <= {name}
    assert check_values(judged, {"NCCL_MIN_CTAS": 8}) == []


def test_a_value_that_the_batch_decides_is_not_judged_where_nobody_states_the_batch() -> None:
    assert says("flux1", LEARNING_RATE=2e-4) == ""
    assert says("deepseekv3_671b", LR=2.4e-5) == ""
    assert "LR = 0.0003" in says("deepseekv3_671b", GBS=16384, LR=3e-4)


def test_a_tuned_range_is_refused_where_an_end_of_it_is() -> None:
    dlrm = read_benchmark("dlrmv4")
    (found,) = check_range(dlrm, {"LEARNING_RATE": (6e-7, 2e-6)}, [{"GBS": 8192, "LEARNING_RATE": 6e-7}])
    assert "LEARNING_RATE is tuned, and at one of its ends" in found.sentence
    assert check_range(dlrm, {"LEARNING_RATE": (6e-7, 1.4e-6)}, [{"GBS": 8192}]) == []
    tuned = {"LR": (1e-4, 1e-3), "LORA_RANK": (8, 16), "NCCL_MIN_CTAS": (8, 32)}
    assert [v.name for v in check_range(LORA, tuned, [{"GBS": 8}, {"GBS": 16}])] == ["LORA_RANK"]


@pytest.mark.parametrize(
    ("decay", "refused"),
    [
        ('{ type = "derived", formula = "1200000 - WARMUP_STEPS" }', []),
        ('{ type = "derived", formula = "1200000 - 2 * (WARMUP_STEPS - 32)" }', ["OPT_LR_DECAY_STEPS"]),
        ("1199936", ["OPT_LR_DECAY_STEPS"]),
    ],
)
def test_a_derived_value_is_judged_beside_the_tuned_values_that_it_follows_from(decay: str, refused: list[str]) -> None:
    study = parse_study(
        f"""
        [workload]
        kind = "command"
        argv = ["python", "train.py", "{{LR}}", "{{WARMUP_STEPS}}", "{{OPT_LR_DECAY_STEPS}}"]
        [space]
        GBS = 16
        LR = {{ type = "float", low = 1e-4, high = 1e-3 }}
        WARMUP_STEPS = {{ type = "int", low = 64, high = 512, step = 64 }}
        OPT_LR_DECAY_STEPS = {decay}
        [objective]
        benchmark = "gpt_oss_20b"
        [budget]
        trials = 4
        """,
        Path("t.toml"),
    )
    assert [v.name for v in closed_violations(study.model_copy(update={"division": "closed"})) if v.fatal] == refused


def test_a_formula_that_fails_at_an_end_of_what_is_tuned_is_the_users_error() -> None:
    text = """
        division = "closed"
        [workload]
        kind = "command"
        argv = ["python", "train.py", "{WARMUP_STEPS}", "{DECAY}"]
        [space]
        GBS = 16
        WARMUP_STEPS = { type = "int", low = 64, high = 512, step = 64 }
        DECAY = { type = "derived", formula = "1 / (512 - WARMUP_STEPS)" }
        [objective]
        benchmark = "gpt_oss_20b"
        [budget]
        trials = 4
        """
    with pytest.raises(StudyError, match=r"space\.DECAY.*cannot be computed: division by zero"):
        parse_study(text, Path("t.toml"))


def test_a_formula_is_not_computed_where_it_does_not_apply() -> None:
    text = """
        division = "closed"
        [workload]
        kind = "command"
        argv = ["python", "train.py"]
        [space]
        GBS = 16
        PREFETCH = { type = "categorical", choices = [4, 8, 0] }
        PREFETCH_BYTES = { type = "derived", formula = "64 // PREFETCH", when = { PREFETCH = [4, 8] } }
        [objective]
        benchmark = "gpt_oss_20b"
        [budget]
        trials = 4
        """
    assert parse_study(text, Path("t.toml")).division == "closed"


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(["llama2_70b_lora", "llama31_405b", "llama31_8b", "gpt_oss_20b", "dlrmv4", "deepseekv3_671b"]),
    data=st.data(),
)
def test_a_range_is_refused_where_it_would_be_if_every_end_were_tried_at_every_layout(
    name: str, data: st.DataObject
) -> None:
    benchmark = read_benchmark(name)
    variables = st.sampled_from(sorted(keys_of(name)))
    points = data.draw(st.lists(st.fixed_dictionaries(
        {"GBS": st.sampled_from([8, 8192, 16384]), "TP": st.integers(1, 3), "WARMUP_STEPS": st.integers(1, 2)}
    ), min_size=1, max_size=4))  # fmt: skip
    tuned = data.draw(
        st.dictionaries(variables.filter(lambda v: v not in points[0]), st.tuples(NUMBERS, NUMBERS), max_size=2)
    )
    alone = {v.name for point in points for v in check_values(benchmark, point)}
    ends = {(variable, end) for variable, both in tuned.items() for end in both}
    tried = {
        v.name
        for point in points
        for variable, end in ends
        for v in check_values(benchmark, {**point, variable: end})
        if v.name == variable
    }
    assert {v.name for v in check_range(benchmark, tuned, points)} == alone | tried


def test_a_configuration_is_judged_alike_in_whatever_order_its_variables_come() -> None:
    """The rules read the log in its order: the warm-up's needs the batch size, the decay's needs the warm-up."""
    benchmark, point = read_benchmark("llama31_405b"), {"GBS": 8, "TP": 1, "WARMUP_STEPS": 1}
    expected = check_values(benchmark, point)
    for names in itertools.permutations(point):
        assert check_values(benchmark, {name: point[name] for name in names}) == expected


def test_the_ends_are_tried_beside_each_value_that_their_rule_reads() -> None:
    """Decay steps follow from the warm-up by the checker, MIN_LR from LR by the rules' text."""
    eight = read_benchmark("llama31_8b")
    fits, does_not = ({"GBS": 16, "WARMUP_STEPS": steps, "LR": 5e-4 / steps} for steps in (1, 2))
    for name, value in (("OPT_LR_DECAY_STEPS", 1_199_999), ("MIN_LR", 5e-5)):
        assert check_range(eight, {name: (value, value)}, [fits]) == []
        assert [v.name for v in check_range(eight, {name: (value, value)}, [fits, does_not])] == [name]


def test_rules_that_are_compiled_once_say_what_the_checker_says_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = log_lines(LORA, {"global_batch_size": 8, "lora_rank": 8, "micro_batch_size": "no number"}, {"": 0.93})
    ours = findings(parse(lines, LORA.ruleset), LORA.ruleset)
    monkeypatch.setattr(log_check, "with_code", lambda rules: rules)
    log_check._rules_in.cache_clear()
    try:
        assert findings(parse(lines, LORA.ruleset), LORA.ruleset) == ours
    finally:
        log_check._rules_in.cache_clear()
    assert "failed test:  v['value'] == 16" in dict(ours)["lora_rank"]


def space_says(text: str, *changes: tuple[str, str]) -> str:
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    try:
        return " | ".join(v.sentence for v in closed_violations(parse_study(text, SIMULATED)))
    except StudyError as error:
        return str(error)


def test_a_study_of_the_closed_division_is_held_to_its_rules() -> None:
    text = SIMULATED.read_text().replace('division = "open"', 'division = "closed"')
    space = "[space]\n"
    assert space_says(text) == ""
    assert "VAL_CHECK_INTERVAL is tuned, but the eval schedule follows from GBS" in space_says(
        text, (space, space + 'VAL_CHECK_INTERVAL = { type = "int", low = 96, high = 384 }\n')
    )
    assert "SKIP_EVALS = 9, but it must be 3 at GBS 8" in space_says(text, (space, space + "SKIP_EVALS = 9\n"))
    assert space_says(text, (space, space + "VAL_CHECK_INTERVAL = 384\n")) == ""
    assert "must be 384 samples at GBS 8" in space_says(text, (space, space + "VAL_CHECK_INTERVAL = 192\n"))
    assert "lora_rank must be 16" in space_says(text, (space, space + "LORA_RANK = 8\n"))
    assert "GBS 256 is above 128" in space_says(text, ("gbs = [8, 16, 32]", "gbs = [8, 256]"))


def test_an_interval_in_steps_is_read_as_such() -> None:
    eight = read_benchmark("llama31_8b")
    assert check_space(eight, {}, [{"GBS": 16, "VAL_CHECK_INTERVAL": 768}]) == []
    (found,) = check_space(eight, {}, [{"GBS": 16, "VAL_CHECK_INTERVAL": 384}])
    assert "must be 12288 samples" in found.sentence


@pytest.mark.parametrize("name", sorted({n for r in ("5.0.0", "5.1.0", "6.0.0", "6.1.0") for n in benchmarks_of(r)}))
@settings(max_examples=15, deadline=None)
@given(values=st.dictionaries(st.sampled_from(KEYS), NUMBERS, max_size=5), batch=st.integers(1, 20_000))
def test_gate_and_checker_agree_on_any_configuration(name: str, values: dict[str, object], batch: int) -> None:
    """The checker on the whole log decides; beyond it the gate refuses only by the rules' text."""
    benchmark = read_benchmark(name)
    one_each = {key: variable for variable, key in keys_of(name).items()}
    config = {"GBS": batch} | {one_each[key]: value for key, value in values.items() if key in one_each}
    said = announced(name, config)
    checker = complaints(parse(log_lines(benchmark, said), benchmark.ruleset), benchmark.ruleset)
    by_text = [k for k, wanted in benchmark.by_text(said).items() if k in said and said[k] != wanted]
    refused = check_values(benchmark, config)
    assert bool(refused) == bool(checker) or (refused and by_text)


def test_disclosures_follow_from_what_is_tuned() -> None:
    eight = {"FP8": True, "FP8_DPA": 1, "TP": 4, "CP": 2, "MBS": 1, "FP8_PARAM_GATHER": 0}
    assert disclosures("llama2_70b_lora", eight, "config_X.sh") == {
        "lowest_numerical_precision_in_linear": "fp8",
        "lowest_numerical_precision_in_attn": "fp8",
        "lowest_numerical_precision_in_comm": "bfloat16",
        "tensor_parallelism": 4,
        "pipeline_parallelism": 1,
        "context_parallelism": 2,
        "expert_parallelism": 1,
        "micro_batch_size": 1,
        "config_filename": "config_X.sh",
    }


@pytest.mark.parametrize(
    ("values", "linear", "attention", "communication"),
    [
        ({}, "bfloat16", "bfloat16", "bfloat16"),
        ({"FP8": "True"}, "fp8", "bfloat16", "bfloat16"),
        ({"FP4": "True", "FP8": "False", "FP8_DPA": "1", "HEALING_ITER": 350}, "nvfp4", "fp8", "bfloat16"),
        ({"FP4": True, "FP4_RECIPE": "mxfp4", "FP8": True, "FP8_DPA": 0}, "mxfp4", "bfloat16", "bfloat16"),
        ({"FP8": True, "FP8_PARAM_GATHER": "True"}, "fp8", "bfloat16", "fp8"),
        ({"FP4": True, "FP4_PARAM_GATHER": 1}, "nvfp4", "bfloat16", "nvfp4"),
        ({"FP8": False, "FP8_DPA": 1}, "bfloat16", "bfloat16", "bfloat16"),
        ({"SPARSE_A2A_FWD": "fp16", "SPARSE_A2A_BWD": "fp16"}, "bfloat16", "bfloat16", "fp16"),
    ],
)
def test_the_lowest_precisions(values: dict[str, object], linear: str, attention: str, communication: str) -> None:
    assert list(precisions(values).values()) == [linear, attention, communication]


def test_disclosures_are_exported_under_the_names_that_an_implementation_reads() -> None:
    values = {"FP4": True, "FP8_DPA": 1, "TENSOR_MODEL_PARALLEL": 2, "EXPERT_PARALLEL": 4, "MICRO_BATCH_SIZE": 3}
    nvidia = {"MLPERF_LINEAR_PRECISION", "MLPERF_ATTN_PRECISION", "MLPERF_COMM_PRECISION", "LR"}
    assert disclosure_exports("gpt_oss_20b", values, "c.sh", nvidia) == {
        "MLPERF_LINEAR_PRECISION": "nvfp4",
        "MLPERF_ATTN_PRECISION": "fp8",
        "MLPERF_COMM_PRECISION": "bfloat16",
    }
    amd = {"MLLOG_EXPERT_PARALLELISM", "MLLOG_TENSOR_PARALLELISM", "MLLOG_CONFIG_FILENAME", "MLLOG_MICRO_BATCH_SIZE"}
    assert disclosure_exports("gpt_oss_20b", values, "c.sh", amd) == {
        "MLLOG_TENSOR_PARALLELISM": 2,
        "MLLOG_EXPERT_PARALLELISM": 4,
        "MLLOG_MICRO_BATCH_SIZE": 3,
        "MLLOG_CONFIG_FILENAME": "c.sh",
    }
    assert disclosure_exports("gpt_oss_20b", values, "c.sh", {"LR"}) == {}


def test_the_rules_of_6_1_accept_every_disclosure_that_is_derived() -> None:
    for values in ({}, {"FP8": 1, "FP8_DPA": 1}, {"FP4": 1, "FP4_PARAM_GATHER": 1}):
        said = {"global_batch_size": 8, **disclosures("llama2_70b_lora", values, "config.sh")}
        assert complaints(parse(log_lines(LORA, said), LORA.ruleset), LORA.ruleset) == ()


def test_the_guides_own_example_is_told_before_it_runs_that_it_cannot_win() -> None:
    """DGX H100 guide: TP 8, MINIBS 1, so GBS 1, evaluated every 50 samples."""
    tp8 = [{"GBS": 1, "TP": 8, "MINIBS": 1, "VAL_CHECK_INTERVAL": 50, "LR": 4e-4}]
    found = check_space(LORA, {}, tp8)
    assert [(v.name, v.fatal) for v in found] == [("VAL_CHECK_INTERVAL", True), ("GBS", False)]
    assert "VAL_CHECK_INTERVAL = 50, but it must be 384 samples at GBS 1" in found[0].sentence
    assert found[0].sentence.endswith("; correct it"), "there may be no line to remove: the tree has defaults"
    assert "GBS 1 cannot win: it is below 8" in found[1].sentence
    assert "its first eval comes after 1152 steps" in found[1].sentence
    assert found[1].sentence.endswith("; raise MINIBS from 1 to 8, which makes GBS 8")
    (wide,) = check_space(LORA, {}, [{"GBS": 4, "MINIBS": 2}])
    assert wide.sentence.endswith("; raise MINIBS from 2 to 4, which makes GBS 8")
    (whole,) = check_space(LORA, {}, [{"GBS": 4}])
    assert whole.sentence.endswith("; keep GBS >= 8"), "stated whole"
    (several,) = check_space(LORA, {}, [{"GBS": 4, "MINIBS": 2}, {"GBS": 2, "MINIBS": 2}])
    assert several.sentence.endswith("; keep GBS >= 8")
    (odd,) = check_space(LORA, {}, [{"GBS": 3, "MINIBS": 1}])
    assert odd.sentence.endswith("; raise MINIBS from 1 to 3, which makes GBS 9")
    (short,) = [v for v in check_space(LORA, {}, [{**tp8[0], "MAX_STEPS": 1024}]) if v.name == "MAX_STEPS"]
    assert "ends training after 1024 samples, and no submission converges before 2" in short.sentence
    assert "the first eval is at 1152, so none is made, or val_check_interval aborts the run" in short.sentence
    assert "raise MINIBS" in short.sentence
    (later,) = [v for v in check_space(LORA, {}, [{**tp8[0], "MAX_STEPS": 1152}]) if v.name == "MAX_STEPS"]
    assert "first eval" not in later.sentence
    assert not [v for v in check_space(LORA, {}, [{"GBS": 8, "MAX_STEPS": 800}]) if v.name == "MAX_STEPS"]


def test_explain_says_when_a_slower_rate_costs_nothing() -> None:
    study = parse_study(SIMULATED.read_text(), SIMULATED)

    def sweep(samples: float) -> StudyRecords:
        trials = {
            n: Trial(number=n, seed=n, tuned={}, parameters={"GBS": 8, "LR": 6e-4}, state=TrialState.FINISHED,
                     verdict=Verdict.REACHED, seconds=1500.0, samples=samples)
            for n in range(3)
        }  # fmt: skip
        return StudyRecords(name=study.name, digest="", study_toml="", began_at=0.0, trials=trials)

    fast = rcp_normalised_gain(study, sweep(3072.0))
    assert fast is not None
    assert "a lower learning rate costs nothing here" in fast.do
    assert "3072 samples in the middle of 3 runs, reference mean 3178.67" in fast.evidence
    faster = rcp_normalised_gain(study, sweep(2688.0))
    assert faster is not None
    assert "the RCP check refuses such runs" in faster.do
    assert rcp_normalised_gain(study, sweep(3456.0)) is None
