"""A log that nobody has described: its format is guessed, and the guess reads it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tune.cli.init import ScriptFacts, study_text
from lora_tune.logs.guess import guess
from lora_tune.logs.lines import make_reader
from lora_tune.logs.tokens import losses, positions

KERAS = "".join(
    f"Epoch {epoch}/3\n\x1b[1m 1/10\x1b[0m \x1b[32m━\x1b[0m 0s 9ms/step - loss: 2.30\r"
    f"10/10 ━━━━ 1s 5ms/step - accuracy: 0.5 - loss: 1.2 - val_accuracy: 0.6 - val_loss: 0.{9 - epoch}\n"
    for epoch in (1, 2, 3)
)
BAR = (
    "\rEpoch 0: 100%|##| 20/20 [00:01<00:00, loss=0.9]\rEpoch 0: 100%|##| 20/20 [00:01<00:00, loss=0.9, val_loss=1.0]"
    "\rEpoch 1:  50%|# | 10/20 [00:01<00:01, loss=0.8, val_loss=1.0]"
    "\rEpoch 1: 100%|##| 20/20 [00:01<00:00, loss=0.7, val_loss=1.0]"
    "\rEpoch 1: 100%|##| 20/20 [00:01<00:00, loss=0.7, val_loss=0.8]\n"
)
LLM_C = (
    "val loss 5.3\nstep 1/40 | loss 4.1 (+nanz)| norm 1.0 | 100 ms\nstep 2/40 | loss 4.0 (+0.1z)| norm 1.0\n"
    "val loss 4.9\nstep 3/40 | loss 3.9\nval loss 4.8\n"
)
AFTER = "".join(
    f"=== evaluation after {n} samples ===\n  perplexity 12.3\n  loss: {9 - n / 1024}\n" for n in (1024, 2048)
)

FASTAI = (
    "epoch     train_loss  valid_loss  accuracy  time    \n"
    "0         1.200000    1.100000    0.600000  00:10     \n1         1.000000    0.900000    0.700000  00:10     \n"
)
CLU = "".join(
    f"I1120 10:00:01.12 14 logging_writer.py:64] [{n}] train_loss=1.0\n"
    f"I1120 10:00:01.12 14 logging_writer.py:64] [{n}] eval_accuracy=0.7, eval_loss=2.{5 - n // 50}\n"
    for n in (100, 200)
)
MEGATRON = "".join(
    f" iteration {n:8}/ 1000 | consumed samples: {n * 8:12} | lm loss: {3 - n / 1000:.6E} | grad norm: 0.5 |\n"
    f" validation loss at iteration {n} | lm loss value: {4 - n / 1000:.6E} | lm loss PPL: 9.1E+00 | \n"
    for n in (200, 400)
)
FAIRSEQ = "".join(
    f"INFO | valid | epoch {n:03} | valid on 'valid' subset | loss 2.{9 - n} | nll_loss 2.1 | num_updates {n * 90}\n"
    f"INFO | train | epoch {n:03} | loss 1.{9 - n} | nll_loss 1.1 | num_updates {n * 90} | lr 0.1\n"
    for n in (1, 2)
)
LOGURU = "".join(
    f"\x1b[32m10:00:0{n}.123\x1b[0m | \x1b[1mINFO\x1b[0m - iter {n}/9 | train 2.{9 - n} | val 3.{9 - n} | 12.3 ms\n"
    for n in (1, 2)
)
GRPO = "".join(
    f"{{'loss': 0.00{n}, 'rewards/format/mean': 0.1, 'reward': 0.{n}, 'reward_std': 0.3, 'kl': 0.01, 'epoch': {n}.0}}\n"
    for n in (1, 2)
)
TORCHTITAN = "".join(
    f"[rank0]:\x1b[31mstep: {n}  \x1b[32mloss: 2.{9 - n}  \x1b[33mmemory: 2.1GiB\x1b[39m\n"
    f"[rank0]:\x1b[31mvalidate step: {n}  \x1b[32mloss: 3.{9 - n}  \x1b[33mmemory: 2.1GiB\x1b[39m\n"
    for n in (1, 2)
)
MMENGINE = "".join(
    f"2026/11/23 10:00:0{n} - mmengine - INFO - Epoch(train)  [{n}][100/196]  lr: 1.0e-02  eta: 0:10:00  loss: 1.0\n"
    f"2026/11/23 10:00:0{n} - mmengine - INFO - Epoch(val) [{n}][100/100]    accuracy/top1: 8{n}.1  time: 0.02\n"
    for n in (1, 2)
)
COMPOSER = "".join(
    f"[epoch={n}][batch=9/9]:\n\t Train time/epoch: {n - 1}\n\t Train loss/train/total: 3.1\n"
    f"[Eval batch=5/5] Eval on eval data:\n\t Eval metrics/eval/LanguageCrossEntropy: 2.{9 - n}\n"
    for n in (1, 2, 3)
)
MNIST = "".join(
    f"Train Epoch: {n} [0/60000 (0%)]\tLoss: 2.9\nTrain Epoch: {n} [640/60000 (1%)]\tLoss: 2.8\n\n"
    f"Test set: Average loss: 0.{9 - n}, Accuracy: 9{n}00/10000 (9{n}%)\n\n"
    for n in (1, 2)
)
TIMM = "".join(
    f"Train: {n} [1250/1251 (100%)]  Loss: 2.95 (2.97)  Time: 0.2s,  210.18/s\n"
    f"Test: [   0/78]  Time: 0.058 (0.070)  Loss:  0.605 ( 0.605)  Acc@1:  87.500 ( 87.500)\n"
    f"Test: [  78/78]  Time: 0.058 (0.070)  Loss:  0.405 ( 1.{9 - n}45)  Acc@1:  87.500 ( 72.000)\n"
    for n in (0, 1)
)
PADDLE = "".join(
    f"Epoch {n}/4\nstep 10/10 - loss: 2.{9 - n} - acc: 0.8\nEval begin...\nstep 5/5 - loss: 3.{9 - n} - acc: 0.8\n"
    f"Eval samples: 100\n"
    for n in (1, 2, 3, 4)
)

STEPS_OF_EACH_EPOCH = "".join(
    "".join(f"Epoch [{n}/3], Step [{step}/500], Loss: 0.{9 - n}\n" for step in (100, 200, 300, 400, 500))
    + f"Test Accuracy: 8{n} %\n"
    for n in (1, 2, 3)
)
BATCHES_AND_THEIR_RESULT = "".join(
    f"Epoch: [{n}][0/50] loss 1.3\nEval: [ 1/3] loss: 0.9\nEval: [ 3/3] loss: 0.{n}\nepoch {n} eval_loss=2.{9 - n}\n"
    for n in (1, 2)
)

MMDETECTION = "".join(
    f"2026/11/23 10:00:0{n} - mmengine - INFO - Epoch(train)  [{n}][50/61]  grad_norm: 87.5  loss: 14.8\n"
    f"2026/11/23 10:00:0{n} - mmengine - INFO - Epoch(val) [{n}][350/416]    eta: 0:00:00  time: 0.01  memory: 758  \n"
    f"2026/11/23 10:00:0{n} - mmengine - INFO - bbox_mAP_copypaste: 0.751 0.987 0.876 -1.000 0.635 0.751\n"
    f"2026/11/23 10:00:0{n} - mmengine - INFO - Epoch(val) [{n}][416/416]    "
    f"coco/bbox_mAP: 0.{n}510  coco/bbox_mAP_50: 0.9870  time: 0.0122\n"
    for n in (1, 2)
)
MMCLASSIFICATION = "".join(
    f"2026-11-23 10:00:00,123 - mmcls - INFO - Epoch [{n}][550/575]\tlr: 8.5e-05, eta: 3:25:58, time: 0.47, loss: 1.0\n"
    f"2026-11-23 10:00:01,123 - mmcls - INFO - Epoch(val) [{n}][282]\tmAP: 0.{n}237, CP: 0.6, CF1: 0.7\n"
    for n in (1, 2)
)
PADDLE_CLAS = "".join(
    f"[2026/11/23 10:00:00] ppcls INFO: [Train][Epoch {n}/4][Iter: 0/304]CELoss: 0.2, loss: 0.2\n"
    f"[2026/11/23 10:00:01] ppcls INFO: [Eval][Epoch {n}][Iter: 10/32]CELoss: 0.9, loss: 0.9, top1: 0.9\n"
    f"[2026/11/23 10:00:02] ppcls INFO: [Eval][Epoch {n}][Avg]CELoss: 0.{9 - n}5, loss: 0.{9 - n}5, top1: 0.9\n"
    for n in (1, 2, 3, 4)
)
BATCHES_ALONE = "".join(
    f"[2026/11/23 10:00:00] ppcls INFO: [Train][Epoch {n}/4][Iter: 0/304]CELoss: 0.2, loss: 0.2\n"
    + "".join(
        f"[2026/11/23 10:00:01] ppcls INFO: [Eval][Epoch {n}][Iter: {at}/32]CELoss: 0.1, loss: 0.{9 - n}{at}, top1: 0\n"
        for at in (10, 20, 30)
    )
    for n in (1, 2, 3)
)
VALID_STEPS = "".join(
    "".join(f"INFO: epoch:{n}, train step:{at}, loss: 2.{9 - n}, lr: 0.1\n" for at in (0, 10))
    + "".join(f"INFO: epoch:{n}, valid step:{at}, loss: 1.{9 - n}{at}, top1: 0.5\n" for at in (0, 10, 20))
    for n in (0, 1, 2)
)
MLX = "".join(
    f"Iter {n}: Val loss 2.{9 - n // 100}, Val took 0.732s\n"
    f"Iter {n + 10}: Train loss 2.1, Learning Rate 1.0e-05, It/sec 1.02, Tokens/sec 88.0, Trained Tokens {86 * n}\n"
    for n in (100, 200)
)
LITGPT = "".join(
    f"Epoch 1 | iter {n - 1} step {n // 4} | loss train: 1.9, val: {'n/a' if n == 80 else 2.8} | "
    f"iter time: 45.7 ms (step)\n"
    f"Validating ...\niter {n}: val loss 2.{9 - n // 80}, val time: 31233.53 ms\n"
    for n in (80, 160)
)
LUZ = "".join(
    f"Epoch {n}/2\nTrain metrics: Loss: 0.5 - Acc: 0.8\nValid metrics: Loss: 0.{9 - n} - Acc: 0.8\n" for n in (1, 2)
)
JULIA = "".join(
    f"┌ Info: Evaluation\n│   epoch = {n}\n│   train_loss = 0.5\n│   test_loss = 0.{9 - n}\n└   accuracy = 0.91\n"
    for n in (1, 2)
)
OPENNMT = "".join(
    f"[2026-11-23 10:00:00,123 INFO] Step {n}/ 2000; acc: 55.1; ppl: 9.12; xent: 2.21; lr: 0.00012;\n"
    f"[2026-11-23 10:00:01,123 INFO] Train perplexity: 8.1\n"
    f"[2026-11-23 10:00:01,123 INFO] Validation perplexity: 1{9 - n // 1000}.5\n"
    for n in (1000, 2000)
)
PADDLE_NLP = "".join(
    f"[2026-11-23 10:00:00,123] [    INFO] - global step {n}, epoch: 1, batch: {n - 1}, loss: 0.61, accu: 0.7\n"
    f"eval loss: 0.{9 - n // 10}, accu: 0.8\n"
    for n in (10, 20)
)
ULTRALYTICS_CSV = (
    "epoch,time,train/box_loss,metrics/mAP50(B),val/box_loss,lr/pg0\n1,3.1,1.4,0.4,1.3,0.01\n2,6.2,1.3,0.5,1.2,0.01\n"
)

FORMS = [
    (MMDETECTION, [(1, 0.151), (2, 0.251)]),
    (MMCLASSIFICATION, [(1, 0.1237), (2, 0.2237)]),
    ("Iter(train) [100/200]  loss: 1.9\nIter(val) [50/50]    mIoU: 41.5  data_time: 0.1\n"
     "Iter(train) [200/200]  loss: 1.8\nIter(val) [50/50]    mIoU: 42.5  data_time: 0.1\n", [(100, 41.5), (200, 42.5)]),
    (PADDLE_CLAS, [(1, 0.85), (2, 0.75), (3, 0.65), (4, 0.55)]),
    (BATCHES_ALONE, [(1, 0.83), (2, 0.73), (3, 0.63)]),
    (VALID_STEPS, [(1, 1.92), (2, 1.82), (3, 1.72)]),
    (MLX, [(100, 2.8), (200, 2.7)]),
    (LITGPT, [(80, 2.8), (160, 2.7)]),
    (LUZ, [(1, 0.8), (2, 0.7)]),
    (JULIA, [(1, 0.8), (2, 0.7)]),
    (OPENNMT, [(1000, 18.5), (2000, 17.5)]),
    (PADDLE_NLP, [(10, 0.8), (20, 0.7)]),
    (ULTRALYTICS_CSV, [(1, 1.3), (2, 1.2)]),
    ("{'loss': 1.5, 'epoch': 0.5}\n{'eval_loss': 1.0, 'eval_runtime': 1.0, 'epoch': 1.0}\n", [(1, 1.0)]),
    ('{"step": 8, "train_loss": 1.0}\n{"step": 8, "val_loss": 1.2}\n{"step": 16, "val_loss": 1.1}\n',
     [(8, 1.2), (16, 1.1)]),
    ("step,train_loss,val_loss\n1,0.9,\n2,0.8,0.95\n4,0.7,0.85\n", [(2, 0.95), (4, 0.85)]),
    ("11/22/2026 10:00:00 - epoch 0: perplexity: 12.1 eval_loss: 2.5\nx epoch 1: perplexity: 9 eval_loss: 2.2\n",
     [(1, 2.5), (2, 2.2)]),
    ("[rank0]: step=10 eval_loss=0.8\n[rank1]: step=10 eval_loss=0.8\n[rank0]: step=20 eval_loss=0.7\n",
     [(10, 0.8), (20, 0.7)]),
    ("step 0: train loss 4.2, val loss 4.3\niter 0: loss 4.1, time 1ms\nstep 20: train loss 3.2, val loss 3.3\n",
     [(0, 4.3), (20, 3.3)]),
    ("Epoch: 1, Training Loss: 0.9, Validation Loss: 0.43\nEpoch: 2, Training Loss: 0.8, Validation Loss: 0.42\n",
     [(1, 0.43), (2, 0.42)]),
    ("step 40 best val loss 0.1 val loss 0.9\nstep 80 best val loss 0.1 val loss 0.8\n", [(40, 0.9), (80, 0.8)]),
    (KERAS, [(1, 0.8), (2, 0.7), (3, 0.6)]),
    (BAR, [(1, 1.0), (2, 0.8)]),
    (LLM_C, [(0, 5.3), (2, 4.9), (3, 4.8)]),
    (AFTER, [(1024, 8.0), (2048, 7.0)]),
    (FASTAI, [(1, 1.1), (2, 0.9)]),
    (CLU, [(100, 2.3), (200, 2.1)]),
    ("[1]:\ttrain-rmse:2.1\teval-rmse:2.2\n[2]:\ttrain-rmse:1.9\teval-rmse:2.0\n", [(1, 2.2), (2, 2.0)]),
    ("[10]\tvalid_0's binary_logloss: 0.5\n[20]\tvalid_0's binary_logloss: 0.4\n", [(10, 0.5), (20, 0.4)]),
    (MEGATRON, [(200, 3.8), (400, 3.6)]),
    (FAIRSEQ, [(90, 2.8), (180, 2.7)]),
    (LOGURU, [(1, 3.8), (2, 3.7)]),
    (GRPO, [(1, 0.1), (2, 0.2)]),
    (TORCHTITAN, [(1, 3.8), (2, 3.7)]),
    (MMENGINE, [(1, 81.1), (2, 82.1)]),
    (COMPOSER, [(1, 2.8), (2, 2.7), (3, 2.6)]),
    (MNIST, [(1, 0.8), (2, 0.7)]),
    (TIMM, [(1, 1.945), (2, 1.845)]),
    (STEPS_OF_EACH_EPOCH, [(1, 81), (2, 82), (3, 83)]),
    (BATCHES_AND_THEIR_RESULT, [(1, 2.8), (2, 2.7)]),
    ("Epoch 1/9\nTrain [1/9] loss: 2.9\nVal [1/9] loss: 2.5\nEpoch 2/9\nTrain [2/9] loss: 2.8\nVal [2/9] loss: 2.4\n",
     [(1, 2.5), (2, 2.4)]),
    ("Eval [1/9] step 10 loss 2.5\nEval [2/9] step 20 loss 2.4\n", [(10, 2.5), (20, 2.4)]),
    ("Train Epoch: 1 [0/60000 (0%)] Loss: 2.9\nTest: [10000/10000] loss: 2.5\n"
     "Train Epoch: 2 [0/60000 (0%)] Loss: 2.8\nTest: [10000/10000] loss: 2.4\n", [(1, 2.5), (2, 2.4)]),
    ("Epoch [1/4] train_loss: 1.0 val_acc: 90.1%\nEpoch [2/4] train_loss: 0.9 val_acc: 91.0%\n",
     [(1, 90.1), (2, 91.0)]),
    ("0:\tlearn: 2.6\ttest: 2.5\tbest: 2.5 (0)\n10:\tlearn: 2.3\ttest: 2.2\tbest: 2.2 (10)\n", [(0, 2.5), (10, 2.2)]),
    ("Step 600: validation loss 1,900.50\nStep 1,200: validation loss 900.25\n", [(600, 1900.5), (1200, 900.25)]),
    ("iter: 1,000 | val_loss: 1.2e+00 | lr: 1e-4\niter: 2,000 | val_loss: 9.0e-01 | lr: 1e-4\n",
     [(1000, 1.2), (2000, 0.9)]),
    ("  epoch                   =  1.0\n  eval_loss               =  2.5\n", [(1, 2.5)]),
    ("Validation 45.2% done\nepoch 1 validation loss 2.5\nValidation 12.5% done\nepoch 2 validation loss 2.4\n",
     [(1, 2.5), (2, 2.4)]),
    ("step 1 val_acc 0.6 loss 1.2 val_loss 1.1\nstep 2 val_acc 0.7 loss 1.1 val_loss 1.0\n", [(1, 1.1), (2, 1.0)]),
]  # fmt: skip


@pytest.mark.parametrize(("log", "evals"), FORMS)
def test_the_guess_reads_the_evals_and_nothing_else(log: str, evals: list[tuple[float, float]]) -> None:
    found = guess(log.encode())
    assert found is not None
    assert [(e.samples, e.loss) for e in found.run.evals] == evals, found.settings


@pytest.mark.parametrize("log", [BATCHES_ALONE, VALID_STEPS], ids=["iterations", "steps"])
def test_of_an_eval_that_prints_its_batches_alone_the_last_one_counts_and_the_study_says_so(log: str) -> None:
    found = guess(log.encode())
    assert found is not None
    assert (found.unit, found.is_eval, found.last_batch) == ("epoch", True, True)
    assert found.run.other_values == 0
    text = study_text(ScriptFacts(command=("true",), log=found))
    assert "# an eval prints its batches alone: the last one counts" in text


def test_batches_that_no_count_tells_apart_are_said_to_be_passed_over() -> None:
    log = "".join(f"train loss 2.0 epoch {n}\n" + "".join(f"val loss 1.{b}\n" for b in (1, 2, 3)) for n in (1, 2))
    found = guess(log.encode())
    assert found is not None
    assert "EDIT: 4 other values for the same progress" in study_text(ScriptFacts(command=("true",), log=found))


def test_an_accuracy_and_a_detector_s_precision_are_measures_that_rise() -> None:
    for log in ("epoch 1 test accuracy 0.81\nepoch 2 test accuracy 0.85\n", MMDETECTION, MMCLASSIFICATION):
        found = guess(log.encode())
        assert found is not None
        assert (found.is_eval, found.rising) == (True, True)


def test_a_sentence_that_fits_a_table_by_chance_is_no_row_of_it() -> None:
    """Ultralytics prints its columns anew in each epoch; "6 epochs completed in 0.004 hours." had been its one row."""
    log = "".join(
        f"      Epoch    GPU_mem   box_loss   cls_loss   Instances       Size\n"
        f"        {n}/6         0G      1.{9 - n}      2.1         35        640: 100%|██| 1/1 [00:01<00:00, 1s/it]\n"
        for n in (1, 2)
    )
    found = guess(f"{log}\n6 epochs completed in 0.004 hours.\n".encode())
    assert found is not None
    assert not found.is_eval, "a training loss, which is said"
    assert [(e.samples, e.loss) for e in found.run.evals] == [(1, 1.8), (2, 1.7)]


def test_a_reward_counts_beside_a_loss_of_the_policy() -> None:
    found = guess(GRPO.encode())
    assert found is not None
    assert found.rising
    assert not found.is_eval, "it is the training's, so a person is asked to look"


@pytest.mark.parametrize("log", ["epoch 1 val loss 2,512\n", "step 1.5k val loss 2.5\n",
                                 "step 1 val loss 2.5foo\n"])  # fmt: skip
def test_a_number_is_not_cut_short(log: str) -> None:
    assert guess(log.encode()) is None


def test_batches_that_begin_anew_in_each_epoch_count_nothing() -> None:
    """What is left is a training loss by epochs, which a person is asked to look at."""
    guessed = guess(PADDLE.encode())
    assert guessed is not None
    assert (guessed.unit, guessed.is_eval) == ("epoch", False)
    assert len(guessed.run.evals) == 4


def test_numbers_in_brackets_that_are_ranks_count_no_steps() -> None:
    assert guess(b"[0] val loss 2.0\n[1] val loss 2.1\n[0] val loss 1.9\n[1] val loss 1.8\n") is None


@pytest.mark.parametrize("log", [b"", b"hello\nworld\n", b"\xff\xfe\x00" * 50, b"loss\nstep\n"])
def test_a_log_without_a_measure_gives_no_guess(log: bytes) -> None:
    assert guess(log) is None


def test_a_training_loss_alone_is_told_apart_from_an_eval() -> None:
    found = guess(b"step 1 train_loss 0.9\nstep 2 train_loss 0.8\n")
    assert found is not None
    assert not found.is_eval


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=2000))
def test_any_bytes_end_in_a_guess_or_none(log: bytes) -> None:
    guess(log)


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.001, 99)), min_size=1, max_size=8,
                unique_by=lambda point: point[0]),
       st.sampled_from(["step {} | val loss {}", "eval_loss={1} at iteration {0}",
                        "[7] epoch {}: dev nll = {}"]))  # fmt: skip
def test_what_a_script_prints_comes_back(points: list[tuple[int, float]], form: str) -> None:
    points.sort()
    found = guess("".join(form.format(n, f"{loss:.4f}") + "\n" for n, loss in points).encode())
    assert found is not None
    assert [(e.samples, e.loss) for e in found.run.evals] == [(n, float(f"{loss:.4f}")) for n, loss in points]


@pytest.mark.parametrize("line", ["a " * 500, "a" * 1000, "loss " + " " * 990, "loss " + "1" * 990, "loss: 1 " * 120])
def test_no_line_takes_long(line: str) -> None:
    begin = time.thread_time()
    losses(line), positions(line)
    assert time.thread_time() - begin < 5, "milliseconds, and no power of the line's length"


class TestSettings:
    """What a script's way of counting needs of the readers."""

    def test_progress_stands_on_a_line_of_its_own(self) -> None:
        reader = make_reader("regex", eval=r"val (?P<loss>\S+)", progress=r"epoch (?P<epoch>\d+)", samples_per_epoch=9)
        reader.feed(b"val 3\nepoch 1\nval 2\nepoch 2\nval 1\n")
        assert [(e.samples, e.loss) for e in reader.run().evals] == [(0, 3), (9, 2), (18, 1)]

    def test_epochs_that_are_called_zero(self) -> None:
        text = reader_of(b"epoch 0 val 3\nepoch 1 val 2\n", "regex", eval=r"epoch (?P<epoch>\d+) val (?P<loss>\S+)")
        rows = b"".join(json.dumps({"epoch": n, "eval_loss": 3 - n}).encode() + b"\n" for n in (0, 1))
        assert text == reader_of(rows, "jsonl") == [(1, 3), (2, 2)]

    def test_a_bar_that_shows_the_last_eval_again(self) -> None:
        log = b"at 1 val 3\rat 2 val 3\rat 2 val 2.5\rat 3 val 2.5\n"
        assert reader_of(log, "regex", repeated=True, from_zero=False, eval=r"at (?P<step>\d+) val (?P<loss>\S+)") == [
            (1, 3), (2, 2.5)
        ]  # fmt: skip

    def test_colours_of_a_terminal_are_not_read(self) -> None:
        log = b"\x1b[1mstep\x1b[0m 1 \x1b[32mval\x1b[0m 3\n"
        assert reader_of(log, "regex", from_zero=False, eval=r"step (?P<step>\d+) val (?P<loss>\S+)") == [(1, 3)]

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            ({"from_zero": 1}, "must be true or false"),
            ({"progress": "x"}, "needs the named group samples, step or epoch"),
        ],
    )
    def test_wrong_ones_are_named(self, more: dict[str, object], words: str) -> None:
        with pytest.raises(ValueError, match=words):
            make_reader("regex", eval=r"(?P<step>\d+) (?P<loss>\S+)", **more)


def reader_of(log: bytes, kind: str, *, from_zero: bool = True, **more: object) -> list[tuple[float, float]]:
    reader = make_reader(kind, from_zero=from_zero, **more)
    reader.feed(log)
    return [(e.samples, e.loss) for e in reader.run().evals]


@pytest.mark.parametrize("said", ["log_every_n_steps=50", "max steps: 600", "steps per epoch = 24", "warmup_steps: 10"])
def test_a_number_of_steps_that_is_set_counts_none(said: str) -> None:
    guessed = guess(f"{said}\nEpoch 2/2 24/24\nval_loss: 5.865\n".encode())
    assert guessed is not None
    assert (guessed.unit, [e.samples for e in guessed.run.evals]) == ("epoch", [2])
