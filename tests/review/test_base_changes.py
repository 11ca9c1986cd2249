"""What the best trial changes against the machine's own config, and what each change is worth."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_tune.cli.report import report_html
from lora_tune.config.study import Study
from lora_tune.review import importance
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import StudyRecords, Trial, Verdict
from tests.builders import STUDY, study_of, sweep_of


def with_base(study: Study, *, base: str = "config_x.sh") -> tuple[StudyRecords, Trial]:
    """A sweep of which trial 0 measured the machine's own config, and its best trial."""
    sweep = sweep_of(study, trials=24)
    best = sweep.best()
    assert best is not None
    start = next(t for t in sweep.reached() if t.number != best.number)
    first = replace(start, number=0, metrics=replace(start.metrics, base=base))
    return replace(sweep, trials={**sweep.trials, 0: first}), best


@pytest.mark.parametrize("sampler", ["grey_box", "auto"])
def test_each_change_is_told_with_its_worth_where_the_search_has_a_model(sampler: str) -> None:
    study = study_of(f'{STUDY}[search]\nsampler = "{sampler}"\n')
    sweep, best = with_base(study)
    first, *others = importance.change_lines(study, sweep, best)
    assert first.startswith(f"trial {best.number} against config_x.sh (trial 0): ")
    assert first.endswith("%")
    changed = {n for n in best.tuned if best.tuned[n] != sweep.trials[0].tuned[n]}
    assert {w.name for w in importance.change_gains(study, sweep, sweep.trials[0], best)} == changed
    assert any("LR: " in line and "saves " in line and "±" in line for line in others)


def test_the_report_shows_it_and_escapes_names() -> None:
    study = study_of(STUDY)
    sweep, _ = with_base(study, base="config_<b>x.sh")
    page = report_html(study, sweep, 0.0)
    assert "Against the machine&#39;s own config" in page or "Against the machine's own config" in page
    assert "config_&lt;b&gt;x.sh (trial 0)" in page
    assert "config_<b>" not in page


def test_without_a_model_the_changes_are_listed_and_nothing_is_claimed() -> None:
    study = study_of(STUDY + '[search]\nsampler = "random"\n')
    sweep, best = with_base(study)
    lines = list(importance.change_lines(study, sweep, best))
    assert not any("saves" in line for line in lines)
    assert lines[-1] == "  (what each of them is worth is not shown by this sweep)"


def test_a_base_that_never_reached_the_target_is_no_comparison() -> None:
    study = study_of(STUDY)
    sweep, best = with_base(study)
    failed = replace(
        sweep.trials[0], verdict=Verdict.FAILED, sentence="it broke", metrics=TrialMetrics(base="config_x.sh")
    )
    (first, *_) = importance.change_lines(study, replace(sweep, trials={**sweep.trials, 0: failed}), best)
    assert first.endswith("no comparison, trial 0 failed: it broke")


def test_a_sweep_without_one_says_nothing() -> None:
    study = study_of(STUDY)
    sweep = sweep_of(study)
    best = sweep.best()
    assert best is not None
    assert list(importance.change_lines(study, sweep, best)) == []


def test_a_base_that_nothing_beats_is_told_as_such() -> None:
    study = study_of(STUDY)
    sweep, _ = with_base(study)
    told = list(importance.change_lines(study, sweep, sweep.trials[0]))
    assert told == ["trial 0 is config_x.sh as it stands: nothing that was tried is better"]
