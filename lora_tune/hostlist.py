"""Slurm's short form of node lists: ``n[1-3,07],m2``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


def hostnames(text: str) -> Iterator[str]:
    """``n[1-3,07],m2`` -> n1, n2, n3, n07, m2. Several brackets multiply, as in Slurm."""
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", "" if text in NOTHING else text):
        yield from _expand(re.split(r"\[([^\]]*)\]", part))


NOTHING = ("(null)", "None", "N/A", "Unknown", "NONE")
"""What Slurm prints for an empty field."""


def _expand(pieces: Sequence[str]) -> Iterator[str]:
    """``pieces`` alternate between literal text and the inside of a bracket."""
    if len(pieces) == 1:
        yield pieces[0]
        return
    head, inside, *rest = pieces
    for choice in inside.split(","):
        low, dash, high = choice.partition("-")
        numbers = [f"{i:0{len(low)}}" for i in range(int(low), int(high) + 1)] if dash else [choice]
        for number in numbers:
            for tail in _expand(rest):
                yield head + number + tail
