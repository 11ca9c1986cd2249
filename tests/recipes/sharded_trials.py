"""A program of two processes: a few steps of each layout that it is given, and the eval loss of each, from the first.

Usage, under torchrun: ``sharded_trials.py LAYOUTS STEPS``; LAYOUTS is a JSON list of environment variables.
"""

from __future__ import annotations

import itertools
import json
import sys

from lora_tune_recipes import settings as knobs
from lora_tune_recipes import text
from lora_tune_recipes.ranks import connect
from lora_tune_recipes.trainer import Trainer


def loss_of(variables: dict[str, str], steps: int) -> float:
    """The eval loss after so many steps; saves the adapter where asked to."""
    settings = knobs.read(variables)
    ranks = connect(settings)
    trainer = Trainer(settings, ranks)
    trainer.warm_up()
    train = text.load(settings.datadir, "train", settings.seq, text.byte_tokens)
    for rows in itertools.islice(text.order(len(train), ranks.batch, settings.seed), steps):
        trainer.step(train.rows(ranks.share(rows)), settings.lr)
    validation = text.load(settings.datadir, "validation", settings.seq, text.byte_tokens)
    loss = trainer.evaluate(validation.spread(settings.eval_samples))
    if settings.save_adapter:
        trainer.save_adapter(settings.save_adapter)
    return loss


def main() -> None:
    losses = [loss_of(variables, int(sys.argv[2])) for variables in json.loads(sys.argv[1])]
    if connect(knobs.read({})).rank == 0:
        print(json.dumps(losses))


if __name__ == "__main__":
    main()
