"""When a stand-in fails: FAIL_MODE is a list of ``mode`` or ``mode@VARIABLE=value``, ``mode!`` once a folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

TEXTS = {
    "oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of "
    "79.11 GiB of which 1.20 GiB is free.",
    "numa": "srun: error: CPU binding outside of job step allocation\n"
    "libnuma: Warning: cpu argument 84-95,180-191 is out of range\n<84-95,180-191> is invalid",
    "userbuffers": "transformer_engine/common/comm_gemm_overlap/userbuffers/userbuffers-host.cpp: CUDA Error: "
    "operation not supported",
    "rendezvous": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "mount": "RuntimeError: mount check failed: the tokenizer is not there",
}
"""Failure texts as the real programs print them."""


def applies(mode: str, values: Mapping[str, str] = os.environ) -> bool:
    """Whether ``mode`` is to happen in a run with these variables."""
    for item in os.environ.get("FAIL_MODE", "").split():
        name, _, condition = item.partition("@")
        variable, _, wanted = condition.partition("=")
        if name.rstrip("!") == mode and (not condition or values.get(variable) == wanted):
            return not name.endswith("!") or _first(mode)
    return False


def _first(mode: str) -> bool:
    try:
        Path(f"{mode}.happened").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
