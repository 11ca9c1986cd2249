"""LoRA fine-tuning with transformers, peft and accelerate: ``python -m lora_tune.recipes.peft_lora``.

Knobs come from the environment (``settings.Settings`` names them), progress goes to standard output as MLLOG lines.
One process runs as it is; several run under ``torchrun`` or ``accelerate launch``. Without any variable set it adapts
the shipped tiny base to the shipped text on one core.

Exit codes: 0 the run ended, and the log says whether at its target; 2 a knob or the data cannot be used; 3 the machine
cannot do what was asked; 1 the training itself failed.
"""

from __future__ import annotations

import os
import sys

from lora_tune.errors import LoraTuneError
from lora_tune.recipes import settings
from lora_tune.recipes.warm_worker import hand_over

_QUIET = {
    "HF_HUB_OFFLINE": "1",  # checkpoints are folders; nothing is fetched
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def main() -> int:
    """Run the trial that the environment describes; returns the exit code."""
    try:
        chosen = settings.read(os.environ)
        # Before torch and transformers are loaded, which read these once.
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault("OMP_NUM_THREADS", str(chosen.threads))
        from lora_tune.recipes import training  # only now: seconds to import, and a bad knob must not wait for it

        training.run(chosen)
    except LoraTuneError as error:
        print(f"peft_lora: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    handed_over = hand_over("lora_tune.recipes.peft_lora")
    sys.exit(main() if handed_over is None else handed_over)
