"""What several tests share: where public data lies, and how its absence is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["tests.browser", "tests.cluster.fixtures", "tests.tiny"]

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def public_data() -> Path:
    """The folder of public MLPerf results (``logs/``, ``runs.jsonl.gz``, ``submissions.csv``, ...)."""
    folder = Path(os.environ.get("LORA_TUNE_MLPERF", REPOSITORY.parent / "shared" / "mlperf"))
    if not (folder / "runs.jsonl.gz").exists():
        pytest.skip(
            f"public MLPerf results are not at {folder}; set LORA_TUNE_MLPERF to the folder that holds runs.jsonl.gz"
        )
    return folder
