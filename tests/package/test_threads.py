"""Commands bound the threads of linear algebra to one; trials and the user's own setting are left alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lora_tune import _THREADS

PROGRAM = """
import os, sys
sys.argv = [sys.argv[1]]
import lora_tune
import numpy as np
np.linalg.cholesky(np.eye(600) @ np.eye(600) + np.eye(600))
print(len(os.listdir("/proc/self/task")), *(os.environ.get(n, "-") for n in lora_tune._THREADS))
"""


def threads(argv0: str, **variables: str) -> tuple[int, list[str]]:
    """Threads of a process that was started as ``argv0`` and has multiplied, and what its children would inherit."""
    environment = {k: v for k, v in os.environ.items() if k not in _THREADS} | variables
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, argv0], env=environment, capture_output=True, text=True, check=True
    )
    count, *inherited = done.stdout.split()
    return int(count), inherited


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread anyway")
@pytest.mark.parametrize("argv0", ["-m", "/usr/bin/lora-tune"])
def test_a_command_computes_with_one_thread_and_hands_no_bound_to_its_trials(argv0: str) -> None:
    assert threads(argv0) == (1, ["-", "-", "-"])
    assert threads("notebook")[0] > 1, "who imports the package keeps what NumPy does"


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core has one thread anyway")
@pytest.mark.parametrize("name", _THREADS[:2])
def test_the_users_own_number_counts(name: str) -> None:
    assert threads("-m", **{name: "2"})[0] == 2
