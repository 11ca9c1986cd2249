"""LoRA fine-tuning with transformers, peft and accelerate: ``python -m lora_tune_recipes.peft_lora``.

Settings come from the environment (``settings.Settings``); progress goes to standard output as MLLOG lines. Run it
alone, or several processes under ``torchrun`` or ``accelerate launch``. By default it adapts the shipped tiny base to
the shipped text on one core.

Exit codes: 0 the run ended, and the log says whether at its target; 2 a setting, the data or the checkpoint cannot be
used; 3 the machine does not support the settings; 1 the training failed. A failing process exits at once, without
waiting for the others, so that none hangs.
"""

from __future__ import annotations

import logging
import os

from lora_tune.base.errors import SetupError
from lora_tune_recipes import settings
from lora_tune_recipes.ending import end_with, say_why
from lora_tune_recipes.worker_request import submit_to_worker

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Defaults of environment variables: checkpoints are folders, so nothing is downloaded; the log is the only output."""


def hush() -> None:
    """Silence the libraries; call it before importing torch and transformers, which read these variables once."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns of an optional kernel


def main() -> int:
    """Run the trial of the environment; returns the exit code."""
    try:
        chosen = settings.read(os.environ)
        hush()
        os.environ.setdefault("OMP_NUM_THREADS", str(chosen.threads))
        # Imported after the settings are checked, because it takes seconds.
        try:
            from lora_tune_recipes import training
        except ImportError as error:
            raise SetupError(f"{' '.join(str(error).split())}; pip install 'lora-tune[peft]'") from error
        training.run(chosen)
    except Exception as error:  # noqa: BLE001 - the last line must say what failed, whatever it was
        return say_why("peft_lora", error, os.environ.get("RANK", "0"))
    return 0


def started() -> int:
    """Run the trial, in a warm worker if there is one; returns the exit code."""
    exit_code = submit_to_worker("lora_tune_recipes.peft_lora")
    return main() if exit_code is None else exit_code


if __name__ == "__main__":
    end_with(started)
