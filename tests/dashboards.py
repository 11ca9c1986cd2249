"""The dashboard command as a process of its own, for tests that ask it or click in it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from lora_tune.cli.options import Review


@contextmanager
def serving(review: Review, *options: str) -> Iterator[str]:
    """Run ``python -m lora_tune.dashboard`` and yield its address once, with no token; end it as Ctrl-C does."""
    command = (sys.executable, "-m", "lora_tune.dashboard", "--study", review.study.name, "--port", "0", "--no-token")
    process = subprocess.Popen(
        (*command, *options, "--output", str(review.paths.root)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://[^/]+", line)
        assert found, line + (process.stderr.read() if process.stderr else "")
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
