"""LoRA fine-tuning with transformers, peft and accelerate: ``python -m lora_tune_recipes.peft_lora``.

Knobs come from the environment (``settings.Settings`` names them), progress goes to standard output as MLLOG lines.
One process runs as it is; several run under ``torchrun`` or ``accelerate launch``. Without any variable set it adapts
the shipped tiny base to the shipped text on one core.

Exit codes: 0 the run ended, and the log says whether at its target; 2 a knob, the data or the checkpoint cannot be
used; 3 the machine cannot do what was asked; 1 the training itself failed. A process that fails ends at once, without
waiting for the others: they must not hang.
"""

from __future__ import annotations

import logging
import os

from lora_tune.base.errors import SetupError
from lora_tune_recipes import settings
from lora_tune_recipes.ending import end_with, say_why
from lora_tune_recipes.hand_over import hand_over

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set unless the caller sets them: checkpoints are folders, so nothing is fetched, and the log is the only output."""


def hush() -> None:
    """Silence the libraries, before torch and transformers are loaded, which read these once."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of a kernel that it does without


def main() -> int:
    """Run the trial that the environment describes; returns the exit code."""
    try:
        chosen = settings.read(os.environ)
        hush()
        os.environ.setdefault("OMP_NUM_THREADS", str(chosen.threads))
        # Only now: seconds to import, and a bad knob must not wait for it.
        try:
            from lora_tune_recipes import training
        except ImportError as error:
            raise SetupError(f"{' '.join(str(error).split())}; pip install 'lora-tune[peft]'") from error
        training.run(chosen)
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        return say_why("peft_lora", error, os.environ.get("RANK", "0"))
    return 0


def started() -> int:
    """The trial, in a warm worker where one listens; returns the exit code."""
    handed_over = hand_over("lora_tune_recipes.peft_lora")
    return main() if handed_over is None else handed_over


if __name__ == "__main__":
    end_with(started)
