"""A disk that can lose its power: everything that was not synced is gone, as the file system's journal leaves it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

_OPTIONS = "loop,commit=60"
"""ext4 writes its journal back when somebody syncs, and else once a minute: most of a short sweep is in memory only."""


class LoopDisk:
    """An ext4 file system in the file ``image``, mounted at ``at``.

    :meth:`cut_power` mounts a copy of the image in its place: what programs wrote and the kernel has not handed down to
    the block device is not in it. Nothing may run in the folder then.
    """

    def __init__(self, image: Path, at: Path, megabytes: int) -> None:
        self._image, self._at, self._cuts = image, at, 0
        at.mkdir(parents=True, exist_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        self._mount(image)

    def cut_power(self) -> None:
        """Lose what is not on the disk, and start again with what is."""
        self._cuts += 1
        after = self._image.with_name(f"{self._image.name}.{self._cuts}")
        subprocess.run(["cp", "--sparse=always", self._image, after], check=True)
        self.unmount()
        self._image.unlink()
        self._image = after
        self._mount(after)

    def unmount(self) -> None:
        """Take the file system away; whoever still holds a file of it keeps that."""
        subprocess.run(["umount", "-l", self._at], check=True)

    def _mount(self, image: Path) -> None:
        subprocess.run(["mount", "-o", _OPTIONS, image, self._at], check=True)


def missing() -> str:
    """Why power cannot be cut here, "" where it can."""
    absent = [tool for tool in ("mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found"
    made = subprocess.run(["losetup", "--find"], capture_output=True)
    return "" if made.returncode == 0 else "no loop device may be used here"
