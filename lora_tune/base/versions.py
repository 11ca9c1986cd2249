"""Releases of installed packages."""

from __future__ import annotations

from importlib import metadata


def installed(name: str) -> str:
    """The release of the distribution ``name``; "" where this environment does not have it."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
