"""Jobs load pickles only from folders into which nobody else can put any."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from lora_tune.base.errors import RefusedError
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.files import pickle_folder
from lora_tune.launchers.local import LocalLauncher
from lora_tune.workloads.base import Job, Resources

JOB = "unsafe-0000-0"


def attempt_in(folder: Path) -> AttemptPaths:
    attempt = AttemptPaths(folder / "trials" / "0000" / "attempt-0")
    attempt.folder.mkdir(parents=True)
    return attempt


@pytest.mark.parametrize("mask", [0o000, 0o002, 0o022, 0o077])
def test_it_is_made_for_its_user_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    attempt = attempt_in(tmp_path)
    before = os.umask(mask)
    try:
        folder = pickle_folder(attempt, JOB)
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert pickle_folder(attempt, JOB) == folder, "and taken again"


@pytest.mark.parametrize(("what", "mode"), [("submitit", 0o770), ("submitit", 0o707), (".", 0o707), ("..", 0o777)])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path, what: str, mode: int) -> None:
    attempt = attempt_in(tmp_path)
    attempt.submitit.mkdir()
    (attempt.folder / what).chmod(mode)
    with pytest.raises(RefusedError, match="writable by"):
        pickle_folder(attempt, JOB)


def test_a_shared_folder_with_the_sticky_bit_is_what_tmp_is(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    tmp_path.chmod(0o1777)
    pickle_folder(attempt, JOB)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.submitit.mkdir()
    os.chown(attempt.submitit, 12345, -1)
    with pytest.raises(RefusedError, match="belongs to user id 12345"):
        pickle_folder(attempt, JOB)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.submitit.symlink_to(tmp_path)
    with pytest.raises(RefusedError, match="use another --output"):
        pickle_folder(attempt, JOB)


def test_the_launcher_asks_before_it_writes_a_pickle(tmp_path: Path) -> None:
    attempt = attempt_in(tmp_path)
    attempt.folder.chmod(0o777)
    job = Job(
        name=JOB, folder=attempt.folder, argv=(sys.executable, "-c", ""), environment={},
        log=attempt.log, resources=Resources(),
    )  # fmt: skip
    with pytest.raises(RefusedError, match="chmod o-w"):
        LocalLauncher().submit(job)
    assert not list(attempt.folder.rglob("*.pkl"))
