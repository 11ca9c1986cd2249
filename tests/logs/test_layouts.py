"""Layouts of trainers that no rule was written for: each from memory of what its library prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest

from lora_tune.logs.guess import guess
from lora_tune.logs.readers import NamedReader
from lora_tune.logs.tokens import Numbers

N = (1, 2, 3)


def each(form: str, **more: object) -> str:
    """The form once for each eval: n, its value v, and w, which is twice as much and another set's."""
    return "".join(form.format(n=n, v=0.9 - n / 10, w=1.8 - n / 5, **more) for n in N)


LOSSES = [(1, 0.8), (2, 0.7), (3, 0.6)]
BY_TEN = [(10 * n, v) for n, v in LOSSES]
BY_HUNDRED = [(100 * n, v) for n, v in LOSSES]

LAYOUTS = {
    "ESPnet": (each("[host] 2026-11-23 10:00:00,1 (trainer:338) INFO: {n}epoch results: [train] iter_time=0.1, loss={w}"
                    ", time=3 minutes and 2 seconds, total_count=10, [valid] loss={v}, cer=0.1, time=10 seconds\n"
                    "INFO: epoch {n} done\n"), LOSSES),
    "Detectron2": (each("[11/23 10:00:00 d2.utils.events]:  eta: 0:01:00  iter: {n}9  total_loss: {w}  loss_cls: 0.2  "
                        "time: 0.4  lr: 0.001  max_mem: 2000M\n[11/23 10:00:01 d2.evaluation.testing]: copypaste: "
                        "Task: bbox\n[11/23 10:00:01 d2.utils.events]:  iter: {n}9  validation_loss: {v}\n"),
                   [(19, 0.8), (29, 0.7), (39, 0.6)]),
    "DeepSpeed-Chat": (each("***** Evaluating perplexity, Epoch {n}/3 *****\nppl: {w}, loss: {v}\n"), LOSSES),
    "Megatron with a test set": (each(
        " iteration       {n}0/ 100 | lm loss: {w}E+00 | grad norm: 0.5 |\n"
        "------------------------\n validation loss at iteration {n}0 on validation set | lm loss value: {v}E+00 | "
        "lm loss PPL: 2E+00 | \n------------------------\n"), BY_TEN),
    "torchtune's metrics on disk": (each("Step {n}0 | loss:{w} lr:0.0003 tokens_per_second_per_gpu:100 \n"
                                         "Step {n}0 | val_loss:{v} \n"), BY_TEN),
    "LLaMA-Factory": (each("{{'loss': {w}, 'grad_norm': 0.3, 'learning_rate': 5e-05, 'epoch': {n}.0, 'num_input_tokens_"
                           "seen': {n}000}}\n{{'eval_loss': {v}, 'eval_runtime': 1.0, 'epoch': {n}.0, "
                           "'num_input_tokens_seen': {n}000}}\n"), LOSSES),
    "XGBoost's rmse of two sets": (each("[{n}0]\tvalidation_0-rmse:{w}\tvalidation_1-rmse:{w}\n")
                                   .replace("validation_0", "train").replace("validation_1", "eval"),
                                   [(10, 1.6), (20, 1.4), (30, 1.2)]),
    "LightGBM with training": (each("[{n}00]\ttraining's l2: {w}\tvalid_1's l2: {v}\n"), BY_HUNDRED),
    "CatBoost": (each("{n}00:\tlearn: {w}\ttest: {v}\tbest: 0.1 (300)\ttotal: 12ms\tremaining: 1.2s\n"), BY_HUNDRED),
    "Lightning's lines": (each("Epoch {n}: 100%|██████████| 20/20 [00:01<00:00, 19.9it/s, v_num=0, train_loss={w}, "
                               "val_loss={v}]\n"), LOSSES),
    "allennlp": (each("2026-11-23 10:00:00 - INFO - allennlp.training - Epoch {n}/9\n"
                      "2026-11-23 10:00:01 - INFO - allennlp - loss               |  {w}  |  {v}\n")
                 .replace("loss               |", "validation loss |"), [(1, 1.6), (2, 1.4), (3, 1.2)]),
    "spaCy in columns": ("E    #       LOSS TAGGER  TAG_ACC  SCORE \n---  ------  -----------  -------  ------\n"
                         + each("  0     {n}00        12.53    90.10    {v:.2f}\n"), BY_HUNDRED),
    "fastai": ("epoch     train_loss  valid_loss  error_rate  time    \n"
               + each("{n}         {w:.6f}    {v:.6f}    0.100000    00:10     \n"), LOSSES),
    "RLlib": (each("| PPO_CartPole | RUNNING | iter {n} | ts {n}000 | episode_reward_mean: {v} |\n"), LOSSES),
    "SB3's rollout": (each("---------------------------------\n| rollout/           |          |\n|    ep_len_mean     "
                           "| 21       |\n|    ep_rew_mean     | {v}     |\n| time/              |          |\n"
                           "|    fps             | 900      |\n|    total_timesteps | {n}00     |\n"
                           "---------------------------------\n"), BY_HUNDRED),
    "timm's summary": (each("Test: [   0/9]  Time: 0.1 (0.1)  Loss:   9.1 ( 9.1)  Acc@1:  12.5 ( 12.5)\n"
                            "Test: [   9/9]  Time: 0.1 (0.1)  Loss:   9.0 ( {v})  Acc@1:  12.5 ( 14.5)\n"
                            "Train: {n} [   0/9 (  0%)]  Loss: 2.1 (2.1)  LR: 1.0e-03\n"),
                       [(0, 0.8), (1, 0.7), (2, 0.6)]),
    "Whisper's WER": (each("{{'eval_loss': {v}, 'eval_wer': 31.2, 'eval_runtime': 9.0, 'epoch': {n}.0}}\n"), LOSSES),
    "R's keras": (each("Epoch {n}/3\n8/8 - 1s - 90ms/step - loss: {w} - val_loss: {v} - lr: 0.001\n"), LOSSES),
    "Flux in Julia": (each("[ Info: epoch {n}\n[ Info: train_loss = {w}  test_loss = {v}\n"), LOSSES),
    "Flax's CLU": (each("I1123 10:00:00.1 14 train.py:9] eval epoch: {n}, loss: {v}, accuracy: 91.00\n"), LOSSES),
    "PaddleDetection": (each("[11/23 10:00:00] ppdet.engine INFO: Epoch: [{n}] [ 0/10] learning_rate: 0.01 loss: {w}\n"
                             "[11/23 10:00:01] ppdet.metrics INFO: Epoch: [{n}] eval mAP: {v}\n"), LOSSES),
    "fairseq": (each("2026-11-23 | INFO | valid | epoch 001 | valid on 'valid' subset | loss {v} | ppl 2.1 | wps 100 | "
                     "num_updates {n}0 | best_loss 0.1\n"), BY_TEN),
    "axolotl's table": (each("[INFO] {{'eval_loss': {v}, 'eval_runtime': 0.5, 'epoch': {n}.0}}\n"), LOSSES),
    "MosaicML's LLM Foundry": (each("[batch={n}0/30]:\n\t Train time/batch: {n}0\n\t Train loss/train/total: {w}\n"
                                    "[Eval batch=1/2] Eval on eval data\n[Eval batch=2/2] Eval on eval data:\n"
                                    "\t Eval metrics/eval/LanguageCrossEntropy: {v}\n"), BY_TEN),
    "scikit-learn's SGD with validation": (each("-- Epoch {n}\nNorm: 1.2, NNZs: 4, Bias: 0.1, T: {n}00, "
                                                "Avg. loss: {w}\nValidation score: {v}\n"), LOSSES),
    "a count of correct ones": (each("Epoch {n}: test {n}12/1000 correct\n"), [(1, 0.112), (2, 0.212), (3, 0.312)]),
    "minGPT's adder": (each("iter_dt 9.1ms; iter {n}00: train loss {w}\ntrain final score: 5/1000 = 0.50% correct\n"
                            "test final score: {n}00/1000 = {n}0.00% correct\n"),
                       [(100, 0.1), (200, 0.2), (300, 0.3)]),
    "options printed before training": ("Namespace(epochs=3, iters=300, lr=0.004)\n" + each(
        "Train Epoch:  {n} [  6272/ 50000 (13%)]\tLearning rate: 0.0040\tLoss: {w}\n"
        "\nTest set: Average loss: {v}\n"), LOSSES),
    "vloss": (each("ep {n} | tloss {w} | vloss {v} | 12s\n"), LOSSES),
    "German": (each("Epoche {n}/3 - Trainingsverlust: {w} - Validierungsverlust: {v}\n"), LOSSES),
    "French": (each("Époque {n} : perte {w}, perte de validation {v}\n"), LOSSES),
    "Spanish": (each("época {n}: pérdida de entrenamiento = {w}, pérdida de validación = {v}\n"), LOSSES),
    "Chinese": (each("轮次 {n} 训练损失：{w} 验证损失：{v}\n"), LOSSES),
    "the epoch below the loss": (each("val loss: {v}\ntime: 3.1 s\nepoch: {n}\n----\n"), LOSSES),
    "a number alone counts": (each("{n}\neval: split train. loss {w}e-03. error 0.62%. misses: 45\n"
                                   "eval: split test . loss {v}e+00. error 4.09%. misses: 82\n"), LOSSES),
    "an eval's set in brackets": (each("step {n}0 loss[train]={w:.2f} loss[val]={v:.2f}\n"), BY_TEN),
    "an array": (each("epoch: {n} - val_loss: [{v}]\n"), LOSSES),
    "a logger's columns": (each("2026-11-23 10:00:00 INFO step={n}0 split=train loss={w}\n"
                                "2026-11-23 10:00:00 INFO step={n}0 split=val loss={v}\n"), BY_TEN),
    "TensorFlow 1's estimator": (each("INFO:tensorflow:loss = {w}, step = {n}0 (1.2 sec)\nINFO:tensorflow:Saving dict "
                                      "for global step {n}0: accuracy = 0.5, eval_loss = {v}, global_step = {n}0\n"),
                                 BY_TEN),
    "Kaldi": (each("LOG (nnet3-train) epoch {n}: train-loglike loss {w}, valid-loss {v}\n"), LOSSES),
    "word2vec in C with a score": (each("Alpha: 0.02  Progress: {n}0.0%  epoch {n} dev accuracy: {v}\n"), LOSSES),
    "torchtune's validation": (each("{n}|{n}0|Loss: {w}: 100%|██████████| 20/20 [00:20<00:00,  1.0it/s]\n"
                                    "{n}|{n}0|Validation Loss: {v}\n"), BY_TEN),
    "unsloth's table by tabs": ("Step\tTraining Loss\tValidation Loss\n" + each("{n}0\t{w}\t{v}\n"), BY_TEN),
    "tianshou": (each("Epoch #{n}: test_reward: {v} ± 3.1, best_reward: 99.0 ± 1.0 in #2\n"), LOSSES),
    "Spinning Up": (each("---------------------------------------\n|             Epoch |               {n} |\n"
                         "|      AverageEpRet |             {v} |\n|          StdEpRet |            12.1 |\n"
                         "|          MaxEpRet |             200 |\n|             LossV |             {w} |\n"),
                    LOSSES),
    "ESPnet's epochs": (each("(trainer:358) INFO: {n}epoch results: [train] loss_ctc={w}, loss={w}, total_count=100, "
                             "[valid] loss_ctc=9.1, loss_att=8.1, acc=0.5, cer=0.1, loss={v}, time=5.1 seconds\n"),
                        LOSSES),
    "LIBMF": ("iter      tr_rmse      va_rmse          obj\n" + each("  {n}0       {w}       {v}   2.2915e+04\n"),
              BY_TEN),
    "GloVe's cost": (each("11/27/26 - 06:31.56AM, iter: 0{n}0, cost: {v}\n"), BY_TEN),
    "NeMo's text progress": (each("Training epoch 0, iteration {n}/99 | lr: 0.0001 | global_batch_size: 8 | global_step"
                                  ": {n}9 | reduced_train_loss: {w} | consumed_samples: {n}60\nValidation: iteration "
                                  "1/2\nTraining epoch 0, iteration {n}/99 | lr: 0.0001 | global_step: {n}9 | "
                                  "reduced_train_loss: {w} | consumed_samples: {n}60 | val_loss: {v}\n"),
                             [(160, 0.8), (260, 0.7), (360, 0.6)]),
    "LightGBM's program": (each("[LightGBM] [Info] Iteration:{n}0, training auc : 0.95\n[LightGBM] [Info] Iteration:"
                                "{n}0, valid_1 l2 : {v}\n"), BY_TEN),
    "Lightning's boxes": (each("Epoch {n}: 100%|███| 8/8 [00:01<00:00,  7.7it/s, v_num=3]\n───────────────────────\n"
                               "     Validate metric           DataLoader 0\n───────────────────────\n        val_acc"
                               "              0.7\n        val_loss            {v}\n"), LOSSES),
    "Poutyne's steps of each set": (each("Epoch: {n}/3 Train steps: 10 Val steps: 2 1.25s loss: {w} acc: 90.1 val_loss:"
                                         " {v} val_acc: 92.1\n"), LOSSES),
    "GluonTS": (each("INFO:gluonts.trainer:Epoch[{n}] Evaluation metric 'epoch_loss'={w}\n"
                     "INFO:gluonts.trainer:Epoch[{n}] Evaluation metric 'validation_epoch_loss'={v}\n"), LOSSES),
    "OpenCLIP": (each("10:00:00 | INFO | Eval Epoch: {n} [256 / 2000]\tClip Loss: 2.000000\t\n"
                      "10:00:01 | INFO | Eval Epoch: {n} image_to_text_R@1: 0.1\tclip_val_loss: {v}\tepoch: {n}.0\n"),
                 LOSSES),
    "Coqui's change behind the mean": (each(
        " > EPOCH: {n}/3\n   --> STEP: 0/10 -- GLOBAL_STEP: {n}0\n     | > loss: {w}  (1.9)\n\n  --> EVAL PERFORMANCE\n"
        "     | > avg_loader_time: 0.01 (+0.00)\n     | > avg_loss: {v} (-0.10)\n"), BY_TEN),
    "Marian": (each("[10:00:00] Ep. 1 : Up. {n}00 : Sen. 10,100 : Cost {w} * 10,000 after 30,000\n"
                    "[10:00:01] [valid] Ep. 1 : Up. {n}00 : cross-entropy : {v} : new best\n"
                    "[10:00:01] [valid] Ep. 1 : Up. {n}00 : bleu : 10.1 : new best\n"), BY_HUNDRED),
    "Tacotron 2's number in the name": (each(
        "Train loss {n}00 {w} Grad Norm 1.200000 3.30s/it\nValidation loss {n}00:  {v}  \n"
        "Saving model and optimizer state at iteration {n}00 to out\n"), BY_HUNDRED),
    "a panel of rich": (each(
        "╭─────────┬──────────╮\n│ Metric  │ Value    │\n├─────────┼──────────┤\n│ epoch   │ {n}        │\n"
        "│ train/loss │ {w}    │\n│ val/loss │ {v}    │\n╰─────────┴──────────╯\n"), LOSSES),
    "PyTorch's ImageNet example, training on behind an eval": (each(
        "".join(f"Epoch: [{{n}}][{at:3d}/30]\tTime  0.1 ( 0.1)\tLoss {{w}}e+00 ({{w}}e+00)\n" for at in (0, 10, 20))
        + "Test: [ 1/11]\tTime  0.1 ( 0.1)\tLoss 9.1e+00 (9.1e+00)\nTest: [11/11]\tTime  0.1 ( 0.1)\tLoss 9.1e+00 ({v}e"
        "+00)\n *   Acc@1 60.250 Acc@5 90.100\n"), LOSSES),
    "an abbreviation with its point": (each(
        "Epoch: 0{n} | Epoch Time: 0m 10s\n\tTrain Loss: {w:.3f} | Train Acc: 60.00%\n\t Val. Loss: {v:.3f} |  Val. Acc"
        ": 61.00%\n") + "Test Loss: 0.334 | Test Acc: 85.28%\n", LOSSES),
    "sets alone, in percent": (each(
        "Run: 01, Epoch: 0{n}, Loss: {w:.4f}, Train: 30.12%, Valid: {n}0.25%, Test: 27.03%\n")
        + "Highest Valid: 30.25\n  Final Test: 27\n", [(1, 10.25), (2, 20.25), (3, 30.25)]),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_evals_are_read(name: str) -> None:
    log, evals = LAYOUTS[name]
    guessed = guess(log.encode())
    assert guessed is not None
    first = evals[0][0] == 0 and guessed.unit == "epoch"
    read = [(point.samples - first, round(point.loss, 6)) for point in guessed.run.evals]
    assert read == [(at, pytest.approx(value)) for at, value in evals], guessed.settings
    assert guessed.is_eval or name in ("RLlib", "GloVe's cost")


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_names_read_the_same_whether_a_line_of_their_form_came_before_or_not(name: str) -> None:
    log, _ = LAYOUTS[name]
    guessed = guess(log.encode())
    assert guessed is not None
    if guessed.settings["kind"] != "named":
        return
    before, anew = NamedReader(**_own(guessed.settings)), NamedReader(**_own(guessed.settings))
    before.feed(log.encode())
    with patch("lora_tune.logs.tokens._MOST_FORMS", 0):
        anew.feed(log.encode())
    points = [
        [(at, loss) for kept in (b.evals, b.train) for at, (loss, _) in kept.items()]
        for b in (before.run_builder, anew.run_builder)
    ]
    assert points[0] == points[1] != []


def _own(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "kind"}


def test_what_differs_in_more_than_its_numbers_is_another_form() -> None:
    numbers = Numbers({(("val", "loss", "1"), ""): "loss", (("step",), "step"): "step", (("acc", "top1"), ""): "acc"})
    assert [numbers.of(line) for line in (
        "step 1 val_loss 1: 0.5", "step 2 val_loss 2: 0.4", "step 3 val_loss 1: 0.3",
        "step 4 acc@5 0.9", "step 5 acc@1 0.7", "step 1,000 loss 0.1", "step 12,345 loss 0.1", "step 7 loss 7",
        "step 8 loss 9",
    )] == [
        {"step": "1", "loss": "0.5"}, {"step": "2"}, {"step": "3", "loss": "0.3"},
        {"step": "4"}, {"step": "5", "acc": "0.7"}, {"step": "1,000"}, {"step": "12,345"}, {"step": "7"}, {"step": "8"},
    ]  # fmt: skip
