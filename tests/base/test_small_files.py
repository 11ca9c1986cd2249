"""Small files: whole after a power cut, and no reader minds what lies in their place."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_tune.base.files import LARGEST, create_json, parse, read_json, write_json


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"pid": 7})
    write_json(path, {"pid": 8, "host": "ü"})
    assert read_json(path).content == {"pid": 8, "host": "ü"}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_a_power_cut_would_leave_is_on_the_disk_before_the_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may put a rename on the disk before the data: then the file is empty after the cut."""
    calls: list[str] = []
    plain_sync, plain_replace = os.fsync, Path.replace

    def sync(descriptor: int) -> None:
        folder = os.path.isdir(f"/proc/self/fd/{descriptor}")  # noqa: PTH112 - a link of the kernel's
        calls.append("folder synced" if folder else "file synced")
        plain_sync(descriptor)

    def replace(path: Path, target: Path) -> Path:
        calls.append("renamed")
        return plain_replace(path, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(Path, "replace", replace)
    write_json(tmp_path / "a.json", {"x": 1})
    assert calls == ["file synced", "renamed", "folder synced"]


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without"])
def test_a_file_is_created_by_one_only_and_never_seen_without_its_content(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:

        def no_links(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "claim.json"
    create_json(path, {"pid": 1})
    with pytest.raises(FileExistsError):
        create_json(path, {"pid": 2})
    assert read_json(path).content == {"pid": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["claim.json"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "x.json is empty"),
        (b"\0" * 4096, "x.json is empty"),  # what XFS leaves of a file that was not synced
        (b'{"pid": 12', "x.json is cut or damaged: not JSON"),
        (b"[1, 2]", "x.json holds no JSON object"),
        (b'"text"', "x.json holds no JSON object"),
        (b"[" * 200_000, "x.json is cut or damaged: not JSON"),
        (b"9" * 5000, "x.json is cut or damaged: not JSON"),
        (b"\xff\xfe\x00", "x.json is cut or damaged: not JSON"),
    ],
)
def test_a_damaged_file_is_a_problem_in_words(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    found = read_json(tmp_path / "x.json")
    assert (found.content, found.problem) == (None, problem)


def test_what_is_no_file_is_a_problem_in_words_and_stops_nobody(tmp_path: Path) -> None:
    assert read_json(tmp_path / "absent.json") == read_json(tmp_path / "absent" / "absent.json")
    assert not read_json(tmp_path / "absent.json").problem
    (tmp_path / "folder.json").mkdir()
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "loop.json").symlink_to("loop.json")
    (tmp_path / "huge.json").write_bytes(b" " * LARGEST + b"{}")
    for name in ("folder.json", "pipe.json", "loop.json", "huge.json"):
        found = read_json(tmp_path / name)
        assert found.content is None
        assert name in found.problem


@given(st.binary(max_size=200))
def test_any_bytes_are_an_object_or_a_problem(text: bytes) -> None:
    found = parse("x", text)
    assert (found.content is None) == bool(found.problem)


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.floats(allow_nan=False) | st.none()))
def test_any_object_comes_back(content: dict[str, object]) -> None:
    assert parse("x", json.dumps(content).encode()).content == content
