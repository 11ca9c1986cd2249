"""What a log says of its own configuration in plain text: a resolved YAML config, an environment, a shell's trace.

MLLOG announces batch, steps and learning rate, but up to v6.0 not the precision: that a run trains in FP4 and heals
stands only in what the training prints beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Value = str | int | float | bool

SCANNED_BYTES = 8 << 20
"""How much of a log is searched: configurations are printed at its start."""

_NAMES: Mapping[bytes, str] = {
    b"fp4": "FP4",
    b"healing_iter": "HEALING_ITER",
    b"max_steps": "MAX_STEPS",
    b"gbs": "GBS",
    b"global_batch_size": "GBS",
}
"""Name in print, in lower case -> parameter."""

_PRINTED = re.compile(
    rb"""(?i)(?<![\w.-])(%b)["']?[ \t]{0,4}[:=][ \t]{0,4}["']?(true|false|\d{1,9})(?![\w.])""" % b"|".join(_NAMES)
)


def printed_values(text: bytes) -> dict[str, Value]:
    """The first value that ``text`` prints of each known setting: ``FP4``, ``HEALING_ITER``, ``MAX_STEPS``, ``GBS``.

    Any of ``fp4: true``, ``export FP4=True``, ``"healing_iter": 350`` and ``max_steps=800`` counts, in any case of
    letters; other values (``null``, ``e2m1``) say nothing.
    """
    values: dict[str, Value] = {}
    for match in _PRINTED.finditer(text[:SCANNED_BYTES]):
        word = match[2].lower()
        value: Value = word == b"true" if word in (b"true", b"false") else int(word)
        values.setdefault(_NAMES[match[1].lower()], value)
    return values


_SETTING_WORDS = (b"healing_iter", b"fp", b"cp", b"context_parallel_size")
_SETTING = re.compile(
    rb"""(?<![\w.-])(healing_iter|fp4|fp8|cp|context_parallel_size)["']?[:=] ?"""
    rb"""["']?(true|false|\d{1,7})(?=[\s"',;}\])])"""
)


def printed_settings(text: bytes) -> dict[bytes, bytes]:
    """What a piece of a log prints of its precision and of CP: the last value of each name, all in lower case.

    A value counts with the character behind it, so that none is cut between pieces.
    """
    return {match[1]: match[2] for match in sorted(_each_setting(text.lower()), key=re.Match.start)}


def _each_setting(text: bytes) -> Iterator[re.Match[bytes]]:
    """Words are searched for before the pattern is: that is ten times as fast."""
    for word in _SETTING_WORDS:
        at = text.find(word)
        while at >= 0:
            if match := _SETTING.match(text, at):
                yield match
            at = text.find(word, at + len(word))
