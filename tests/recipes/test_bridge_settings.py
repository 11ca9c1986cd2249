"""The knobs of a Megatron-Bridge trial: v6.0's names and defaults, v5.1's names, and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.errors import InputError
from lora_tune_recipes.bridge.healing import heal
from lora_tune_recipes.bridge.settings import REFUSED, SPELLINGS, BridgeSettings, read
from lora_tune_recipes.megatron.description import description
from lora_tune_recipes.megatron.shapes import SHAPES

OVERLAP = {"TP_COMM_OVERLAP": 1, "TP": 2, "SP": 1}
TINY = Path(__file__).resolve().parents[2] / "lora_tune_recipes" / "tiny"


def settings(world: int = 8, **variables: object) -> BridgeSettings:
    return read({"DATA_ROOT": str(TINY), **{k: str(v) for k, v in variables.items()}}, world)


def test_unset_variables_are_v60s_benchmark() -> None:
    found = settings()
    assert found.shape == SHAPES["70b"]
    assert (found.seq, found.target, found.lr, found.layout.batch) == (8192, 0.925, 4e-4, 8)
    precision, speed, communication = found.precision, found.speed, found.communication
    assert (precision.fp8, precision.params, precision.dpa, precision.recipe) == (True, True, True, "delayed")
    assert (speed.te_ops, speed.fused_rope, speed.cuda_graph, speed.val_mbs) == (True, True, False, 1)
    assert (communication.sharded, communication.reduce_early, communication.bucket) == (True, True, 45_000_000)
    assert found.closed


ALIASES = [
    ("MAX_SEQLEN", "SEQ", 512, lambda s: s.seq),
    ("TARGET_LOG_PPL", "TARGET", 0.9, lambda s: s.target),
    ("LOG_EVERY_N_STEPS", "LOGGING_INTERVAL", 3, lambda s: s.log_every),
    ("OVERWRITTEN_NUM_LAYERS", "LAYERS", 8, lambda s: s.shape.layers),
    ("CROSS_ENTROPY_LOSS_FUSION", "CROSS_ENTROPY_FUSION", 0, lambda s: s.speed.fused_loss),
    ("FP8_PARAMS", "FP8_WEIGHTS", 0, lambda s: s.precision.params),
]


@pytest.mark.parametrize(("new", "old", "value", "field"), ALIASES, ids=[a[0] for a in ALIASES])
def test_a_knob_may_be_spelled_as_in_v60_or_before(new: str, old: str, value: object, field: object) -> None:
    assert callable(field)
    assert field(settings(**{new: value})) == field(settings(**{old: value})) == value


def test_two_spellings_of_one_knob_must_agree() -> None:
    assert settings(MAX_SEQLEN=512, SEQ=512).seq == 512
    with pytest.raises(InputError, match="MAX_SEQLEN='512' SEQ='1024': allowed is one value"):
        settings(MAX_SEQLEN=512, SEQ=1024)


@pytest.mark.parametrize("spelling", ["DATA_ROOT", "DATADIR"])
def test_a_refusal_names_the_spelling_that_was_used(spelling: str) -> None:
    with pytest.raises(InputError, match=f"{spelling}='/nowhere': allowed is an existing folder"):
        read({spelling: "/nowhere"}, 8)


@given(
    name=st.sampled_from(sorted(n for names in SPELLINGS.values() for n in names)), null=st.sampled_from(["null", ""])
)
def test_null_in_a_configuration_file_leaves_a_knob_alone(name: str, null: str) -> None:
    if name in ("DATA_ROOT", "DATADIR"):
        return
    assert settings(**{name: null}) == settings()


def test_fp4_takes_the_place_of_fp8_and_the_log_discloses_it() -> None:
    found = settings(FP4=1)
    precision = found.precision
    assert (precision.fp4, precision.fp8, precision.params, precision.dpa) == (True, False, False, False)
    said = description(found, platform="8xB300", texts=(3901, 173), wide="bfloat16", attention="transformer_engine")
    assert said["lowest_numerical_precision_in_linear"] == "nvfp4"
    assert said["lowest_numerical_precision_in_attn"] == "bfloat16"


@pytest.mark.parametrize(
    ("named", "fp8", "recipe"),
    [(None, True, "delayed"), ("FP8_CS", True, "tensorwise"), ("MXFP8", True, "mxfp8"), ("BF16", False, "delayed")],
)
def test_an_fp4_run_heals_to_the_precision_that_is_named(named: str | None, fp8: bool, recipe: str) -> None:
    healing = settings(FP4=1, HEALING_ITER=350, HEALING_PRECISION=named or "null").healing
    assert healing is not None
    assert (healing.step, healing.precision.fp8, healing.precision.recipe) == (350, fp8, recipe)
    assert not healing.precision.fp4
    assert settings(FP4=1).healing is None


class Module:
    """What a layer shows of itself."""

    def __init__(self, config: object, *parts: Module) -> None:
        self.config, self._parts = config, parts

    def modules(self) -> list[Module]:
        return [self, *self._parts]


def test_healing_tells_every_layer_and_keeps_what_is_not_about_precision() -> None:
    kept = {"hidden_size": 64, "fp8_param": False}
    layer = SimpleNamespace(**kept, fp4="e2m1", fp8=None, fp8_recipe="tensorwise")
    foreign = SimpleNamespace(bucket_size=1)
    healing = settings(FP4=1, HEALING_ITER=2, FP8_AMAX_HISTORY=16).healing
    assert healing is not None
    heal([Module(layer, Module(layer), Module(foreign))], healing.precision)
    healed = {"fp4": None, "fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 16}
    assert vars(layer).items() >= {**kept, **healed}.items()
    assert vars(foreign) == {"bucket_size": 1}


def test_one_copy_of_the_model_may_run_as_a_cuda_graph() -> None:
    assert settings(MCORE_CUDA_GRAPH=1, TP=8, MINIBS=8).speed.cuda_graph
    assert settings(world=1, MCORE_CUDA_GRAPH=1, MINIBS=8).speed.cuda_graph


@pytest.mark.parametrize(
    ("variables", "has"),
    [
        ({}, True),
        ({"FP8_RECIPE": "tensorwise"}, False),
        ({"FP8_RECIPE": "blockwise"}, False),
        ({"FP8": 0}, False),
        ({"FP4": 1, "FP8": 0}, False),
    ],
)
def test_only_delayed_scaling_has_a_history_that_a_warm_up_must_put_back(
    variables: dict[str, object], has: bool
) -> None:
    """Transformer Engine's states of the other recipes hold none: forgetting it there raised AttributeError."""
    assert settings(**variables).precision.has_history is has


