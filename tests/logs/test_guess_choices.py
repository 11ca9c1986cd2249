"""Logs that print several things like an eval: the validation set's is read, and what is not read is marked EDIT."""

from __future__ import annotations

import pytest

from lora_tune.cli.init import ScriptFacts, study_text
from lora_tune.logs.guess import LogGuess, guess
from lora_tune.logs.tokens import losses

EVALS = [(10, 0.8), (20, 0.7), (30, 0.6)]


def printed(form: str) -> bytes:
    """The form once for each eval, with the step, its value, and that of another set, which is twice it."""
    return "\n".join(form.format(step=step, value=value, other=2 * value) for step, value in EVALS).encode()


def read(log: bytes) -> LogGuess:
    guessed = guess(log)
    assert guessed is not None
    return guessed


def evals(log: bytes) -> list[tuple[float, float]]:
    return [(point.samples, point.loss) for point in read(log).run.evals]


@pytest.mark.parametrize(
    "form",
    [
        "step {step} test_loss {other} val_loss {value}",
        "step {step} test loss {other:.2f} valid perplexity {value}",
        "step {step} test loss: {other}\nstep {step} val loss: {value}",
        '{{"step": {step}, "test/loss": {other}, "valid/loss": {value}}}',
    ],
)
def test_a_test_set_is_not_read_where_there_is_a_validation_set(form: str) -> None:
    assert evals(printed(form)) == EVALS


def test_a_test_set_is_read_where_there_is_no_other() -> None:
    assert evals(printed("step {step} train loss {other} test loss {value}")) == EVALS


@pytest.mark.parametrize(
    "line",
    ["step 1 val_loss improved by 0.05", "step 1: val_loss decreased by 0.05 to 0.9", "step 1 val_loss_delta 0.05"],
)
def test_how_far_a_loss_moved_is_no_loss(line: str) -> None:
    assert losses(line) == []


@pytest.mark.parametrize("word", ["Highest", "Maximum", "Minimum", "Max"])
def test_an_extreme_of_earlier_evals_is_no_eval(word: str) -> None:
    assert losses(f"{word} validation loss: 0.9")[0].score < 8


def test_what_a_loss_improved_to_is_one() -> None:
    assert [loss.number for loss in losses("step 1: val_loss improved to 0.9")] == ["0.9"]


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("step {step} val_loss_wiki {value} val_loss_code {other}", "val loss code"),
        ("{{'eval_wiki_loss': {value}, 'epoch': {step}}}\n{{'eval_code_loss': {other}, 'epoch': {step}}}",
         "eval code loss"),
        ('{{"step": {step}, "eval/wiki/loss": {value}, "eval/code/loss": {other}}}', "eval/code/loss"),
    ],
)  # fmt: skip
def test_evals_of_several_sets_are_named_and_one_is_read(form: str, other: str) -> None:
    log = printed(form)
    assert evals(log) == EVALS
    assert f"# EDIT: not read: {other}; name that one instead" in study_text(ScriptFacts(command=(), log=read(log)))


def test_a_whole_beside_its_parts_is_no_other_set() -> None:
    assert read(printed("step {step} val_loss {value} val_box_loss {other}")).other_sets == ()


@pytest.mark.parametrize(
    ("values", "word", "direction"), [((0.6, 0.7), "rises", "maximize"), ((0.7, 0.6), "falls", "")]
)
def test_a_set_without_a_measure_beside_a_loss_is_judged_by_its_trend_and_marked(
    values: tuple[float, float], word: str, direction: str
) -> None:
    """PyTorch Geometric's examples print accuracies so, and errors."""
    lines = (f"Epoch: 00{n}, Loss: 0.4, Train: 0.9, Val: {value}, Test: 0.5\n" for n, value in enumerate(values, 1))
    guessed = read("".join(lines).encode())
    assert [(e.samples, e.loss) for e in guessed.run.evals] == [*enumerate(values, 1)]
    text = study_text(ScriptFacts(command=(), log=guessed))
    assert f"# EDIT: Val says no measure; it {word} there" in text
    assert ('direction = "maximize"' in text) == bool(direction)


PRETRAINED = (
    " validation{set} loss at iteration 0 (pre-train validation) | lm loss value: 2.4E+00 | lm loss PPL: 1.0E+01 |"
)
TRAINED = " validation{{set}} loss at iteration {step} | lm loss value: {value} | lm loss PPL: 1.0E+01 |"


def bridge(*sets: str) -> bytes:
    forms = [PRETRAINED, *(TRAINED.format(step=step, value=value) for step, value in EVALS)]
    return "\n".join(form.format(set=name) for form in forms for name in sets).encode()


def test_an_eval_before_training_does_not_hide_the_others() -> None:
    assert evals(bridge("")) == [(0, 2.4), *EVALS]
    assert read(bridge("")).other_sets == ()


def test_of_named_sets_one_is_read_whole_and_the_others_are_shown() -> None:
    log = bridge("-set-A", "-set-B", "-set-C")
    assert evals(log) == [(0, 2.4), *EVALS]
    guessed = read(bridge("-set-A", "-set-B", "-set-C"))
    assert guessed.settings["loss"] == "validation set a lm loss value"
    assert guessed.other_sets == tuple(f"validation set {letter} lm loss value" for letter in "bc")
