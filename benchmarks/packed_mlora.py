"""Our pack beside m-LoRA's, the public packed trainer that runs on a CPU: processor seconds of K adapters' steps.

    python -m benchmarks.packed_mlora ours --adapters 1 4
    OTHER/bin/python benchmarks/packed_mlora.py mlora --adapters 1 4

Both train the shipped tiny base on its text: K adapters, 4 x 64 tokens a step, rank 16 on q, k, v and o, dropout 0.1,
AdamW, float32, one thread; start-up is not counted. m-LoRA (``pip install mlora==0.5.2``) pins torch below 2.4 and
transformers below 4.45, so it needs an environment of its own; this file runs there without ours.
"""

from __future__ import annotations

import argparse
import gzip
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

TINY = Path(__file__).parents[1] / "lora_tune_recipes" / "tiny"
BATCH, SEQ, RANK, ALPHA, DROPOUT = 4, 64, 16, 32, 0.1


def ours(adapters: int, steps: int) -> float:
    """Processor seconds of the steps in one pack."""
    from lora_tune_recipes import settings as knobs
    from lora_tune_recipes.packed.base import PackedBase
    from lora_tune_recipes.packed.pack import Pack
    from lora_tune_recipes.packed.slot import Slot

    common = {"MINIBS": BATCH, "SEQ": SEQ, "LORA_RANK": RANK, "LORA_ALPHA": ALPHA, "LORA_DROPOUT": DROPOUT}
    every = [
        knobs.read({k: str(v) for k, v in {**common, "MAX_STEPS": steps, "LR": 1e-3 * i, "SEED": i}.items()})
        for i in range(1, adapters + 1)
    ]
    base = PackedBase(every[0])
    pack = Pack(base)
    for settings in every:
        pack.join(Slot(settings, base.texts(settings)))
    began = time.process_time()
    for _ in range(steps):
        pack.round()
    return time.process_time() - began


def theirs(adapters: int, steps: int) -> float:
    """Processor seconds of the same steps in m-LoRA."""
    os.environ["MLORA_BACKEND_TYPE"] = "CPU"
    mlora, modules, trainer, torch = map(importlib.import_module, ("mlora", "mlora.modules", "mlora.trainer", "torch"))
    torch.set_num_threads(1)
    text = gzip.decompress((TINY / "train.txt.gz").read_bytes())
    rows = [list(text[at * SEQ : (at + 1) * SEQ]) for at in range(min(steps * BATCH, len(text) // SEQ))]

    class Tokens:
        """A tokenizer of bytes, which are the base's vocabulary."""

        pad_id_, padding_side_ = 0, "right"

        def mask_from(self, tokens: Sequence[int]) -> list[int]:
            return [1] * len(tokens)

    def data(*_: Any, **__: Any) -> list[Any]:
        return [modules.InputData(inputs="", tokens=list(row)) for row in rows]

    model = mlora.LLMModel.from_pretrained(str(TINY), device="cpu", load_dtype=torch.float32)
    configs = []
    for name in map(str, range(1, adapters + 1)):
        targets = dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), True)
        adapter = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": DROPOUT, "target_modules": targets}
        lora = modules.LoraConfig.from_config(adapter)
        lora.adapter_name, lora.task_name = name, "casual"
        model.init_adapter(lora)
        config = trainer.TrainConfig(
            adapter_name=name, num_epochs=1, batch_size=BATCH, micro_batch_size=BATCH, learning_rate=1e-3 * int(name)
        )
        config._dataload_fn = data
        configs.append(config)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        trainer.train(model, Tokens(), configs, cutoff_len=SEQ, save_dir=folder)
        return time.process_time() - began


def main() -> None:
    sides: dict[str, Callable[[int, int], float]] = {"ours": ours, "mlora": theirs}
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("side", choices=sides)
    parser.add_argument("--adapters", type=int, nargs="+", default=[1, 4], help="default %(default)s")
    parser.add_argument("--steps", type=int, default=40, help="of each adapter (default %(default)s)")
    options = parser.parse_args()
    for adapters in options.adapters:
        seconds = sides[options.side](adapters, options.steps)
        each = adapters * options.steps / seconds
        print(f"{options.side}, {adapters} adapters: {seconds:.2f} processor seconds, {each:.1f} adapter steps in one")


if __name__ == "__main__":
    main()