@pytest.mark.parametrize(
    ("variables", "overlapped"),
    [
        ({"TP": 8, "MINIBS": 8}, True),
        ({"TP": 4}, False),
        ({"TP": 4, "CP": 2, "MINIBS": 8}, False),
        ({"TP": 4, "USE_TE_OPS": 0}, True),
        ({"TP": 4, "USE_TE_OPS": 0, "DDP_OVERLAP_GRAD_REDUCE": 0}, False),
    ],
    ids=str,
)
def test_parameters_are_gathered_late_only_where_modules_wait_for_them(
    variables: dict[str, object], overlapped: bool
) -> None:
    """Fused operations call no module's hooks: ranks that share gradients would compute with old adapters."""
    assert settings(**variables).communication.gather_late is overlapped


def test_overlapped_transfers_take_the_place_of_fused_operations() -> None:
    assert settings(**OVERLAP).speed.tp_overlap
    assert not settings(**OVERLAP).speed.te_ops
    assert settings(TP=2, SP=1).speed.te_ops


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_recipe_cannot_serve_is_refused_by_name(name: str) -> None:
    assert settings(**{name: 0}) == settings(**{name: "False"}) == settings()
    with pytest.raises(InputError, match=f"{name}=1: allowed is 0; "):
        settings(**{name: 1})


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"VP": 2}, "VP=2: allowed is 1 where PP is 1"),
        ({"VP": 2, "PP": 2, "MINIBS": 3}, "VP=2: allowed is 1 unless MINIBS/MBS=3 is a multiple of PP=2"),
        ({"VP": 3, "PP": 8}, "PP=8 VP=3: allowed is a divisor of 80 layers"),
        ({"HEALING_ITER": 350}, "HEALING_ITER=350: allowed is 0 unless FP4=1"),
        ({"FP4": 1, "HEALING_ITER": 350, "HEALING_PRECISION": "FP6"}, "one of FP8_DS, FP8_CS, MXFP8, BF16"),
        ({"FP4": 1, "HEALING_ITER": 350, "MCORE_CUDA_GRAPH": 1, "TP": 8, "MINIBS": 8}, "a captured graph keeps"),
        ({"FP4": 1, "FP8": 1}, "FP4=1 FP8=1: allowed is one of them"),
        ({"FP4": 1, "FP4_RECIPE": "mxfp4"}, "FP4_RECIPE='mxfp4': allowed is one of nvfp4"),
        ({"MCORE_CUDA_GRAPH": 1, "RECOMPUTE_GRANULARITY": "full"}, "MCORE_CUDA_GRAPH=1: allowed is 0"),
        ({"MCORE_CUDA_GRAPH": 1, "TP": 4}, "MCORE_CUDA_GRAPH=1: allowed is 0 where DP=2 CP=1"),
        ({"MCORE_CUDA_GRAPH": 1, "TP": 4, "CP": 2, "MINIBS": 8}, "MCORE_CUDA_GRAPH=1: allowed is 0 where DP=1 CP=2"),
        ({"CPU_OFFLOADING": 1, "MCORE_CUDA_GRAPH": 1}, "CPU_OFFLOADING=1: allowed is 0"),
        ({"USE_DISTRIBUTED_OPTIMIZER": 0, "DDP_OVERLAP_PARAM_GATHER": 1}, "USE_DISTRIBUTED_OPTIMIZER=1"),
        (
            {"DDP_OVERLAP_PARAM_GATHER": 1, "TP": 4},
            "DDP_OVERLAP_PARAM_GATHER=1: allowed is 0 with USE_TE_OPS=1 where DP=2",
        ),
        ({"LLAMA": "small", "TP": 2}, "FP8_DPA=1: allowed is 0 for heads of 64 channels"),
        ({"CUDA_GRAPH_SCOPE": "attn"}, "one of full_iteration"),
        ({"TP_COMM_OVERLAP": 1, "TP": 2}, "TP_COMM_OVERLAP=1: allowed is 0 unless TP is at least 2 and SP=1"),
        ({**OVERLAP, "FP8": 0}, "TP_COMM_OVERLAP=1: allowed is 0 with FP8=0"),
        ({**OVERLAP, "FP4": 1}, "TP_COMM_OVERLAP=1: allowed is 0 with FP8=0"),
        ({**OVERLAP, "USE_TE_OPS": 1}, "TP_COMM_OVERLAP=1: allowed is 0 with USE_TE_OPS=1"),
        ({**OVERLAP, "MCORE_CUDA_GRAPH": 1}, "TP_COMM_OVERLAP=1: allowed is 0 with MCORE_CUDA_GRAPH=1"),
        ({**OVERLAP, "VAL_MBS": 2}, "TP_COMM_OVERLAP=1: allowed is 0 with VAL_MBS=2 MBS=1"),
        ({"TP": 3}, "divides the 8 processes"),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_in_one_line(variables: dict[str, object], words: str) -> None:
    with pytest.raises(InputError) as caught:
        settings(**variables)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
