"""What a trial announces of itself: values by name, held as printed and decoded when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

MAX_TEXT = 1000
"""Characters of an announced text that are kept."""


class Announced(Mapping[str, object]):
    """Hyperparameters by name, decoded when they are asked for: most never are."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[bytes, object]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> object:
        return plain(self._values[name.encode(errors="replace")])

    def __iter__(self) -> Iterator[str]:
        return (name.decode(errors="replace") for name in self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return repr(dict(self))


def plain(value: object) -> object:
    """The value; decoded where it is a JSON number, text or truth value in bytes."""
    if not isinstance(value, bytes):
        return value
    if value.isdigit() and len(value) < 19:
        return int(value)
    if value[:1] == b'"':
        return value[1:-1].decode(errors="replace")[:MAX_TEXT]
    try:
        return float(value)
    except ValueError:
        return {b"true": True, b"false": False}.get(value)
