"""Derived values are arithmetic, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.config.parameters import Formula, FormulaError


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("ceil(0.1 * MAX_STEPS)", 21),
        ("max(1, MAX_STEPS // 100) * 2", 4),
        ("-MAX_STEPS % 7", 1),
        ("384 / GBS", 48.0),
        ("1e-6 * sqrt(GBS * 2)", 4e-6),
    ],
)
def test_computes(text: str, result: float) -> None:
    assert Formula(text).value("X", {"MAX_STEPS": 209, "GBS": 8}) == result


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "LR.real", "9 ** 9", "[1]", "lambda: 1", "open('x')", "'a' * 3", "1 if LR else 2", "(",
     "x" * 501,
     "True", "min()", "min(1, key=2)"],
)  # fmt: skip
def test_refuses_everything_else(text: str) -> None:
    with pytest.raises(FormulaError):
        Formula(text)


def test_says_which_number_is_missing() -> None:
    with pytest.raises(FormulaError, match="needs the number STEPS; known numbers: LR"):
        Formula("STEPS / 2").value("WARMUP", {"LR": 1e-4, "name": "x"})


def test_blames_the_parameter_for_a_division_by_zero() -> None:
    with pytest.raises(FormulaError, match="cannot be computed: ") as caught:
        Formula("1 / A").value("WARMUP", {"A": 0})
    assert caught.value.name == "WARMUP"


@given(st.text(max_size=60))
def test_any_text_is_arithmetic_or_a_formula_error(text: str) -> None:
    with contextlib.suppress(FormulaError):
        Formula(text).value("X", {})


def test_the_root_of_a_negative_number_is_blamed_on_its_formula() -> None:
    with pytest.raises(FormulaError, match=r"'sqrt\(0 - LR\)' cannot be computed"):
        Formula("sqrt(0 - LR)").value("X", {"LR": 1e-3})
