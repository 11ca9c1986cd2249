"""A short slice of ``benchmarks.chaos``: ten faults on one sweep, its records in PostgreSQL."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.chaos.faults import FAULTS
from tests.chaos.room import Room
from tests.cluster import Cluster
from tests.postgres import Postgres

pytestmark = pytest.mark.slurm

TRIALS, SEED = 6, 4
KINDS = (
    "kill_driver", "write_half_a_line", "restart_slurmd", "repeat_lines", "restart_database", "kill_job",
    "kill_driver", "reorder_lines", "restart_controller", "step_clock",
)  # fmt: skip


def test_ten_faults_change_nothing_in_the_end(slurm: Cluster, postgres: Postgres, tmp_path: Path) -> None:
    calm = Room(tmp_path / "calm", slurm, TRIALS, seconds=0.5)
    room = Room(tmp_path / "disturbed", slurm, TRIALS, postgres=postgres, seconds=3)
    try:
        calm.start()
        calm.finish_all(120)
        assert len({seconds for _, _, seconds in calm.results().values()}) > 1, "there is something to rank"
        room.start()
        for number, kind in enumerate(KINDS):
            chance = random.Random(f"{SEED} {number}")
            time.sleep(chance.uniform(0.2, 1.5))
            if room.driver.poll() is not None and not room.finished():
                room.start()
            FAULTS[kind](room, chance)
        room.set_clock_right()
        room.finish_all(180)
        assert room.losses(calm.results()) == [], room.said
    finally:
        calm.close()
        room.close()
