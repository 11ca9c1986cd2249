"""The driver's log: JSON lines with times, without secrets, also around a full disk."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lora_tune.controller.sweep_records import KEPT_LINES, EventFile


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_every_line_is_one_json_object_with_its_time_and_event(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    EventFile(path).write(1.23456, "submitted", trial=3, job="12")
    EventFile(path).write(2.0, "stop", text="two\nlines and half a pair \ud83d")
    first, second = lines(path)
    assert first == {"at": 1.235, "event": "submitted", "trial": 3, "job": "12"}
    assert second["text"].startswith("two\nlines")


def test_secrets_are_hidden(tmp_path: Path) -> None:
    path = tmp_path / "driver.log"
    EventFile(path).write(1.0, "trouble", text="postgresql+psycopg://me:hunter2secret@db/x does not answer")
    assert "hunter2secret" not in path.read_text()


@pytest.mark.skipif(os.geteuid() != 0 and not os.environ.get("CI"), reason="mounting needs root")
def test_lines_wait_while_the_disk_is_full_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    place = tmp_path / "disk"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", place], check=True)
    try:
        journal, filler = EventFile(place / "driver.log"), place / "filler"
        journal.write(0.0, "began")
        with pytest.raises(OSError, match="No space left"):
            filler.write_bytes(bytes(100_000))
        for number in range(KEPT_LINES + 200):
            journal.write(float(number), "tick", text="x" * 100)
        filler.unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", place], check=True)
        journal.write(9999.0, "after")
        found = lines(place / "driver.log")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
    assert found[-1]["event"] == "after"
    lost = sum(line["count"] for line in found if line["event"] == "lines lost")
    ticks = {line["at"] for line in found if line["event"] == "tick"}
    assert lost > 0
    assert len(ticks) + lost >= KEPT_LINES + 200
    assert max(ticks) == KEPT_LINES + 199
