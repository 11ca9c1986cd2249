"""Finished logs on disk: plain or compressed, single, in folders or in tar archives.

Rotated parts such as ``run.log.2.gz``, ``run.log.1`` and ``run.log`` are joined to one log.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import os
import re
import tarfile
import zlib
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import IO

from lora_tune.base.errors import InputError

PIECE = 1 << 20
LARGEST_LOG = 1 << 30
"""Maximum unpacked bytes of one log; a larger file is no log, or a decompression bomb."""

_GZIP = b"\x1f\x8b"
_FAULTS = (OSError, EOFError, zlib.error, tarfile.TarError)


class LogFile:
    """One log, to be read once, before the next one is requested.

    name: the path, with ``:MEMBER`` for one in an archive. parent: the folder or archive that contains it. problem: why
    :meth:`pieces` ended early, or "".
    """

    def __init__(self, name: str, parent: str, *streams: IO[bytes] | None, problem: str = "") -> None:
        self.name, self.parent, self.problem = name, parent, problem
        self._streams = streams

    def pieces(self) -> Iterator[bytes]:
        """The unpacked bytes, a megabyte at a time, as far as they can be read. Never raises."""
        passed = 0
        try:
            for stream in map(_unpacked, self._streams):
                while passed <= LARGEST_LOG and (piece := stream.read1(PIECE)):
                    passed += len(piece)
                    yield piece
        except _FAULTS as error:
            self.problem = f"{self.name}: cannot be read: {error}"
        if passed > LARGEST_LOG:
            self.problem = f"{self.name}: larger than {LARGEST_LOG >> 30} GiB; the rest is not read"


def log_files(paths: Sequence[Path]) -> Iterator[LogFile]:
    """Every file below ``paths``, in order. Raises InputError for a missing path, before the first file.

    Unreadable files and folders are returned with their ``problem``.
    """
    for path in paths:
        with contextlib.suppress(PermissionError):  # it may exist
            if not path.exists():
                raise InputError(f"{path}: there is no such file or folder; name logs, folders, .gz or tar files")
    for path in paths:
        if os.path.isdir(path):  # noqa: PTH112 - False without permission, where Path raises
            yield from _below(path)
        else:
            yield from _opened(path)


def _below(folder: Path) -> Iterator[LogFile]:
    closed: list[OSError] = []
    paths = (Path(at, name) for at, _, names in os.walk(folder, onerror=closed.append) for name in names)
    logs: dict[Path, list[tuple[int, Path]]] = {}
    files = {file for file in paths if not _is_special(file)}
    for file in sorted(files):
        log, age = _rotated(file, files)
        logs.setdefault(log, []).append((age, file))
    for log in sorted(logs):
        parts = [file for _, file in sorted(logs[log], reverse=True)]
        yield from _joined(log, parts) if len(parts) > 1 else _opened(parts[0])
    for error in closed:
        yield LogFile(str(error.filename), folder.name, problem=f"{error.filename}: cannot be read: {error.strerror}")


def _rotated(file: Path, files: Collection[Path]) -> tuple[Path, int]:
    """The log of which a file is a rotated part, and the part's age; other files are their own logs."""
    named = _PART.fullmatch(file.name)
    log = file.with_name(named["log"]) if named else file
    if named is None or log not in files:
        return file, 0
    return log, int(named["number"]) if named["number"] else 10**8 - int(named["date"])


_PART = re.compile(r"(?P<log>.+?)(?:\.(?P<number>\d{1,3})|[-.](?P<date>20\d{6}))(?:\.gz)?")
"""Names of rotated files, as of logrotate and Python's handlers."""


def _joined(log: Path, parts: Sequence[Path]) -> Iterator[LogFile]:
    parent = log.resolve().parent.name
    try:
        with contextlib.ExitStack() as opened:
            yield LogFile(str(log), parent, *(opened.enter_context(part.open("rb")) for part in parts))
    except OSError as error:
        yield LogFile(str(log), parent, problem=f"{error.filename}: cannot be read: {error.strerror}")


