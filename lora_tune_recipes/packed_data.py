"""Packed data as MLPerf's gov_report: make it from any text, or look at what a folder holds.

    python -m lora_tune_recipes.packed_data FOLDER --seq 8192 --train A.txt --validation B.txt
    python -m lora_tune_recipes.packed_data FOLDER --seq 8192

The files ``train.npy`` and ``validation.npy`` are numpy arrays of dictionaries: ``input_ids`` (SEQ + 1 token numbers),
``loss_mask`` (as many; entry i says whether the prediction of token i + 1 counts) and ``seq_start_id`` ([0]). Tokens
are bytes, for models that ship no tokenizer; real gov_report data comes tokenized from MLPerf's own script.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tune.base.errors import InputError, LoraTuneError
from lora_tune_recipes import text

SPLITS = ("train", "validation")


def pack(tokens: npt.NDArray[np.int64], seq: int, prompt: int = 0) -> npt.NDArray[Any]:
    """Cut a stream into rows of ``seq`` predictions, with the first ``prompt`` of each masked.

    Returns an object array of dictionaries. Raises InputError if the stream is shorter than one row.
    """
    count = (len(tokens) - 1) // seq
    if count < 1:
        raise InputError(f"{len(tokens)} tokens: allowed are at least SEQ + 1 = {seq + 1}")
    if not 0 <= prompt < seq:
        raise InputError(f"prompt {prompt}: allowed are 0 to {seq - 1} tokens")
    mask = [0] * prompt + [1] * (seq + 1 - prompt)
    rows = np.empty(count, object)
    for i in range(count):
        ids = tokens[i * seq : i * seq + seq + 1].tolist()
        rows[i] = {"input_ids": ids, "loss_mask": list(mask), "seq_start_id": [0]}
    return rows


def write(folder: Path, split: str, rows: npt.NDArray[Any]) -> None:
    """Write ``folder/split.npy``, creating the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / f"{split}.npy", rows, allow_pickle=True)


def describe(folder: Path, seq: int) -> dict[str, dict[str, int]]:
    """Counts of each split. Raises InputError if a recipe could not read it."""
    contents = {}
    for split in SPLITS:
        sequences = text.load(folder, split, seq, text.byte_tokens)
        contents[split] = {
            "sequences": len(sequences),
            "tokens that count": int(sequences.mask.sum()),
            "smallest token": int(sequences.tokens.min()),
            "largest token": int(sequences.tokens.max()),
        }
    return contents


def main() -> int:
    """Parse the command line, pack the given texts, and describe the folder."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the .npy files are or go")
    parser.add_argument("--seq", type=int, default=8192, help="predictions in a row (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=0, help="predictions at the start of a row that do not count")
    for split in SPLITS:
        parser.add_argument(f"--{split}", type=Path, help="text file to pack")
    options = parser.parse_args()
    try:
        for split in SPLITS:
            source = getattr(options, split)
            if source:
                tokens = np.frombuffer(source.read_bytes(), np.uint8).astype(np.int64)
                write(options.folder, split, pack(tokens, options.seq, options.prompt))
        for split, facts in describe(options.folder, options.seq).items():
            print(f"{split}: " + ", ".join(f"{name} {value}" for name, value in facts.items()))
    except OSError as error:
        print(f"packed_data: {error}", file=sys.stderr)
        return 2
    except LoraTuneError as error:
        print(f"packed_data: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
