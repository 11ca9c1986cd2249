"""Metrics that a training script writes into files of its own: TensorBoard's events, CSV tables, JSON lines.

Each file is read as it grows; a row is a mapping of names to numbers. Formats: TFRecord frames (8 bytes of length, 4 of
its checksum, the data, 4 of theirs) that hold ``tensorflow.Event`` messages, and RFC 4180 tables with a header.
"""

from __future__ import annotations

import csv
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]

LARGEST_RECORD = 1 << 24
"""Bytes of one event; a longer one is an image or no event, and ends the reading of its file."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2


class _Format(Protocol):
    """Takes the bytes of a file in order; gives rows, and keeps what is not whole yet."""

    def take(self, data: bytes) -> Iterator[Row]: ...


class TensorBoardFile:
    """Scalars of TensorBoard's event files, by their tags, with their step."""

    def __init__(self) -> None:
        self._held, self._broken = b"", False

    def take(self, data: bytes) -> Iterator[Row]:
        """The rows of further bytes. A file that is no event file gives none."""
        self._held += data
        at = 0
        while not self._broken and len(self._held) - at >= 12:
            (length,) = struct.unpack_from("<Q", self._held, at)
            if length > LARGEST_RECORD:
                self._broken = True
                break
            if len(self._held) - at < length + 16:
                break
            row = _event(self._held[at + 12 : at + 12 + length])
            at += length + 16
            if len(row) > 1:
                yield row
        self._held = b"" if self._broken else self._held[at:]


class _Lines:
    """Whole lines of a text file."""

    def __init__(self) -> None:
        self._held = b""

    def whole(self, data: bytes) -> list[str]:
        *lines, self._held = (self._held + data).split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


class TableFile(_Lines):
    """Rows of a CSV table with a header; cells without a number are left out."""

    def __init__(self) -> None:
        super().__init__()
        self._names: list[str] = []

    def take(self, data: bytes) -> Iterator[Row]:
        """The rows of further bytes."""
        for cells in csv.reader(self.whole(data)):
            if not self._names:
                self._names = [cell.strip() for cell in cells]
                continue
            row = {
                name: number
                for name, cell in zip(self._names, cells, strict=False)
                if (number := _number(cell)) is not None
            }
            if row:
                yield row


class JsonFile(_Lines):
    """Objects of a file with one JSON object a line."""

    def take(self, data: bytes) -> Iterator[Row]:
        """The rows of further bytes; a line that is no object is left out."""
        for line in self.whole(data):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def format_of(path: Path) -> _Format | None:
    """The format of a file by its name; None for one that holds no metrics."""
    if ".tfevents." in path.name:
        return TensorBoardFile()
    if path.suffix == ".csv":
        return TableFile()
    return JsonFile() if path.suffix == ".jsonl" else None


class MetricFiles:
    """The metric files at or below some paths, read as they appear and grow."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[Path, tuple[_Format, int]] = {}

    def rows(self) -> Iterator[Row]:
        """What was written since the last call, file by file."""
        for root in self._paths:
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                yield from self._further(path)

    def _further(self, path: Path) -> Iterator[Row]:
        known, offset = self._open.get(path, (None, 0))
        reader = known or format_of(path)
        if reader is None or not path.is_file():
            return
        try:
            with path.open("rb") as file:
                if path.stat().st_size < offset:  # written anew
                    reader, offset = format_of(path) or reader, 0
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:  # removed since it was listed
            return
        self._open[path] = reader, offset + len(data)
        yield from reader.take(data)


def _number(cell: str) -> float | int | None:
    for kind in (int, float):
        try:
            return kind(cell)
        except ValueError:
            continue
    return None


def _event(message: bytes) -> Row:
    """The step and the scalars of one event; further fields, and images or texts, are left out."""
    row: Row = {"step": 0}
    for number, value in fields(message):
        if number == 2 and isinstance(value, int):
            row["step"] = value
        elif number == 5 and isinstance(value, bytes):
            for inner, held in fields(value):
                if inner == 1 and isinstance(held, bytes):
                    row.update(_scalar(held))
    return row


def _scalar(message: bytes) -> Row:
    tag, value = "", None
    for number, held in fields(message):
        if number == 1 and isinstance(held, bytes):
            tag = held.decode("utf-8", "replace")
        elif number == 2 and isinstance(held, bytes) and len(held) == 4:
            (value,) = struct.unpack("<f", held)
        elif number == 8 and isinstance(held, bytes):
            value = _tensor(held)
    return {tag: float(f"{value:.7g}")} if tag and value is not None else {}


def _tensor(message: bytes) -> float | None:
    """The number of a tensor with one element; None for any other."""
    kind, content = 0, b""
    for number, held in fields(message):
        if number == 1 and isinstance(held, int):
            kind = held
        elif number in (4, 5, 6) and isinstance(held, bytes):
            content = held
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    return struct.unpack(form, content)[0] if form and len(content) == struct.calcsize(form) else None


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers with their values, of a protocol buffer; ends where the bytes are none."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind, size = key & 7, 0
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            return
        if size > len(message) - at:
            return
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 64:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            break
    return value, at
