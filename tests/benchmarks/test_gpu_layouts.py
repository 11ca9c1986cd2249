"""What is sent to GPUs is allowed by the recipes: a borrowed machine must not spend its minutes on refusals."""

from __future__ import annotations

import pytest

from benchmarks.gpu.bridge_layouts import ALONE, LARGE, LARGE_TRIAL, SMALL, Variant, small_layout
from lora_tune_recipes.bridge import settings as bridge
from lora_tune_recipes.nemo import settings as nemo
from tests.conftest import REPOSITORY

BASE = REPOSITORY / "lora_tune_recipes" / "tiny"
READ = {"bridge": bridge.read, "nemo": nemo.read}


def named(variant: Variant) -> str:
    return f"{variant[0]} {variant[1]}"


def allowed(variant: Variant, fixed: dict[str, object], ranks: int) -> None:
    recipe, _, variables = variant
    told = {name: str(value) for name, value in {**fixed, "DATADIR": BASE, **variables}.items()}
    READ[recipe](told, ranks)


@pytest.mark.parametrize("variant", LARGE, ids=named)
def test_a_layout_of_the_large_shape(variant: Variant) -> None:
    allowed(variant, LARGE_TRIAL, 2)


@pytest.mark.parametrize("variant", SMALL, ids=named)
def test_a_layout_of_the_small_one(variant: Variant) -> None:
    allowed(variant, small_layout(BASE, variant[0]), 2)


@pytest.mark.parametrize("variant", ALONE, ids=named)
def test_one_gpu(variant: Variant) -> None:
    allowed(variant, small_layout(BASE, variant[0]), 1)
