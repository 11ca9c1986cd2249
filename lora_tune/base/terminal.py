"""What standard output can show: every text is printed in some form, whatever its encoding; dumb terminals."""

from __future__ import annotations

import codecs
import io
import os
import sys

_HANDLER = "lora_tune.plainer"
_PLAINER = dict(zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True)) | {"…": "~", "·": "-", "═": "=", "─": "-", "│": "|"}
"""One character for one, so that columns stay."""


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """For codecs: characters that the encoding lacks become their nearest plain ones, or a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAINER.get(character, "?") for character in lacking), error.end


codecs.register_error(_HANDLER, _plainer)


def print_anything() -> None:
    """Let standard output and error take every text: under an ASCII or KOI8-R locale a picture must end no sweep."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def redraws() -> bool:
    """Whether standard output is a terminal on which a picture can be drawn over the last one."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")
