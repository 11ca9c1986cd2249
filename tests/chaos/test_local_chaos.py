"""A short slice of ``benchmarks.chaos`` on this machine: a few faults on one sweep, its disk's power cut among them."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from tests.chaos import power
from tests.chaos.local_faults import FAULTS
from tests.chaos.local_room import LocalRoom
from tests.chaos.trial import TARGET, losses, samples_to_target

KINDS = ("freeze_driver", "tear_file", "delete_database", "cut_power", "step_trial_clock", "swap_log")

needs_disks = pytest.mark.skipif(bool(power.missing()) and not os.environ.get("CI"), reason=power.missing())


@needs_disks
def test_six_faults_lose_nothing_and_make_nothing_wrong(tmp_path: Path) -> None:
    room = LocalRoom(tmp_path / "room", trials=4, pace=0.25)
    try:
        room.start()
        for number, kind in enumerate(KINDS):
            chance = random.Random(f"4 {number}")
            time.sleep(chance.uniform(0.2, 1.5))
            if room.driver.poll() is not None and not room.finished():
                room.start()
            FAULTS[kind](room, chance)
        room.set_clock_right()
        if room.driver.poll() is not None and not room.finished():
            room.start()
        room.finish_all(240)
        assert room.losses() == [], room.said
    finally:
        room.close()


@needs_disks
def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(tmp_path: Path) -> None:
    disk = power.LoopDisk(tmp_path / "image", tmp_path / "at", megabytes=16)
    try:
        with (tmp_path / "at" / "synced").open("w") as file:
            file.write("kept")
            file.flush()
            os.fsync(file.fileno())
        (tmp_path / "at" / "written").write_text("gone")
        disk.cut_power()
        assert (tmp_path / "at" / "synced").read_text() == "kept"
        lost = tmp_path / "at" / "written"
        assert not lost.exists() or lost.read_text() == ""
    finally:
        disk.unmount()


def test_the_curves_of_the_trials_reach_the_target_or_do_not_as_the_checks_expect() -> None:
    found = {samples_to_target(rate, seed) for rate in (1e-4, 3e-4, 9e-4) for seed in range(40)}
    assert None in found, "some trials end unreached"
    assert len(found) > 4, "there is something to rank"
    assert losses(3e-4, 1) == losses(3e-4, 1)
    assert min(losses(3e-4, 1)) < TARGET
