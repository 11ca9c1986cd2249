"""What several tests share: where public data lies, and how its absence is said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

pytest_plugins = ["tests.distribution", "tests.browser", "tests.cluster.fixtures", "tests.postgres", "tests.tiny"]

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


REAL = ("slurm", "browser", "postgres")
PROCESSES = (
    "test_sweep.py", "test_tiny_sweep.py", "test_local.py", "test_nemo.py", "test_warm_worker.py",
    "test_peft.py", "test_dashboard.py", "test_docs.py", "test_pictures.py", "test_status.py",
    "test_doctor.py", "test_report.py", "test_confirm.py", "test_descendants.py", "test_local_chaos.py",
)  # fmt: skip


WHOLE_ONLY = (*REAL, "public_data")
TRAINS = (
    "recipes",
    "recipes_e2e",
    "chaos",
    "cluster",
    "slurm",
    "test_wheel.py",
    "test_private_uses.py",
    "test_packed_sweep.py",
)
ONE_OF_EACH = (
    "slurm/test_sweep.py::test_sixteen_trials_on_four_nodes_and_the_best_config_by_hand",
    "store/test_store.py::TestPostgres",
    "review/test_report.py::test_selecting_marks_in_figures_and_rows_compares_their_trials",
)
"""A sweep on real Slurm, the records in real PostgreSQL, a page in a real browser: what ``make test`` runs of them."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``make test`` leaves out what is marked ``long``: real daemons, browsers, trainings, whole commands.

    One of each stays in.

    What drives real daemons, browsers and processes is run again where a loaded machine was too slow for it.

    The summary counts every such repetition; a test that fails three times fails.
    """
    for item in items:
        folders = set(item.path.relative_to(REPOSITORY / "tests").parts)
        long = any(item.get_closest_marker(name) for name in WHOLE_ONLY) or folders & {*TRAINS, *PROCESSES}
        if long and not item.nodeid.removeprefix("tests/").startswith(ONE_OF_EACH):
            item.add_marker(pytest.mark.long)
        if any(item.get_closest_marker(name) for name in REAL) or item.path.name in PROCESSES:
            item.add_marker(pytest.mark.flaky(reruns=2))
