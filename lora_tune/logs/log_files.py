"""Finished logs on disk: plain or compressed, one by one, in folders or in tar archives."""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from lora_tune.base.errors import InputError

PIECE = 1 << 20
LARGEST_LOG = 1 << 30
"""Bytes of one log, unpacked; what is larger is no log, or a bomb."""

_GZIP = b"\x1f\x8b"
_FAULTS = (OSError, EOFError, zlib.error, tarfile.TarError)


class LogFile:
    """One log, to be read once, before the next one is asked for.

    name: the path, with ``:MEMBER`` for one in an archive. parent: the folder or archive that holds it.
    problem: why :meth:`pieces` ended early, "" while it did not.
    """

    def __init__(self, name: str, parent: str, stream: IO[bytes] | None, problem: str = "") -> None:
        self.name, self.parent, self.problem = name, parent, problem
        self._stream = stream

    def pieces(self) -> Iterator[bytes]:
        """The unpacked bytes, a megabyte at a time, as far as they can be read. Never raises."""
        seen = 0
        try:
            stream = _unpacked(self._stream)
            while seen <= LARGEST_LOG and (piece := stream.read1(PIECE)):
                seen += len(piece)
                yield piece
        except _FAULTS as error:
            self.problem = f"{self.name}: cannot be read: {error}"
        if seen > LARGEST_LOG:
            self.problem = f"{self.name}: larger than {LARGEST_LOG >> 30} GiB; the rest is not read"


def log_files(paths: Sequence[Path]) -> Iterator[LogFile]:
    """Every file below ``paths``, in order. Raises InputError for a path that is not there, before the first.

    What may not be read, a folder too, comes with its ``problem``.
    """
    for path in paths:
        with contextlib.suppress(PermissionError):  # it may be there
            if not path.exists():
                raise InputError(f"{path}: there is no such file or folder; name logs, folders, .gz or tar files")
    for path in paths:
        if os.path.isdir(path):  # noqa: PTH112 - False where it may not be asked, for which Path raises
            yield from _below(path)
        else:
            yield from _opened(path)


def _below(folder: Path) -> Iterator[LogFile]:
    closed: list[OSError] = []
    found = (Path(at, name) for at, _, names in os.walk(folder, onerror=closed.append) for name in names)
    for file in sorted(found):
        if not _is_special(file):
            yield from _opened(file)
    for error in closed:
        yield LogFile(str(error.filename), folder.name, None, f"{error.filename}: cannot be read: {error.strerror}")


def _is_special(file: Path) -> bool:
    """Whether it is no file and no link to one: a pipe, a socket, a link to a folder or to nothing."""
    try:
        return not file.is_file()
    except PermissionError:
        return False


def _opened(file: Path) -> Iterator[LogFile]:
    parent = file.resolve().parent.name
    try:
        if not file.is_file():  # a pipe or a device may never end
            yield LogFile(str(file), parent, None, f"{file}: cannot be read: not a regular file")
        elif tarfile.is_tarfile(file):
            with tarfile.open(file) as archive:
                for member in archive:
                    if member.isfile():
                        yield LogFile(f"{file}:{member.name}", file.name, archive.extractfile(member))
        else:
            with file.open("rb") as stream:
                yield LogFile(str(file), parent, stream)
    except _FAULTS as error:
        yield LogFile(str(file), parent, None, f"{file}: cannot be read: {error}")


def _unpacked(stream: IO[bytes] | None) -> io.BufferedReader | gzip.GzipFile | io.BytesIO:
    if stream is None:
        return io.BytesIO()
    assert isinstance(stream, io.BufferedReader), "as Path.open and TarFile.extractfile give them"
    return gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == _GZIP else stream
