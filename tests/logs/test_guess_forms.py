"""How numbers, tables and bytes of other people's logs look: guessed as they are printed, and read to the last eval."""

from __future__ import annotations

import pytest

from lora_tune.cli.init import ScriptFacts, study_text
from lora_tune.logs.guess import guess
from lora_tune.logs.lines import make_reader

EVALS = [(10, 1.234), (20, 0.975), (30, 0.863)]
BY_EPOCH = [(1, 1.234), (2, 0.975), (3, 0.863)]
ROWS = list(enumerate((1.234, 0.975, 0.863), start=1))


def comma(number: float) -> str:
    return f"{number:.3f}".replace(".", ",")


SPACY = (
    "E    #       LOSS TOK2VEC  LOSS NER  ENTS_F  ENTS_P  ENTS_R  SCORE \n"
    "---  ------  ------------  --------  ------  ------  ------  ------\n"
    "  4     200         12.53   1234.33   45.10   50.00   41.20    0.45\n"
    "  9     400         13.53   1034.33   55.10   60.00   51.20    0.55\n"
)
HEADER = "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
ULTRALYTICS = "".join(
    f"{HEADER}        {n}/2      2.44G      1.{n}00      2.000      1.100        215        640:  12%|#   | 1/8\r"
    f"        {n}/2      2.44G      1.{n}00      2.000      1.100        215        640: 100%|####| 8/8 [00:01<00:00]\n"
    "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|##| 4/4 [00:00]\n"
    f"                   all        128        929      0.6{n}0       0.54      0.5{n}0      0.4{n}0\n"
    for n in (1, 2)
)
SHOW = "".join(f"(epoch, val_loss) = ({n}, {loss}f0)\n" for n, loss in ROWS)


@pytest.mark.parametrize(("log", "evals"), [
    pytest.param("".join(f"step {n}0 loss: {comma(x)}\n" for n, x in ROWS), EVALS, id="decimal comma"),
    pytest.param("".join(f"Epoch {n}/3, train_loss: {comma(x + 1)}, val_loss: {comma(x)}, lr: 1,0\n" for n, x in ROWS),
                 BY_EPOCH, id="decimal commas in a list"),
    pytest.param("".join(f"step {n}.000 val_loss: {comma(x)}\n" for n, x in ROWS),
                 [(1000 * n, x) for n, x in BY_EPOCH], id="German thousands"),
    pytest.param("epoch;train_loss;val_loss\n" + "".join(f"{n};{comma(x + 1)};{comma(x)}\n" for n, x in ROWS),
                 BY_EPOCH, id="semicolons and decimal commas"),
    pytest.param("".join(f'{{"step": {n}0, "val_loss": "{comma(x)}"}}\n' for n, x in ROWS), EVALS, id="in JSON"),
    pytest.param("".join(f"2026-11-23 12:00:0{n},123 step {n}0 val_loss {x}\n" for n, x in ROWS), EVALS,
                 id="only the clock has a comma"),
    pytest.param("".join(f"step 1_{n}00 val_loss {x}\n" for n, x in ROWS),
                 [(1000 + 100 * n, x) for n, x in BY_EPOCH], id="thousands as Python writes them"),
    pytest.param("| epoch | train_loss | val_loss |\n|--|--|--|\n" + "".join(f"| {n} | 2 | {x} |\n" for n, x in ROWS),
                 BY_EPOCH, id="a Markdown table"),
    pytest.param("┃ epoch ┃ val_loss ┃ time ┃\n" + "".join(f"│ {n} │ {x} │ 1.0 │\n" for n, x in ROWS), BY_EPOCH,
                 id="a drawn table"),
    pytest.param(SPACY, [(200, 0.45), (400, 0.55)], id="spaCy"),
    pytest.param(ULTRALYTICS, [(1, 0.41), (2, 0.42)], id="Ultralytics"),
    pytest.param("".join(f"        {n}/2      1.2G     2.0      16     224: 100%|##| 2/2\n"
                         "               classes   top1_acc   top5_acc: 100%|##| 1/1\n"
                         f"                   all        0.{n}        0.9\n" for n in (1, 2)), [(1, 0.1), (2, 0.2)],
                 id="Ultralytics classifies"),
    pytest.param(SHOW, BY_EPOCH, id="Julia's @show of a tuple"),
    pytest.param("".join(f"=== evaluation @ step {n}0 ===\n  runtime: 3.2 s\n  loss: {x}\n" for n, x in ROWS), EVALS,
                 id="a heading says that it is an eval"),
    pytest.param("".join(f"EvalResult(step={n}0, loss={x}, accuracy=0.5)\n" for n, x in ROWS), EVALS,
                 id="a name in capitals says it"),
    pytest.param("it train dev\n" + "".join(f"{n}0 {x + 1:.3f} {x:.3f}\n" for n, x in ROWS), EVALS,
                 id="columns are named by their sets"),
    pytest.param("".join(f"step={n}0 lr=3e-4 mem=2.1GiB eval/loss={x}nats dt=12.3ms\n" for n, x in ROWS), EVALS,
                 id="a unit behind the value"),
    pytest.param("Train Epoch: 1 [0/640 (0%)]\tLoss: 2.3\nTrain Epoch: 1 [320/640 (50%)]\tLoss: 0.9\n"
                 "\nTest set: Average loss: 0.1129, Accuracy: 960/1000 (96%)\n", [(1, 0.1129)], id="one epoch"),
    pytest.param("".join(f"epoch = {n}\nval_loss = {x}f0\n" for n, x in ROWS), BY_EPOCH, id="Julia's @show"),
    pytest.param("".join(f"step {n}0 val_loss np.float64({x})\n" for n, x in ROWS), EVALS, id="NumPy's scalars"),
    pytest.param("".join(f"step {n}0 val_loss: Array({x}, dtype=float32)\n" for n, x in ROWS), EVALS, id="JAX' arrays"),
    pytest.param("".join(f"[{n}0] val_loss 1: {x} | val_loss 2: 9.{n}\n" for n, x in ROWS), EVALS,
                 id="a number in the name"),
    pytest.param("".join(f"epoch：{n}，val_loss：{x}\n" for n, x in ROWS), BY_EPOCH, id="wide colons"),
])  # fmt: skip
def test_the_guess_reads_the_evals(log: str, evals: list[tuple[float, float]]) -> None:
    found = guess(log.encode())
    assert found is not None
    assert [(e.samples, e.loss) for e in found.run.evals] == evals
    assert found.run.dropped_lines == 0
    assert found.example, "the study shows the line that it was made from"


