"""Train a small Llama over bytes on one GPU, as the base that trials adapt.

``python -m benchmarks.gpu.make_base FOLDER``. The text is the source code of Python's standard library. The trials
adapt it to the English of the language reference (``lora_tune_recipes/tiny``), so there is something to learn and a
wrong learning rate shows. The result is a Hugging Face folder in bfloat16, which both recipes read.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.make_tiny_base import code
from lora_tune_recipes.megatron.shapes import SHAPES


def train(shape_name: str, seq: int, batch: int, steps: int, peak: float) -> tuple[LlamaForCausalLM, float]:
    """``steps`` steps of ``batch`` sequences; returns the model and its last loss (nats a byte)."""
    shape = SHAPES[shape_name]
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_groups,
        max_position_embeddings=4 * seq,
        rms_norm_eps=shape.norm_eps,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).cuda()
    tokens = torch.frombuffer(bytearray(code()), dtype=torch.uint8).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    window = torch.arange(seq + 1, device="cuda")
    for step in range(steps):
        starts = torch.randint(len(tokens) - seq - 1, (batch, 1), device="cuda")
        rows = tokens[starts + window].long()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = (
            peak * min(1.0, (step + 1) / 100) * 0.5 * (1 + math.cos(math.pi * step / steps))
        )
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return model, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; created")
    parser.add_argument("--llama", choices=sorted(SHAPES), default="small", help="shape (default %(default)s)")
    parser.add_argument("--seq", type=int, default=512, help="bytes in a sequence (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step (default %(default)s)")
    parser.add_argument("--steps", type=int, default=1500, help="default %(default)s")
    parser.add_argument("--lr", type=float, default=1e-3, help="peak learning rate (default %(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    model, loss = train(options.llama, options.seq, options.batch, options.steps, options.lr)
    options.folder.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(options.folder, safe_serialization=True)
    seconds = round(time.monotonic() - began, 1)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps({"base": str(options.folder), "parameters": parameters, "loss": round(loss, 4), "seconds": seconds})
    )


if __name__ == "__main__":
    main()
