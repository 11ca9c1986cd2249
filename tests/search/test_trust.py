"""Which model is believed: by what each forecast of the study's own runs."""

from __future__ import annotations

import pytest

from lora_tune.search.trust import GREY_BOX, WHOLE, ScoreForecast, Told, trust


def told(ln_score: float, grey_box: float, whole: float, *, reached: bool = True) -> Told:
    """A run with two forecasts of the same width."""
    return Told(
        ln_score=ln_score,
        reached=reached,
        forecasts={GREY_BOX: ScoreForecast(grey_box, 0.1), WHOLE: ScoreForecast(whole, 0.1)},
    )


def test_before_any_run_the_grey_box_is_believed_where_there_is_one() -> None:
    assert trust([], grey_box=True).believes_grey_box
    assert trust([], grey_box=False).grey_box == 0


def test_a_model_whose_forecasts_fail_loses_nearly_all_trials_within_three_runs() -> None:
    wrong = [told(6.0, grey_box=5.0, whole=6.0)] * 3
    assert trust(wrong, grey_box=True).grey_box < 0.01
    right = [told(6.0, grey_box=6.0, whole=5.0)] * 3
    assert trust(right, grey_box=True).grey_box > 0.99


def test_one_freak_run_does_not_settle_the_matter() -> None:
    agreed = [told(6.0, grey_box=6.0, whole=6.2)] * 4
    assert trust([*agreed, told(9.0, grey_box=6.0, whole=6.5)], grey_box=True).believes_grey_box


def test_a_run_that_did_not_arrive_speaks_against_who_said_that_it_would() -> None:
    late = [told(6.0, grey_box=5.0, whole=6.5, reached=False)] * 3
    assert trust(late, grey_box=True).grey_box < 0.05


def test_tpe_gets_more_trials_while_the_whole_model_forecasts_worse_than_the_average() -> None:
    scores = [6.0, 6.2, 5.9, 6.1, 6.0, 6.1, 5.9, 6.2]
    good = trust([told(s, grey_box=s, whole=s) for s in scores], grey_box=False)
    bad = trust([told(s, grey_box=s, whole=s + 1) for s in scores], grey_box=False)
    assert 0 < good.tpe < bad.tpe


def test_shares_do_not_overflow_however_many_runs_agree() -> None:
    many = [told(6.0, grey_box=60.0, whole=6.0)] * 500
    assert trust(many, grey_box=True).grey_box == pytest.approx(0, abs=1e-9)
