"""What is handed over in place of what the user has: by gains and losses that are expected, deaths included."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.search.advantage import LEAST_ODDS, Advantage, Deaths


def lived(runs: int, *, risk: float = 0.3) -> Deaths:
    """What is believed of a layout of which a seventh of a run's weight said this risk, and which then lived."""
    return Deaths(died=0.15 * risk, lived=0.15 * (1 - risk) + runs)


def test_without_deaths_one_standard_deviation_is_clear() -> None:
    assert Advantage(ln_saved=0.0205, sd=0.02).is_clear
    assert not Advantage(ln_saved=0.0195, sd=0.02).is_clear
    assert not Advantage(ln_saved=-0.01, sd=0.0).is_clear
    assert Advantage(ln_saved=0.001, sd=0.0).is_clear
    assert not Advantage(ln_saved=0.0, sd=0.0).is_clear


@given(
    ln_saved=st.floats(-0.5, 0.5), sd=st.floats(0, 0.5), died=st.floats(0, 5), lived=st.floats(0.01, 30)
)  # fmt: skip
def test_what_is_gained_less_what_is_lost_is_what_is_expected(
    ln_saved: float, sd: float, died: float, lived: float
) -> None:
    compared = Advantage(ln_saved=ln_saved, sd=sd, deaths=Deaths(died, lived))
    gain, loss = compared.gain_and_loss()
    assert gain >= -1e-12 <= loss
    assert gain - loss == pytest.approx(-math.log1p(-compared.share), abs=1e-9)
    assert compared.is_clear <= (gain >= LEAST_ODDS * loss)


@given(ln_saved=st.floats(0.001, 0.5), sd=st.floats(0, 0.2), died=st.floats(0.001, 3), lived=st.floats(0.01, 10))
def test_a_layout_that_lived_once_more_is_believed_more_and_one_that_died_less(
    ln_saved: float, sd: float, died: float, lived: float
) -> None:
    def loss(died: float, lived: float) -> float:
        return Advantage(ln_saved=ln_saved, sd=sd, deaths=Deaths(died, lived)).gain_and_loss()[1]

    assert loss(died, lived + 1) <= loss(died, lived) + 1e-9 <= loss(died + 1, lived) + 2e-9


def test_a_layout_a_little_faster_has_to_live_through_several_runs_and_one_much_faster_through_few() -> None:
    """Three in a row live of a layout that dies in a third of its runs: one in four does."""
    little, much = (Advantage(ln_saved=saved, sd=0.005, deaths=lived(1)).survivals_wanted() for saved in (0.045, 0.3))
    assert little is not None
    assert much is not None
    assert 3 <= little <= 8
    assert much < little
    assert Advantage(ln_saved=0.045, sd=0.005, deaths=lived(1 + little)).survivals_wanted() == 0


def test_where_survivals_alone_do_not_tell_none_are_wanted() -> None:
    assert Advantage(ln_saved=0.02, sd=0.05, deaths=lived(1)).survivals_wanted() is None
    assert Advantage(ln_saved=0.03, sd=0.005, deaths=Deaths(3, 6)).survivals_wanted() is None


def test_deaths_of_the_other_speak_for_the_one() -> None:
    assert Advantage(ln_saved=0.0, sd=0.01, other_deaths=Deaths(3, 6)).is_clear
