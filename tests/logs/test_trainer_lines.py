"""Logs of common trainers as their libraries print them: the evals of the validation set, in order, or a mark EDIT."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.cli.init import ScriptFacts, study_text
from lora_tune.logs.guess import LogGuess, guess

Line = Callable[[int], str]
"""What is printed at the i-th eval, i from 1 on."""


def read(log: str) -> LogGuess:
    guessed = guess(log.encode())
    assert guessed is not None
    return guessed


def evals(log: str) -> list[tuple[float, float]]:
    return [(point.samples, pytest.approx(point.loss)) for point in read(log).run.evals]


def printed(line: Line, count: int = 4) -> str:
    return "".join(line(i) + "\n" for i in range(1, count + 1))


@pytest.mark.parametrize(
    ("line", "at", "rising"),
    [
        (lambda i: f"[{i}]\ttrain-mlogloss:{1 / i:.5f}\teval-mlogloss:{0.9 - 0.1 * i:.5f}", 1, False),
        (lambda i: f"[{i}]\ttrain-merror:0.2000\ttest-merror:{0.9 - 0.1 * i:.4f}", 1, False),
        (lambda i: f"[{i}]\ttrain-error:0.2000\teval-error:{0.9 - 0.1 * i:.4f}", 1, False),
        (lambda i: f"[{i}]\tvalid_0's multi_logloss: {0.9 - 0.1 * i:.4f}", 1, False),
        (lambda i: f"[{i * 10}]\tvalid_0's l2: {0.9 - 0.1 * i:.4f}", 10, False),
        (lambda i: f"[{i}/100] 1 tree, 31 leaves, train loss: 0.1, val loss: {0.9 - 0.1 * i:.4f}, in 0.01s", 1, False),
        (lambda i: f"Iteration {i}, loss = {2 / i:.8f}\nValidation score: {0.5 + 0.1 * i:.6f}", 1, True),
        (lambda i: f"Epoch {i}/5 - loss: {1 / i:.4f} - val_r2: {0.5 + 0.1 * i:.4f}", 1, True),
        (lambda i: f"Epoch {i}: train loss {1 / i:.4f}, validation R² = {0.5 + 0.1 * i:.4f}", 1, True),
        (lambda i: f"step {i * 100} train MSE {1 / i:.4f} test R^2: {0.5 + 0.1 * i:.4f}", 100, True),
        (lambda i: f"Epoch {i}/5, train loss: {0.1 / i:.4f}, val PSNR: {25 + i}.50 dB, val SSIM: 0.81", 1, True),
        (lambda i: f"[iter {i * 1000}] Evaluating test: L1 0.04 PSNR {25 + i}.5", 1000, True),
        (lambda i: f"[epoch:  0, iter:   {i * 5},000, lr:(2e-04,)] l_pix: 2e-02\nINFO: Validation Set5\n"
         f"\t # psnr: {25 + i}.5\tBest: 30.1 @ 5000 iter", 5000, True),
        (lambda i: f"Eval num_timesteps={i * 500}, episode_reward={20 * i - 150}.25 +/- 5.20", 500, True),
        (lambda i: f"global_step={i * 128}, episodic_return={10 + i}.0", 128, True),
        (lambda i: f"Episode {i * 10}\tLast reward: 12.00\tAverage reward: {9.5 + i:.2f}", 10, True),
        (lambda i: f"Episode: {i}, Total Reward: {10 + i}, Epsilon: 0.9", 1, True),
        (lambda i: f"step {i * 1000} | actor_loss -1.2 | eval_return {100 + i * 20}.5", 1000, True),
        (lambda i: f"step {i * 250} | loss: 0.9\nStep {i * 250} | Validation bpb: {0.9 - 0.1 * i:.4f}\n"
         "Minimum validation bpb: 0.1", 250, False),
        (lambda i: f"[batch={i * 20}/100]:\n\t Train loss/train/total: {3 / i:.4f}\n[Eval batch=2/2] Eval on eval data:"
         f"\n\t Eval metrics/eval/CrossEntropy: {3.1 - 0.1 * i:.4f}", 20, False),
        (lambda i: f"[epoch={i}][batch=8/8]:\n\t Train loss/train/total: {3 / i:.4f}\n[Eval batch=2/2] Eval on eval:"
         f"\n\t Eval metrics/eval/MulticlassAccuracy: {0.5 + 0.1 * i:.4f}", 1, True),
        (lambda i: f"\r1|{2 * i}|Loss: {3 / i:.6f}:  20%|██        | 2/10 [00:02<00:08,  1.1s/it]\n"
         f"INFO:torchtune.utils._logging:Validation loss: {3.1 - 0.1 * i:.4f}", 2, False),
        (lambda i: f" validation loss at iteration {(i - 1) * 10}{' (pre-train validation)' * (i == 1)} | lm"
         f" loss value: {2.5 - 0.1 * i:.6E} | lm loss PPL: 2.5E+00 |", 10, False),
    ],
)  # fmt: skip
def test_the_evals_of_the_validation_set_are_read_without_a_mark(line: Line, at: int, rising: bool) -> None:
    guessed = read(printed(line))
    assert guessed.is_eval
    assert guessed.rising == rising
    samples = [point.samples for point in guessed.run.evals]
    assert [b - a for a, b in pairwise(samples)] == [at] * 3
    values = [point.loss for point in guessed.run.evals]
    assert values == sorted(values, reverse=not rising)
    assert len({*values}) == 4
    assert "EDIT" not in study_text(ScriptFacts(command=("train",), log=guessed)).partition("[space]")[0]


@pytest.mark.parametrize(
    "line",
    [
        lambda i: f"\r1|{i}|Loss: {3 / i:.6f}:  20%|██        | 2/10 [00:02<00:08,  1.1s/it]",
        lambda i: f"-- Epoch {i}\nNorm: 1.2, NNZs: 4, Bias: 0.1, T: {i * 150}, Avg. loss: {1 / i:.6f}",
        lambda i: ("      Iter       Train Loss   Remaining Time\n" if i == 1 else "") + f"{i:10d} {2 / i:16.4f} 0.10s",
    ],
)
def test_what_prints_a_training_loss_alone_is_marked(line: Line) -> None:
    guessed = read(printed(line))
    assert not guessed.is_eval
    assert len(guessed.run.evals) == 4


@pytest.mark.parametrize("form", [
    "Ep 1 | iter {i} | step {step}: loss train (curr): {loss}, val (prev val iter): {val} | iter time: 166.23 ms",
    "Epoch 1 | iter {i} step {step} | loss train: {loss}, val: {val} | iter time: 200.12 ms (step)",
])  # fmt: skip
def test_a_line_of_each_iteration_that_shows_the_last_eval_gives_each_eval_once(form: str) -> None:
    rows = [(i, i // 4, 3 - 0.03 * i, "n/a" if i < 20 else f"{3 - 0.02 * (i // 20 * 20):.3f}") for i in range(1, 61)]
    log = "\n".join(form.format(i=i, step=step, loss=f"{loss:.3f}", val=val) for i, step, loss, val in rows)
    assert evals(log + "\n") == [(5, 2.6), (10, 2.2), (15, 1.8)]


def test_a_progress_line_that_shows_the_last_eval_sixty_times_has_as_many_evals_as_values() -> None:
    log = printed(lambda i: f"step {i} | loss {3 - 0.03 * i:.3f} | val_loss {3.2 - 0.03 * (i // 10 * 10):.3f}", 60)
    assert len(evals(log)) == 7
    assert read(log).settings["repeated"] is True


def test_a_plateau_of_real_evals_stays_as_it_is() -> None:
    log = printed(lambda i: f"epoch {i} loss {3 / i:.3f} val_acc {0.5 if i < 3 else 0.6:.2f}", 5)
    assert len(evals(log)) == 5


def test_the_summary_of_a_tracker_is_no_eval() -> None:
    summary = "wandb: Run summary:\nwandb: eval/loss 2.7\nwandb: train/global_step 50\nwandb: train/epoch 5\n"
    guessed = read(printed(lambda i: f"{{'loss': {3 - 0.1 * i:.3f}, 'epoch': {i}}}") + summary)
    assert not guessed.is_eval
    with_evals = printed(lambda i: f"epoch {i} train_loss {2 / i:.3f}\nepoch {i} val loss {3 - 0.1 * i:.3f}") + summary
    assert len(evals(with_evals)) == 4


def test_a_cross_validation_comes_to_the_mean_of_its_folds() -> None:
    assert evals("fold 0 auc 0.81\nfold 1 auc 0.83\nfold 2 auc 0.80\nmean cv auc: 0.8133\n") == [(2, 0.8133)]
    assert read("Fold 1: accuracy = 0.91\nFold 2: accuracy = 0.93\nAverage accuracy: 0.92\n").rising


@pytest.mark.parametrize(
    ("form", "other"),
    [
        ("step {step} validation loss (wiki): {a}\nstep {step} validation loss (code): {b}", "validation loss code"),
        ("epoch {step} val loss [in-domain]: {a} val loss [ood]: {b}", "val loss ood"),
        ("{{'eval_wiki_loss': {a}, 'epoch': {step}}}\n{{'eval_code_loss': {b}, 'epoch': {step}}}", "eval code loss"),
    ],
)
def test_of_several_sets_one_is_read_and_the_others_are_named(form: str, other: str) -> None:
    guessed = read("\n".join(form.format(step=i, a=3 - i / 10, b=2 - i / 10) for i in range(1, 4)) + "\n")
    assert [point.loss for point in guessed.run.evals] == [2.9, 2.8, 2.7]
    assert guessed.other_sets == (other,)
    assert f"EDIT: not read: {other}" in study_text(ScriptFacts(command=("train",), log=guessed))


def test_a_dict_of_eval_sets_names_the_metric_that_is_read() -> None:
    log = printed(lambda i: f"{{'eval_squad_loss': {2 - 0.1 * i:.2f}, 'eval_runtime': 3.2, 'epoch': {i}.0}}")
    guessed = read(log + log.replace("squad", "mnli"))
    assert (guessed.settings["kind"], guessed.metric) == ("hf_trainer", "eval_squad_loss")


@given(st.lists(st.text(alphabet="0123456789|[]=: .,abLosvtepiRr²^-#\t'", max_size=80), max_size=6))
def test_no_line_of_any_form_breaks_the_guess(lines: list[str]) -> None:
    guess("\n".join(lines).encode())
