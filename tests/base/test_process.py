"""Signals reach the process that is meant, and nothing at or below 1."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import lora_tune
from lora_tune.base.host import ancestor_pids, send_signal

SIGNALLING = {"kill", "killpg"}


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
@pytest.mark.parametrize("pid", [1, 0, -1, -12])
def test_nothing_at_or_below_one_is_signalled(pid: int, group: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """0 is what cgroup.procs shows for a process of another PID namespace, and our own group for kill(2)."""
    sent: list[tuple[int, int]] = []
    for name in SIGNALLING:
        monkeypatch.setattr(os, name, lambda *signalled: sent.append(signalled))
    send_signal(pid, signal.SIGTERM, group=group)
    assert sent == []


def test_a_process_and_a_group_are_signalled_and_one_that_is_gone_is_no_error() -> None:
    for group in (False, True):
        with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
            send_signal(process.pid, signal.SIGTERM, group=group)
        assert process.returncode == -signal.SIGTERM
        send_signal(process.pid, signal.SIGTERM, group=group)


def test_everything_that_signals_by_number_does_so_by_the_one_function() -> None:
    direct = [
        f"{file.name}:{node.lineno}"
        for file in Path(lora_tune.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in SIGNALLING and ast.unparse(node.value) == "os"
    ]
    assert {name.partition(":")[0] for name in direct} == {"host.py"}, direct


def test_the_own_line_has_parents_and_leaders_of_their_groups_and_no_child() -> None:
    line = ancestor_pids()
    assert {os.getpid(), os.getppid(), os.getpgrp()} - {0} <= line
    program = "from lora_tune.base.host import ancestor_pids; print(*ancestor_pids())"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert os.getpid() in set(map(int, child.stdout.split()))
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        assert process.pid not in ancestor_pids()
        process.kill()
