"""Which file system a path lies on, as the kernel tells it: a pure function of ``/proc/self/mountinfo``."""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath

NETWORK = frozenset(
    {
        "nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "lustre_lite", "gpfs", "mmfs", "beegfs",
        "beegfs_nodev", "pvfs2", "orangefs", "wekafs", "panfs", "glusterfs", "gfs2", "ocfs2", "daos", "virtiofs",
        "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.ceph-fuse", "fuse.s3fs", "fuse.rclone", "fuse.gcsfuse",
        "fuse.juicefs", "fuse.moosefs", "fuse.mfs", "fuse.davfs", "fuse.dfuse", "fuse.vast",
    }
)  # fmt: skip
"""Types that several hosts can mount at one time. SQLite's locks and shared memory do not reach across hosts."""


def mountinfo() -> str:
    """The mounts as this process sees them; "" where the kernel does not tell (not Linux)."""
    try:
        return Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def file_system(path: Path, mounts: str) -> str:
    """The type of the file system that holds the absolute ``path``, such as ``ext4``; "" where ``mounts`` has none.

    mounts: lines of /proc/self/mountinfo (proc(5)); lines of another form are passed over.
    """
    best, kind = -1, ""
    target = PurePosixPath(path)
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields, type_ = before.split(" "), after.split(" ")[0]
        if not separator or len(fields) < 6 or not type_:
            continue
        place = PurePosixPath(_unescaped(fields[4]))
        # Of two mounts on one place the later one is seen.
        if (target == place or place in target.parents) and len(place.parts) >= best:
            best, kind = len(place.parts), type_
    return kind


def _unescaped(field: str) -> str:
    r"""A mount point as it is; the kernel writes space, tab, newline and backslash as ``\040`` and so on."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), field)
