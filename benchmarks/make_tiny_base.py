"""Make the base model and the texts of the tiny task: ``python -m benchmarks.make_tiny_base FOLDER``.

The base is a byte-level Llama of 0.86 million parameters, trained on the source code of Python's standard library. The
adapter's text is the language reference from ``pydoc_data.topics``: English prose instead of code, so that the adapter
has something to learn. Both come with every Python, under its licence.

The result is a Hugging Face checkpoint folder (``config.json``, ``model.safetensors`` in bfloat16) with the texts
``train.txt.gz`` and ``validation.txt.gz``. The same Python, torch and processor give the same bytes; otherwise use the
files shipped in ``tiny/``, which were made once and are never remade by a sweep.
"""

from __future__ import annotations

import argparse
import gzip
import math
import sysconfig
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    max_position_embeddings=512,
    rope_theta=10000.0,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=None,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)
SEQ, BATCH, PEAK_LR, WARMUP, SEED = 256, 8, 4e-3, 50, 1
VALIDATION_EVERY = 8
"""Every eighth topic, in the order of their names, is validation text: whole topics, so the two sets do not overlap."""


def code() -> bytes:
    """The standard library's modules outside its test suites, sorted by path, as one text."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"test", "tests", "idle_test", "site-packages", "lib2to3", "pydoc_data", "__pycache__", "encodings"}
    files = sorted(p for p in library.rglob("*.py") if not left_out & set(p.relative_to(library).parts))
    return b"".join(p.read_bytes() for p in files)


def prose() -> tuple[bytes, bytes]:
    """The language reference's topics, sorted by name: training text and validation text."""
    from pydoc_data.topics import topics

    texts = [topics[name].strip() + "\n\n" for name in sorted(topics)]
    held_out = [t for i, t in enumerate(texts) if i % VALIDATION_EVERY == VALIDATION_EVERY - 1]
    kept = [t for i, t in enumerate(texts) if i % VALIDATION_EVERY != VALIDATION_EVERY - 1]
    return "".join(kept).encode(), "".join(held_out).encode()


def train(text: bytes, steps: int) -> LlamaForCausalLM:
    """Train the base from random weights for ``steps`` steps of BATCH x SEQ bytes; cosine schedule to zero."""
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(SHAPE).float()
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(tokens) - SEQ - 1, (BATCH,))
        batch = torch.stack([tokens[s : s + SEQ + 1] for s in starts]).long()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        warm = min(1.0, (step + 1) / WARMUP)
        optimizer.param_groups[0]["lr"] = PEAK_LR * warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step} of {steps}: loss {loss.item():.3f}, {time.monotonic() - began:.0f} s", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; created")
    parser.add_argument("--steps", type=int, default=2400, help="training steps of the base (default %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, text in zip(("train", "validation"), prose(), strict=True):
        # Without time stamp and name, so that the same text gives the same file.
        (options.folder / f"{name}.txt.gz").write_bytes(gzip.compress(text, 9, mtime=0))
    model = train(code(), options.steps).to(torch.bfloat16)
    model.save_pretrained(options.folder, safe_serialization=True)


if __name__ == "__main__":
    main()
