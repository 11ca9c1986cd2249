"""The names by which a sweep and an attempt say who they are: in a job's environment, and at the head of its log."""

from __future__ import annotations

import re
import uuid

SWEEP_VARIABLE, ATTEMPT_VARIABLE = "LORA_TUNE_SWEEP", "LORA_TUNE_ATTEMPT"
"""The variables in which a job finds the id of its sweep and the token of its attempt."""

SWEEP_KEY, ATTEMPT_KEY = "lora_tune_sweep", "lora_tune_attempt"
"""The MLLOG keys under which our own recipes print them; a user's own program need not."""


HEAD_BYTES = 1 << 16
"""A log's own head stands within its first so many bytes: Slurm's and submitit's lines may come before it."""

_HEAD = re.compile(rb"(?m)^lora-tune: attempt ([0-9a-f]{1,64}) of sweep [0-9a-f]{0,64}\n")


def log_head(sweep: str, token: str) -> bytes:
    """The line at the head of a log that says whose it is, as the runner of jobs writes it."""
    return f"lora-tune: attempt {token} of sweep {sweep}\n".encode("ascii")


def token_in(head: bytes) -> str:
    """The token of the attempt that a log is of, from its first ``HEAD_BYTES``; "" where it does not say."""
    match = _HEAD.search(head)
    return match[1].decode("ascii") if match else ""


def without_head(chunk: bytes) -> bytes:
    """Bytes of a log less the line that says whose it is, which its program did not print."""
    return _HEAD.sub(b"", chunk)


def new_token() -> str:
    """A name that no other sweep and no other attempt has."""
    return uuid.uuid4().hex
