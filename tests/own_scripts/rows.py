"""The kinds of scripts, one row each; ``python -m tests.own_scripts.rows`` writes the table of docs/own-scripts.md."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
PAGE = Path(__file__).parents[2] / "docs" / "own-scripts.md"


@dataclass(frozen=True, slots=True)
class Row:
    """A script: what it stands for, how it is run, where its metrics stand, and the log kind that init finds."""

    name: str
    says: str
    kind: str
    command: tuple[str, ...]
    log: str = "run.log"
    before: tuple[tuple[str, ...], ...] = ()


def _python(script: str, says: str, kind: str, log: str = "run.log", *options: str) -> Row:
    return Row(script, says, kind, ("python", f"{script}.py", *options), log)


ROWS = (
    _python("hf_trainer", "Hugging Face Trainer: `{'eval_loss': 0.81, 'epoch': 0.5}`", "hf_trainer"),
    _python("accelerate_prints", "Accelerate's examples: `epoch 0: perplexity: 2.2 eval_loss: 0.81`", "named"),
    _python("lightning_bar", "Lightning's progress bar, redrawn, `val_loss=0.81` in it", "named"),
    _python("torchtune_prints", "torchtune: `Step 10 \\| val_loss:0.81`, options as `optimizer.lr=0.02`", "named",
            "run.log", "optimizer.lr=0.02", "batch_size=8"),
    _python("axolotl_like", "Axolotl: the Trainer's dicts behind a logging prefix", "hf_trainer"),
    _python("json_lines", 'JSON lines: `{"step": 10, "valid/loss": 0.81}`', "jsonl"),
    _python("tqdm_noise", "evals between redraws of a tqdm bar, in colours", "named"),
    _python("rank_prefixed", "every rank prints: `[rank0]: ... validation loss=0.81 consumed_samples=80`", "named"),
    _python("csv_rows", "a CSV table on standard output", "named"),
    _python("csv_file", "a CSV table in a folder (Lightning's CSVLogger), nothing printed", "jsonl", "lightning_logs"),
    _python("tensorboard_only", "TensorBoard's event files, nothing printed", "jsonl", "runs"),
    _python("keras_fit", "Keras' `fit`: the epoch on a line of its own", "named"),
    _python("plain_step_loss", "plain: `step 10 loss 0.81`", "named"),
    _python("plain_sentence", "plain: `Epoch:   1, Training Loss: 0.88, Validation Loss: 0.81`", "named"),
    _python("plain_block", "plain: an eval over several lines, `evaluation after 80 samples`", "named"),
    _python("timm_prints", "timm: an eval's batches, `Test: [ 78/78]  Loss:  0.60 ( 0.81)`; the mean counts", "named"),
    _python("imagenet_example", "PyTorch's ImageNet example: ` *   Acc@1 72.0` behind the batches of an eval", "named"),
    _python("olmo_blocks", "OLMo: `[step=1,000/6,000,...]`, and the measures on lines below it", "named"),
    _python("percent_accuracy", "an accuracy in percent: `Epoch [1/6] train_loss: 0.88, val_acc: 81.0%`", "named"),
    Row("c_program", "a C program: `val loss 0.81` and `step 1/60` on lines of their own, options `-l 0.02`", "named",
        ("./train", "-l", "0.02", "-b", "8"), before=(("cc", "-O1", "-o", "train", "train.c"),)),
)  # fmt: skip


def table() -> str:
    """The rows as the page shows them."""
    lines = ["| script prints | read as | the command that `init` was given |\n|---|---|---|\n"]
    for row in ROWS:
        log = f"--log {row.log} {' '.join(row.command)}"
        lines.append(
            f"| {row.says} | `{row.kind}`{', relay' if row.log != 'run.log' else ''} | `lora-tune init {log}` |\n"
        )
    return "".join(lines)


def page(text: str) -> str:
    """The page with its table made anew."""
    return re.sub(r"(<!-- scripts -->\n).*?(<!-- /scripts -->)", lambda m: m[1] + table() + m[2], text, flags=re.S)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
