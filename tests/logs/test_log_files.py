"""Finished logs on disk: what can be read is read, and what cannot is named."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lora_tune.base.errors import InputError
from lora_tune.logs.log_files import log_files

NOBODY = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user may enter."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    for inner in folder.iterdir():
        inner.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def a_common_user() -> Iterator[None]:
    """Root may read everything: as somebody who may not."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        pytest.param(0o444, "locked/b.log: cannot be read", id="may be listed and not entered"),
        pytest.param(0o311, "locked: cannot be read", id="may be entered and not listed"),
        pytest.param(0o000, "locked: cannot be read", id="neither"),
    ],
)
def test_a_folder_that_is_closed_costs_its_own_logs_alone(shared: Path, mode: int, why: str) -> None:
    for name in ("a.log", "locked/b.log", "z.log"):
        (shared / name).parent.mkdir(exist_ok=True)
        (shared / name).write_text(name)
    (shared / "locked").chmod(mode)
    with a_common_user():
        read = {Path(file.name).name: (b"".join(file.pieces()), file.problem) for file in log_files([shared])}
    assert read.pop("a.log") == (b"a.log", "")
    assert read.pop("z.log") == (b"z.log", "")
    ((_, problem),) = read.values()
    assert why in problem
    assert "Permission denied" in problem


def test_a_path_within_a_closed_folder_is_named_and_the_next_one_read(shared: Path) -> None:
    (shared / "locked").mkdir()
    (shared / "locked/b.log").touch()
    (shared / "z.log").write_text("z.log")
    (shared / "locked").chmod(0)
    with a_common_user():
        files = log_files([shared / "locked/b.log", shared / "z.log"])
        closed, read = ((b"".join(file.pieces()), file.problem) for file in files)
    assert "Permission denied" in closed[1]
    assert read == (b"z.log", "")


def test_a_path_that_is_not_there_is_the_users_input(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such file or folder"):
        next(log_files([tmp_path / "missing.log"]))


@pytest.mark.parametrize(("older", "old"), [
    ("run.log.2.gz", "run.log.1"), ("run.log.10", "run.log.9.gz"), ("run.log-20261121.gz", "run.log-20261122"),
    ("run.log.20261121", "run.log.20261122.gz"),
])  # fmt: skip
def test_what_rotation_made_of_a_log_is_one_log_from_its_beginning(tmp_path: Path, older: str, old: str) -> None:
    for name, text in ((older, b"first\n"), (old, b"second\n"), ("run.log", b"third\n")):
        (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert [(log.name, b"".join(log.pieces())) for log in log_files([tmp_path])] == [
        (str(tmp_path / "run.log"), b"first\nsecond\nthird\n")
    ]


def test_numbers_behind_names_make_no_rotation_where_the_log_itself_is_missing(tmp_path: Path) -> None:
    for name in ("out.1", "out.2"):
        (tmp_path / name).write_text(name)
    assert [b"".join(log.pieces()) for log in log_files([tmp_path])] == [b"out.1", b"out.2"]
