"""Folders of a test that another user of the machine can reach."""

from __future__ import annotations

import tempfile
from pathlib import Path


def reachable(folder: Path, mode: int = 0o555) -> None:
    """Add ``mode`` to the folder and to all above it below the folder of temporary files: pytest makes them its own."""
    top = Path(tempfile.gettempdir()).resolve()
    for above in (folder.resolve(), *folder.resolve().parents):
        if top not in above.parents:
            return
        above.chmod(above.stat().st_mode | mode)