LINES = "".join(f"step {n}0 val_loss: {x}\r\n" for n, x in ROWS)


@pytest.mark.parametrize("log", [
    pytest.param(LINES.encode("utf-16"), id="UTF-16 with its mark"),
    pytest.param(LINES.encode("utf-16-be"), id="UTF-16 without"),
    pytest.param(LINES.encode("utf-8-sig"), id="UTF-8 with a mark"),
    pytest.param(b"\0" * 9000 + LINES.encode(), id="the hole of a log that was truncated while it was written"),
    pytest.param(LINES.replace("step", "\x1b[38:5:208mstep\x1b[0m").encode(), id="colours by colons"),
    pytest.param(LINES.replace("step", "\x1b]8;;http://a.b\x1b\\step\x1b]8;;\x1b\\").encode(), id="links"),
])  # fmt: skip
def test_bytes_that_are_no_text_hide_no_eval(log: bytes) -> None:
    found = guess(log)
    assert found is not None
    assert [(e.samples, e.loss) for e in found.run.evals] == EVALS
    reader = make_reader(**found.settings)
    for at in range(0, len(log), 7):
        reader.feed(log[at : at + 7])
    assert [(e.samples, e.loss) for e in reader.run().evals] == EVALS, "as it grows"


def test_a_mark_before_json_costs_no_eval() -> None:
    reader = make_reader("jsonl", loss="val_loss", step="step")
    reader.feed('{"step": 10, "val_loss": 0.9}\n'.encode("utf-8-sig"))
    assert [(e.samples, e.loss) for e in reader.run().evals] == [(10, 0.9)]


def test_the_study_says_that_numbers_have_commas() -> None:
    found = guess(b"step 1 val_loss: 0,925\nstep 2 val_loss: 0,915\n")
    text = study_text(ScriptFacts(command=("python", "train.py"), options=[], log=found, source="run.log"))
    assert "decimal_comma = true   # numbers as 0,925, read as 0.925" in text
    assert "# made from: step 1 val_loss: 0,925" in text


class TestANumberThatAPatternCutsShort:
    """Of ``0,925`` a pattern for ``[\\\\d.]+`` takes 0, which is below every target."""

    @pytest.mark.parametrize(("pattern", "line"), [
        (r"step (?P<step>\d+) loss (?P<loss>[\d.]+)", "step 10 loss 0,925"),
        (r"step (?P<step>\d+) loss (?P<loss>\d+)", "step 10 loss 0.925"),
        (r"loss (?P<loss>[\d.]+) at step (?P<step>\d+)", "loss 0.9 at step 1,200"),
    ])  # fmt: skip
    def test_is_not_understood_and_the_remedy_is_said(self, pattern: str, line: str) -> None:
        reader = make_reader("regex", eval=pattern)
        reader.feed(f"{line}\n".encode())
        run = reader.run()
        assert not run.evals
        assert run.dropped_lines == 1
        assert "takes only a part of the number" in reader.unmatched.describe(ended=True)  # type: ignore[attr-defined]

    def test_a_decimal_comma_is_named(self) -> None:
        reader = make_reader("regex", eval=r"step (?P<step>\d+) loss (?P<loss>[\d.]+)")
        reader.feed(b"step 10 loss 0,925\n")
        words = reader.unmatched.describe(ended=True)  # type: ignore[attr-defined]
        assert words.endswith(", decimal_comma = true")

    @pytest.mark.parametrize(("pattern", "line"), [
        (r"^(?P<step>\d+),(?P<loss>\d+),", "10,71,12"),
        (r"step (?P<step>\d+) loss (?P<loss>[\d.]+)", "step 10 loss 71, 12 s"),
        (r"loss (?P<loss>\d+) at epoch (?P<epoch>\d+)", "loss 71 at epoch 10.0"),
        (r"step (?P<step>\d+) loss (?P<loss>[\d.]+)", "step 10 loss 71."),
    ])  # fmt: skip
    def test_a_separator_behind_it_is_none(self, pattern: str, line: str) -> None:
        reader = make_reader("regex", eval=pattern)
        reader.feed(f"{line}\n".encode())
        assert [(e.samples, e.loss) for e in reader.run().evals] == [(10, 71)]


def test_a_heading_above_lines_of_training_makes_no_evals_of_them() -> None:
    lines = [f"Validating:\n{''.join(f'Epoch {n} loss {x - i / 10:.3f}' + chr(10) for i in range(8))}" for n, x in ROWS]
    guessed = guess("".join(lines).encode())
    assert guessed is not None
    assert not guessed.is_eval
