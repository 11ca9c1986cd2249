"""The names by which a sweep and an attempt say who they are: in a job's environment, and at the head of its log."""

from __future__ import annotations

import uuid

SWEEP_VARIABLE, ATTEMPT_VARIABLE = "LORA_TUNE_SWEEP", "LORA_TUNE_ATTEMPT"
"""The variables in which a job finds the id of its sweep and the token of its attempt."""

SWEEP_KEY, ATTEMPT_KEY = "lora_tune_sweep", "lora_tune_attempt"
"""The MLLOG keys under which our own recipes print them; a user's own program need not."""


def new_token() -> str:
    """A name that no other sweep and no other attempt has."""
    return uuid.uuid4().hex
