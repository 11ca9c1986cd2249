"""Small files: atomic writes that survive a power failure, and reads that tolerate any damage.

Jobs, drivers and launchers communicate through files of a few hundred bytes. A file may be missing, empty, truncated,
filled with zeros, replaced by a folder, or foreign; none of that is the reader's error, so :func:`read_json` reports it
and raises nothing. Also metric files of training scripts, and the type of a file system.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import json
import math
import os
import re
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from lora_tune.base.host import Process

LARGEST = 4 << 20
"""Maximum bytes of a small file; larger ones are not ours."""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """The content of a small file.

    content: its JSON object; None if it is missing or unreadable. problem: why it is unreadable, else "".
    """

    content: Mapping[str, Any] | None = None
    problem: str = ""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` as :func:`write_text` does."""
    write_text(path, json.dumps(content))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` atomically: a reader, even after a power failure, sees the old or the whole new content.

    Raises OSError if the disk refuses the write; the old file is kept then.
    """
    partial = _written(path, text)
    try:
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_json(path: Path, content: Mapping[str, Any]) -> None:
    """Create ``path`` with its content atomically. Raises FileExistsError if it exists, OSError.

    A hard link is exclusive on network file systems, too. On a file system without hard links the file is created first
    and then filled, so a reader may briefly find it empty.
    """
    partial = _written(path, json.dumps(content))
    try:
        os.link(partial, path)
    except FileExistsError:
        raise
    except OSError:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(partial.read_bytes())
            file.flush()
            os.fsync(file.fileno())
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def _written(path: Path, text: str) -> Path:
    """Write the text into a synced temporary file beside ``path``."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return partial


def sync_folder(folder: Path) -> None:
    """Sync a folder's entries to disk, if its file system can."""
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder, and need it least
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file that a trial may have replaced by anything, opened with ``flags`` of os.open.

    Never blocks, as a pipe would. Raises OSError, also for anything but a regular file.
    """
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_json(path: Path) -> SmallFile:
    """The object in ``path``, or why it is unreadable. Never raises, never blocks."""
    try:
        file = open_regular(path)
    except FileNotFoundError:
        return SmallFile()
    except (OSError, ValueError) as error:
        return _unreadable(path, getattr(error, "strerror", None) or str(error))
    try:
        return parse(path.name, os.read(file, LARGEST + 1))
    except OSError as error:
        return _unreadable(path, error.strerror or str(error))
    finally:
        os.close(file)


def parse(name: str, text: bytes) -> SmallFile:
    """Parse the bytes of the small file ``name``."""
    if not text.strip(b"\0 \t\r\n"):
        return SmallFile(problem=f"{name} is empty")
    if len(text) > LARGEST:
        return SmallFile(problem=f"{name} is longer than {LARGEST} bytes")
    try:
        content = json.loads(text.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return SmallFile(problem=f"{name} is cut or damaged: not JSON")
    return SmallFile(content) if isinstance(content, dict) else SmallFile(problem=f"{name} holds no JSON object")


def _unreadable(path: Path, why: str) -> SmallFile:
    return SmallFile(problem=f"{path.name} cannot be read: {why}")


def text_of(content: Mapping[str, Any], name: str) -> str:
    """The text under ``name``; "" if there is none."""
    value = content.get(name)
    return value if isinstance(value, str) else ""


def number_of(content: Mapping[str, Any], name: str) -> float | None:
    """The finite number under ``name``, or None."""
    value = content.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def whole_of(content: Mapping[str, Any], name: str) -> int | None:
    """The integer of at most 63 bits under ``name``, or None."""
    value = content.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None


def process_of(content: Mapping[str, Any]) -> Process:
    """The process in a record; pid 0 if there is none. Records of earlier releases have "boot" instead of "place"."""
    return Process(
        pid=whole_of(content, "pid") or 0,
        start_ticks=whole_of(content, "start_ticks"),
        host=text_of(content, "host"),
        place=text_of(content, "place") or text_of(content, "boot"),
    )


# File system type of a path, a pure function of ``/proc/self/mountinfo``.


NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "lustre_lite", "gpfs", "mmfs", "beegfs",
        "beegfs_nodev", "pvfs2", "orangefs", "wekafs", "panfs", "glusterfs", "gfs2", "ocfs2", "daos", "virtiofs",
        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse",
        "fuse.juicefs", "fuse.moosefs", "fuse.mfs", "fuse.davfs", "fuse.dfuse", "fuse.vast",
    }
)  # fmt: skip
"""Types that several hosts can mount at once; SQLite's locks and shared memory do not work across hosts."""


def mountinfo() -> str:
    """The mounts of this process; "" if the kernel does not provide them (not Linux)."""
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that holds the absolute ``path``, such as ``ext4``; "" if ``mounts`` lacks it.

    mounts: lines of /proc/self/mountinfo (proc(5)); other lines are ignored.
    """
    best, kind = -1, ""
    target = PurePosixPath(path)
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields, type_ = before.split(" "), after.split(" ")[0]
        if not separator or len(fields) < 6 or not type_:
            continue
        place = PurePosixPath(_unescaped(fields[4]))
        # A later mount hides an earlier one on the same place.
        if (target == place or place in target.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), type_
    return kind


def _unescaped(field: str) -> str:
    r"""A mount point, decoded; the kernel writes space, tab, newline and backslash as ``\040`` and so on."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), field)


# Metric files of training scripts: TensorBoard events, CSV tables, JSON lines.
#
# Each file is read as it grows; a row maps names to numbers. Formats: TFRecord frames (8 bytes of length, 4 of its
# checksum, the data, 4 of their checksum) with ``tensorflow.Event`` messages, and RFC 4180 tables with a header.


Row = dict[str, Any]

LARGEST_RECORD = 1 << 24
"""Maximum bytes of one event; a longer one is an image or invalid, and ends the reading of its file."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_FLOAT, _DOUBLE = 1, 2


class TensorBoardFile:
    """Scalars of TensorBoard event files, by tag, with their step."""

    def __init__(self) -> None:
        self._held, self._broken = b"", False

    def take(self, data: bytes) -> Iterator[Row]:
        """The rows of further bytes; none for a file that is no event file."""
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
    """Complete lines of a text file."""

    def __init__(self) -> None:
        self._held = b""

    def whole(self, data: bytes) -> list[str]:
        *lines, self._held = (self._held + data).split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]


class TableFile(_Lines):
    """Rows of a CSV table with a header; cells without a number are omitted."""

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
    """Rows of a file with one JSON object per line."""

    def take(self, data: bytes) -> Iterator[Row]:
        """The rows of further bytes; other lines are ignored."""
        for line in self.whole(data):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


MetricFile = TensorBoardFile | TableFile | JsonFile


def format_of(path: Path) -> MetricFile | None:
    """A reader for a metric file by its name; None for other files."""
    if ".tfevents." in path.name:
        return TensorBoardFile()
    if path.suffix == ".csv":
        return TableFile()
    return JsonFile() if path.suffix == ".jsonl" else None


class MetricFiles:
    """The metric files at or below some paths, read as they appear and grow."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths
        self._open: dict[Path, tuple[MetricFile, int]] = {}

    def rows(self) -> Iterator[Row]:
        """Rows written since the last call, file by file."""
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
                if path.stat().st_size < offset:  # rewritten
                    reader, offset = format_of(path) or reader, 0
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:  # deleted since it was listed
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
    """Step and scalars of one event; other fields, images and texts are ignored."""
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
    """The number in a tensor with one element; None for any other."""
    kind, content = 0, b""
    for number, held in fields(message):
        if number == 1 and isinstance(held, int):
            kind = held
        elif number in (4, 5, 6) and isinstance(held, bytes):
            content = held
    form = {_FLOAT: "<f", _DOUBLE: "<d"}.get(kind)
    return struct.unpack(form, content)[0] if form and len(content) == struct.calcsize(form) else None


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer; stops at invalid bytes."""
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
