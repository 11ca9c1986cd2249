"""The eval loss of an adapter in peft's format: ``python -m benchmarks.gpu.adapter_loss --base B --adapter A``.

The mean over sequences of each one's mean loss, in the base's own precision and in float32, as one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_tune_recipes import text


def loss(base: Path, adapter: Path, sequences: text.Sequences, dtype: torch.dtype, device: str) -> float:
    """The loss of ``base`` with ``adapter`` in ``dtype``."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    adapted = PeftModel.from_pretrained(model, str(adapter)).to(device).eval()
    total = 0.0
    with torch.no_grad():
        for tokens, counts in zip(sequences.tokens, sequences.mask, strict=True):
            row, mask = torch.from_numpy(tokens)[None].to(device), torch.from_numpy(counts).to(device)
            logits = adapted(input_ids=row[:, :-1]).logits[0].float()
            losses = torch.nn.functional.cross_entropy(logits, row[0, 1:], reduction="none")
            total += float(losses[mask].mean())
    return total / len(sequences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--adapter", type=Path, required=True, help="peft folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with the validation data")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--samples", type=int, default=0, help="sequences, evenly spaced; 0 for all")
    options = parser.parse_args()
    sequences = text.load(options.data, "validation", options.seq, text.byte_tokens)
    if options.samples:
        sequences = sequences.spread(options.samples)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = {
        name: loss(options.base, options.adapter, sequences, dtype, device)
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
