"""Training and validation data as token sequences, and the order in which a run reads them."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lora_tune.base.errors import InputError

Tokenize = Callable[[str], list[int]]
SUFFIXES = (".npy", ".jsonl", ".txt", ".txt.gz")


@dataclass(frozen=True, slots=True)
class Sequences:
    """tokens: [n, seq + 1] int64; the model reads all but the last and predicts all but the first.
    mask: [n, seq] bool, which predictions count."""

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self, vocabulary: int, name: str) -> None:
        """Raise InputError where a token is none of the model's ``vocabulary``."""
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"{name}: tokens from {low} to {high}; the model's vocabulary allows 0 to {vocabulary - 1}"
            )

    def spread(self, count: int) -> Sequences:
        """``count`` of them, evenly spaced from the first on; all where there are no more."""
        chosen = np.arange(min(count, len(self))) * len(self) // max(1, min(count, len(self)))
        return Sequences(self.tokens[chosen], self.mask[chosen])

    def rows(self, numbers: npt.NDArray[np.int64]) -> Sequences:
        """The sequences of these numbers; a negative number gives one of which nothing counts."""
        return Sequences(self.tokens[numbers], self.mask[numbers] & (numbers >= 0)[:, None])


def byte_tokens(text: str) -> list[int]:
    """One token per UTF-8 byte: the tokenizer of a model that ships none."""
    return list(text.encode())


def load(folder: Path, split: str, seq: int, tokenize: Tokenize) -> Sequences:
    """Read ``folder/split.*`` and cut it into sequences of ``seq`` predictions.

    Text (.txt, .txt.gz) is one stream; .jsonl holds one object with a string ``text`` on each line, joined by
    newlines; .npy is packed already: an integer array [n, seq + 1], or MLPerf's array of dictionaries with
    ``input_ids`` and perhaps ``loss_mask``, where shorter rows are filled up with tokens that do not count.
    Raises InputError where the file is missing, ambiguous, of another form or too short.
    """
    found = [folder / (split + suffix) for suffix in SUFFIXES if (folder / (split + suffix)).is_file()]
    if len(found) != 1:
        have = " and ".join(p.name for p in found) or "none"
        raise InputError(
            f"DATADIR={str(folder)!r}: allowed is one file {split} with one of {', '.join(SUFFIXES)}; there is {have}"
        )
    path = found[0]
    if path.suffix == ".npy":
        return _packed(path, seq)
    stream = np.asarray(tokenize(_text(path)), np.int64)
    count = (len(stream) - 1) // seq
    if count < 1:
        raise InputError(f"{path}: {len(stream)} tokens; SEQ={seq} needs at least {seq + 1}")
    # Neighbours share one token: the last that one predicts is the first that the next reads.
    tokens = np.lib.stride_tricks.sliding_window_view(stream, seq + 1)[: count * seq : seq]
    return Sequences(tokens, np.ones((count, seq), np.bool_))


def _text(path: Path) -> str:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text: {error}") from error
    return "\n".join(_json_lines(path, text)) if path.suffix == ".jsonl" else text


def _json_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}:{number}: not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise InputError(f'{path}:{number}: allowed is an object with a string "text"')
        yield value["text"]


def _packed(path: Path, seq: int) -> Sequences:
    try:
        # MLPerf's packed files are arrays of Python dictionaries, which numpy can only unpickle: as with any
        # checkpoint, read only files that you trust.
        rows = np.load(path, allow_pickle=True)
    except (OSError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"{path}: not readable as .npy: {error}") from error
    if rows.dtype != object:
        if rows.ndim != 2 or rows.dtype.kind not in "iu" or rows.shape[1] != seq + 1:
            raise InputError(
                f"{path}: {rows.dtype} of shape {rows.shape}; allowed are integers [n, SEQ + 1 = {seq + 1}]"
            )
        return Sequences(rows.astype(np.int64), np.ones((len(rows), seq), np.bool_))
    tokens = np.zeros((len(rows), seq + 1), np.int64)
    mask = np.zeros((len(rows), seq), np.bool_)
    for i, row in enumerate(rows):
        if not isinstance(row, dict) or "input_ids" not in row:
            raise InputError(f"{path}: row {i} has no input_ids")
        ids, counts = row["input_ids"], row.get("loss_mask", [1] * len(row["input_ids"]))
        if len(counts) != len(ids) or not 2 <= len(ids) <= seq + 1:
            raise InputError(
                f"{path}: row {i} has {len(ids)} tokens, {len(counts)} in its mask; SEQ={seq} allows 2 to {seq + 1}"
            )
        tokens[i, : len(ids)] = ids
        # NeMo's packing has shifted the mask already: its entry i is about the prediction of token i + 1.
        mask[i, : len(ids) - 1] = np.asarray(counts[:-1], np.bool_)
    return Sequences(tokens, mask)


def order(count: int, batch: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches of ``batch`` sequence numbers below ``count``: every epoch is a fresh shuffle.

    It depends on the global batch size only, so every layout of one global batch reads the same data.
    """
    rng = np.random.default_rng(seed)
    rest = np.empty(0, np.int64)
    while True:
        while len(rest) < batch:
            rest = np.concatenate([rest, rng.permutation(count)])
        yield rest[:batch]
        rest = rest[batch:]