def _is_special(file: Path) -> bool:
    """Whether it is neither a file nor a link to one: a pipe, socket, or link to a folder or to nothing."""
    try:
        return not file.is_file()
    except PermissionError:
        return False


def _opened(file: Path) -> Iterator[LogFile]:
    parent = file.resolve().parent.name
    try:
        if not file.is_file():  # a pipe or a device may never end
            yield LogFile(str(file), parent, problem=f"{file}: cannot be read: not a regular file")
        elif tarfile.is_tarfile(file):
            with tarfile.open(file) as archive:
                for member in archive:
                    if member.isfile():
                        yield LogFile(f"{file}:{member.name}", file.name, archive.extractfile(member))
        else:
            with file.open("rb") as stream:
                yield LogFile(str(file), parent, stream)
    except _FAULTS as error:
        yield LogFile(str(file), parent, problem=f"{file}: cannot be read: {error}")


def _unpacked(stream: IO[bytes] | None) -> io.BufferedReader | gzip.GzipFile | io.BytesIO:
    if stream is None:
        return io.BytesIO()
    assert isinstance(stream, io.BufferedReader), "as Path.open and TarFile.extractfile give them"
    return gzip.GzipFile(fileobj=stream) if stream.peek(2)[:2] == _GZIP else stream


# Replay of a finished log in the pieces in which a driver would have read it.


TICK_MS = 1000
"""Milliseconds between two reads of a log: the driver's period on a cluster."""

PIECES = 2000
"""Number of pieces of a log without time stamps, cut at line ends."""

_STAMPED = re.compile(rb'^[^\n]*?:::MLLOG[^\n]{0,80}?"time_ms": ?(\d{10,14})', re.MULTILINE)


def ticks(log: bytes) -> Iterator[bytes]:
    """The log in the pieces in which a driver that polls once a second would have read it.

    Uses the time stamps of MLLOG lines; a log without any is cut into ``PIECES`` equal parts at line ends.
    """
    begin, due = 0, None
    for line in _STAMPED.finditer(log):
        stamp = int(line[1])
        if due is None or stamp >= due:
            if line.start() > begin:
                yield log[begin : line.start()]
            begin, due = line.start(), max(due or 0, stamp + TICK_MS)
    step = max(1, len(log) // PIECES) if due is None else len(log)
    while begin < len(log):
        end = log.find(b"\n", begin + step) + 1 or len(log)
        yield log[begin:end]
        begin = end


# Settings that a log prints as plain text: a resolved YAML config, an environment, a shell trace.
#
# MLLOG states batch, steps and learning rate, but up to v6.0 not the precision: only other output shows that a run
# trains in FP4 and heals.


SCANNED_BYTES = 8 << 20
"""Bytes of a whole log that are searched: configs are printed at its start."""

_KEYS = (b"healing_iter", b"fp", b"cp", b"context_parallel_size", b"max_steps", b"gbs", b"global_batch_size")
_SETTING = re.compile(
    rb"""(?<![\w.-])(healing_iter|fp4|fp8|cp|context_parallel_size|max_steps|gbs|global_batch_size)["']?"""
    rb"""[ \t]{0,4}[:=][ \t]{0,4}["']?(true|false|\d{1,9})(?=[\s"',;}\])])"""
)


def printed_settings(text: bytes) -> dict[bytes, bytes]:
    """Printed values of precision, CP, steps and batch in a piece of a log: the last one of each name, in lower case.

    ``fp4: true``, ``export FP4=True``, ``"healing_iter": 350`` and ``max_steps = 800`` all count; other values
    (``null``, ``e2m1``) are ignored. A value counts only with the character after it, so that none is cut between
    pieces.
    """
    return {match[1]: match[2] for match in sorted(_each_setting(text.lower()), key=re.Match.start)}


def _each_setting(text: bytes) -> Iterator[re.Match[bytes]]:
    """Search for plain words before the pattern, which is ten times as fast."""
    for needle in _KEYS:
        at = text.find(needle)
        while at >= 0:
            if match := _SETTING.match(text, at):
                yield match
            at = text.find(needle, at + len(needle))
