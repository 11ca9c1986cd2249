"""Small files that survive a power cut when written and any damage when read.

A job, a driver and a launcher tell each other facts by files of a few hundred bytes. Whoever reads one may find it
absent, empty, cut, filled with zeros, replaced by a folder, or written by somebody else: none of that is an error of
the reader, so :func:`read_json` says what it found and raises nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LARGEST = 4 << 20
"""Bytes; a larger file is none of ours."""


@dataclass(frozen=True, slots=True)
class SmallFile:
    """What was found in place of a small file.

    content: its object; None where it is absent or unreadable. problem: why it is unreadable, "" where it is not.
    """

    content: Mapping[str, Any] | None = None
    problem: str = ""


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace ``path`` as :func:`write_text` does."""
    write_text(path, json.dumps(content))


def write_text(path: Path, text: str) -> None:
    """Replace ``path`` so that a reader, also after a power cut, sees the old file or the whole new one.

    Raises OSError where the disk takes none of it; the old file is left then.
    """
    partial = _written(path, text)
    try:
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def create_json(path: Path, content: Mapping[str, Any]) -> None:
    """Make ``path`` with its content in one step. Raises FileExistsError where it is there already, OSError.

    A hard link is exclusive on network file systems too. Where a file system has none, the file is made first and
    filled then, and a reader may find it empty for a moment.
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
    """A file beside ``path`` with the text, on the disk."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return partial


def sync_folder(folder: Path) -> None:
    """Put a folder's names on the disk, as far as its file system can."""
    with contextlib.suppress(OSError):  # some network file systems refuse to sync a folder; they need it least
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a file in whose place a trial can have put anything, opened with ``flags`` of os.open.

    Never waits, as a pipe would make its reader. Raises OSError, also for what is no regular file.
    """
    file = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_json(path: Path) -> SmallFile:
    """The object in ``path``, or what lies there instead. Never raises, never waits."""
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
    """What the bytes of the small file ``name`` say."""
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
    """The text under ``name``; "" where there is none."""
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
    """The whole number of at most 63 bits under ``name``, or None."""
    value = content.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**63 else None
