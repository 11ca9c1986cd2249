"""Slurm's short form of node lists: ``n[1-3,07],m2``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence


def hostnames(text: str) -> Iterator[str]:
    """``n[1-3,07],m2`` -> n1, n2, n3, n07, m2. Several brackets multiply, as in Slurm.

    What is no range of numbers stays as it is; of more than ``MOST`` names the first ones are given.
    """
    parts = re.findall(r"(?:[^,\[]|\[[^\]]*\])+", "" if text in NOTHING else text)
    names = (name for part in parts for name in _expand(re.split(r"\[([^\]]*)\]", part)))
    yield from itertools.islice(names, MOST)


MOST = 65_536
"""Slurm allows no more nodes in a cluster; damaged text may name billions."""


NOTHING = ("(null)", "None", "N/A", "Unknown", "NONE")
"""What Slurm prints for an empty field."""


_RANGE = re.compile(r"([0-9]{1,18})-([0-9]{1,18})")


def _expand(pieces: Sequence[str]) -> Iterator[str]:
    """``pieces`` alternate between literal text and the inside of a bracket."""
    if len(pieces) == 1:
        yield pieces[0]
        return
    head, inside, *rest = pieces
    for choice in inside.split(","):
        bounds = _RANGE.fullmatch(choice)
        numbers: Iterable[str] = [choice]
        if bounds:
            numbers = (f"{i:0{len(bounds[1])}}" for i in range(int(bounds[1]), int(bounds[2]) + 1))
        for number in numbers:
            for tail in _expand(rest):
                yield head + number + tail
