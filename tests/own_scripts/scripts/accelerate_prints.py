"""Accelerate's example scripts: logging's prefix, epochs from 0, a bar on standard error."""

import logging
import sys

from descent import options, train

arguments = options().parse_args()
logging.basicConfig(
    format="%(asctime)s - %(levelname)s - %(name)s - %(message)s", level=logging.INFO, stream=sys.stdout
)
for step, _, held_out in train(arguments):
    sys.stderr.write(f"\r{step}%|##   | {step}/60 [00:00<00:01, 51.2it/s]")
    if step % 10 == 0:
        logging.getLogger("__main__").info(
            f"epoch {step // 10 - 1}: perplexity: {2.718**held_out} eval_loss: {held_out}"
        )
