"""Training and validation data as token sequences, and the order in which a run reads them."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from lora_tune.base.errors import InputError

Tokenize = Callable[[str], list[int]]
SUFFIXES = (".npy", ".jsonl", ".txt", ".txt.gz")


@dataclass(frozen=True, slots=True)
class Sequences:
    """tokens: [n, seq + 1] int64; inputs are all but the last, labels all but the first.
    mask: [n, seq] bool, predictions that count. positions: [n, seq] int64, of each input token within its sample if
    rows hold several; None if each row is one."""

    tokens: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    positions: npt.NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def spread(self, count: int) -> Sequences:
        """``count`` sequences, evenly spaced from the first on; all if there are no more."""
        chosen = np.arange(min(count, len(self))) * len(self) // max(1, min(count, len(self)))
        return self.rows(chosen)

    def rows(self, numbers: npt.NDArray[np.int64]) -> Sequences:
        """The sequences of these numbers; a negative number gives a fully masked one."""
        positions = None if self.positions is None else self.positions[numbers]
        return Sequences(self.tokens[numbers], self.mask[numbers] & (numbers >= 0)[:, None], positions)


def joined(parts: Sequence[Sequences], count: int) -> Sequences:
    """The sequences of all parts, padded to ``count`` with fully masked ones.

    positions: None unless all parts have them.
    """
    missing = count - sum(map(len, parts))

    def fill(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
        return np.concatenate([*arrays, np.zeros((missing, *arrays[0].shape[1:]), arrays[0].dtype)])

    positions = [part.positions for part in parts if part.positions is not None]
    return Sequences(
        fill([part.tokens for part in parts]),
        fill([part.mask for part in parts]),
        fill(positions) if len(positions) == len(parts) else None,
    )


def check(train: Sequences, validation: Sequences, vocabulary: int, folder: Path) -> None:
    """Raise InputError for a split of ``folder`` that is empty or holds a token outside the model's ``vocabulary``.

    Also for a fully masked validation sequence: it has no mean loss, and an evaluation is the mean of means.
    """
    for split, held in (("train", train), ("validation", validation)):
        if not len(held):
            raise InputError(f"{folder}/{split}: no sequences; allowed is one at least")
        low, high = int(held.tokens.min()), int(held.tokens.max())
        if low < 0 or high >= vocabulary:
            raise InputError(
                f"{folder}/{split}: tokens from {low} to {high}; the model's vocabulary allows 0 to {vocabulary - 1}"
            )
    empty = np.flatnonzero(~validation.mask.any(axis=1))
    if len(empty):
        raise InputError(
            f"{folder}/validation: sequence {empty[0]} has no token that counts ({len(empty)} of {len(validation)}"
            " have none); take it out, or mend its loss_mask"
        )


def byte_tokens(text: str) -> list[int]:
    """One token per UTF-8 byte, for a model without a tokenizer."""
    return list(text.encode())


def load(folder: Path, split: str, seq: int, tokenize: Tokenize, *, pack: bool = False) -> Sequences:
    """Read ``folder/split.*`` and cut it into sequences of ``seq`` predictions.

    Text (.txt, .txt.gz) is one stream; .jsonl holds one object with a string ``text`` on each line, joined by
    newlines; .npy is already packed: an integer array [n, seq + 1], or MLPerf's array of dictionaries with
    ``input_ids`` and optionally ``loss_mask``, where shorter rows are padded with masked tokens.
    ``pack``: each line of a .jsonl is a separate sample, and rows hold several that do not attend to each other.
    Raises InputError if the file is missing, ambiguous, malformed or too short.
    """
    files = [folder / (split + suffix) for suffix in SUFFIXES if (folder / (split + suffix)).is_file()]
    if len(files) != 1:
        have = " and ".join(p.name for p in files) or "none"
        raise InputError(
            f"DATADIR={str(folder)!r}: allowed is one file {split} with one of {', '.join(SUFFIXES)}; there is {have}"
        )
    path = files[0]
    if pack and path.suffix != ".jsonl":
        raise InputError(f"PACKING=1: {path.name} has no samples to pack; allowed is {split}.jsonl, or PACKING=0")
    if pack:
        return packed_samples([tokenize(sample) for sample in _json_lines(path, _raw(path))], seq)
    if path.suffix == ".npy":
        return _packed(path, seq)
    stream = np.asarray(tokenize(_text(path)), np.int64)
    count = (len(stream) - 1) // seq
    if count < 1:
        raise InputError(f"{path}: {len(stream)} tokens; SEQ={seq} needs at least {seq + 1}")
    # Consecutive sequences share one token: the last label of one is the first input of the next.
    tokens = np.lib.stride_tricks.sliding_window_view(stream, seq + 1)[: count * seq : seq]
    return Sequences(tokens, np.ones((count, seq), np.bool_))


def packed_samples(samples: Sequence[Sequence[int]], seq: int) -> Sequences:
    """Samples of unequal lengths packed into rows of ``seq`` in their order; only a row's end is padding.

    Each sample is predicted from its own tokens alone. Samples longer than ``seq - 1`` are cut, so that every row has a
    boundary and takes the same attention path, whichever rows share its pass.
    """
    size = seq - 1
    pieces = [s[start : start + size] for s in samples for start in range(0, len(s), max(1, size))]
    rows: list[list[Sequence[int]]] = [[]]
    for piece in pieces:
        if len(piece) < 2:
            continue  # it predicts nothing
        if sum(map(len, rows[-1])) + len(piece) > seq - 1:
            rows.append([])
        rows[-1].append(piece)
    if not rows[0]:
        raise InputError(f"PACKING=1: no sample of 2 tokens or more among {len(samples)}, cut to SEQ - 1 = {size}")
    tokens, mask = np.zeros((len(rows), seq + 1), np.int64), np.zeros((len(rows), seq), np.bool_)
    positions = np.zeros((len(rows), seq), np.int64)
    for i, row in enumerate(rows):
        at = 0
        for piece in row:
            end = at + len(piece)
            tokens[i, at:end], mask[i, at : end - 1], positions[i, at:end] = piece, True, np.arange(len(piece))
            at = end
        positions[i, at:] = np.arange(seq - at)
    return Sequences(tokens, mask, positions)


def _text(path: Path) -> str:
    text = _raw(path)
    return "\n".join(_json_lines(path, text)) if path.suffix == ".jsonl" else text


def _raw(path: Path) -> str:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return raw.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not readable as UTF-8 text: {error}") from error


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
        # MLPerf's packed files are arrays of Python dictionaries, which numpy can only unpickle: read only files that
        # you trust.
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
        # NeMo's packing has already shifted the mask: entry i is about the prediction of token i + 1.
        mask[i, : len(ids) - 1] = np.asarray(counts[:-1], np.bool_)
    return Sequences(tokens, mask)


def order(count: int, batch: int, seed: int) -> Iterator[npt.NDArray[np.int64]]:
    """Endless batches of ``batch`` sequence numbers below ``count``; every epoch is a new shuffle.

    It depends only on the global batch size, so every layout of one global batch reads the same data.
    """
    rng = np.random.default_rng(seed)
    rest = np.empty(0, np.int64)
    while True:
        while len(rest) < batch:
            rest = np.concatenate([rest, rng.permutation(count)])
        yield rest[:batch]
        rest = rest[batch:]
