"""Text for display: durations, sparklines, counts; escaping and redaction."""

from __future__ import annotations

import codecs
import io
import os
import re
import sys
from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int) -> str:
    """The last ``width`` finite values as bars, lowest to highest."""
    shown = [v for v in values if v == v and abs(v) != float("inf")][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in shown)


def duration(seconds: float | None) -> str:
    """Seconds as text; "-" for None."""
    if seconds is None:
        return "-"
    if not 100 <= seconds < float("inf"):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def visible(text: object, keep: str = "") -> str:
    """Text safe for terminals and pages: control and direction characters become spaces.

    keep: characters to keep, such as newlines.
    """
    return "".join(c if c.isprintable() or c in keep else " " for c in str(text))


def number(value: float) -> str:
    """A metric's value as text: four decimals from 0.01 to 10,000, else five digits."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 10_000 else f"{value:.5g}"


def counted(count: float, noun: str = "samples") -> str:
    """A count as text: "640 samples", "1 step", "0.5 epochs". noun: plural, which ends in s.

    Integers are exact, other numbers have six digits.
    """
    shown = f"{count:.0f}" if float(count).is_integer() and abs(count) < 1e15 else f"{count:g}"
    return f"{shown} {noun.removesuffix('s') if count == 1 else noun}"


def listed(names: Sequence[object], most: int = 6) -> str:
    """Names as text: ``n3, n7, n9 and 4 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(map(str, names[:most]))}{more}"


def trials_text(numbers: Sequence[int], most: int = 6) -> str:
    """Trial numbers as text: ``trials 3, 7, 9 and 4 more``."""
    return f"trial{'s' if len(numbers) > 1 else ''} {listed(numbers, most)}"


def about(count: float) -> str:
    """An estimated count as text: an integer from 100 on, below three digits."""
    return f"{count:.0f}" if count >= 100 else f"{count:.3g}"


# Output in any encoding, and dumb terminals.


_HANDLER = "lora_tune.plainer"
_PLAINER = dict(zip("▁▂▃▄▅▆▇█", "_.,-=+*#", strict=True)) | {"…": "~", "·": "-", "═": "=", "─": "-", "│": "|"}
"""One character for one, so that columns stay aligned."""


def _plainer(error: UnicodeError) -> tuple[str, int]:
    """Codec error handler: replaces unencodable characters by similar ASCII ones, or a question mark."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    return "".join(_PLAINER.get(character, "?") for character in lacking), error.end


codecs.register_error(_HANDLER, _plainer)


def escape_unprintable() -> None:
    """Make stdout and stderr accept any text, so that an ASCII or KOI8-R locale does not end a sweep."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def redraws() -> bool:
    """Whether stdout is a terminal that can be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


# Redaction of tokens, passwords and keys, in every form that logs print.


HIDDEN = "***"

_ESCAPE = (
    r"\x1b\[[0-9:;?<=>!]{0,40}[ -/]{0,4}[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)?"  # OSC and other strings: titles, links
    r"|\x1b[ -/]{0,4}[0-~]?"
)
_ESCAPES = re.compile(_ESCAPE + r"|\x9b[0-9;?]{0,40}[@-~]")
_ESCAPES_IN_BYTES = re.compile(_ESCAPE.encode())  # without 8-bit CSI, which occurs within UTF-8 letters
_CONTROLS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")

_KEY_BLOCK = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}(?:-----END [A-Z ]{0,40}PRIVATE KEY-----)?"
)
_URL_LOGIN = re.compile(r"(?<=://)(?:[^\s/@:'\"]{1,200}:[^\s@'\"]{1,2000}|[^\s/@'\"]{1,2000})@")
_HEADER = re.compile(r"(?i)\b(bearer|basic|digest)(\s{1,4})[\w.~+/=-]{6,4000}")
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|nvapi-|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abps]-|pypi-|dop_v1_|wandb_v1_)[A-Za-z0-9_-]{16,4000}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\beyJ[\w-]{8,4000}\.[\w-]{4,4000}\.[\w-]{0,4000}"  # a JSON web token
)
_VALUE = (
    r"""(?!\*\*\*)("(?:[^"\\\n]|\\.){0,4000}"?|'[^'\n]{0,4000}'?|\$'[^'\n]{0,4000}'?|[^\s,;&"'()\[\]{}<>|]{1,4000})"""
)
_SPECIAL_TOKEN = (
    r"token|secret|passw(?:or)?d|passphrase|passwd|api[_-]?key|access[_-]?key|private[_-]?key|signing[_-]?key"
    r"|encryption[_-]?key|credentials?|authorization|auth[_-]?key|cookie|_pwd|license[_-]?key|_jwt"
)
# A tokenizer's special tokens and counts of tokens are no secrets.
_NO_SECRET = "".join(
    rf"(?<!{kind_name}_)" for kind_name in ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "special")
)
_ASSIGNED = re.compile(
    rf"(?i){_NO_SECRET}((?:{_SPECIAL_TOKEN})(?:[_-][a-z0-9]{{1,20}}){{0,3}}[\"']?\s{{0,4}}(?:=|:(?!//))\s{{0,4}}){_VALUE}"
)
_OPTION = re.compile(
    rf"(?i)(--?[a-z0-9_-]{{0,40}}(?:{_SPECIAL_TOKEN})(?:[_-][a-z0-9]{{1,20}}){{0,3}}\s{{1,4}}){_VALUE}"
)
_LOGIN = re.compile(r"((?:\s(?:-u|--user)[ =]['\"]?[^\s:'\"]{1,200}:)|\blogin\b[^\n]{0,200}?\s-p[ =]?)[^\s'\"]{1,4000}")
_SPOKEN = re.compile(
    r"(?i)(\b(?:password|passphrase|token|api key)\b(?: (?:is|was)|[^\n:]{0,80}\benter:) )(?!required\b)(\S{4,4000})"
)


_SECRET_NAME = re.compile(rf"(?i){_NO_SECRET}(?:{_SPECIAL_TOKEN})(?:[_-][a-z0-9]{{1,20}}){{0,3}}$")
_NAMES_A_PLACE = re.compile(r"(?i)_(?:file|path|dir|folder|name|url)$")


def names_secret(name: str) -> bool:
    """Whether a variable of this name usually holds a secret: HF_TOKEN does, MAX_TOKENS and TOKEN_FILE do not."""
    return bool(_SECRET_NAME.search(name)) and not _NAMES_A_PLACE.search(name)


def without_escapes(text: str) -> str:
    """The text without terminal escapes: colours, titles, links, cursor movements."""
    return _ESCAPES.sub("", text) if "\x1b" in text or "\x9b" in text else text


def bytes_without_escapes(line: bytes) -> bytes:
    """:func:`without_escapes` for bytes in UTF-8 or any other ASCII-compatible encoding."""
    return _ESCAPES_IN_BYTES.sub(b"", line) if b"\x1b" in line else line


def redact(text: str) -> str:
    """The text without secrets, terminal escapes and control characters; lines are kept.

    Hides logins in URLs; values assigned to names such as HF_TOKEN, WANDB_API_KEY or password (in shell, ``set -x``
    traces, JSON, Python, options); authorization headers; private keys; and tokens of known forms. Part of a secret of
    more than 2,000 characters may remain, because the patterns are bounded against hostile text.
    """
    text = _CONTROLS.sub("", without_escapes(text))
    text = _KEY_BLOCK.sub(HIDDEN, text)
    text = _URL_LOGIN.sub(f"{HIDDEN}@", text)
    text = _HEADER.sub(rf"\1\2{HIDDEN}", text)
    text = _KNOWN_TOKEN.sub(HIDDEN, text)
    text = _OPTION.sub(rf"\1{HIDDEN}", text)
    text = _ASSIGNED.sub(_hide_value, text)
    text = _LOGIN.sub(rf"\1{HIDDEN}", text)
    return _SPOKEN.sub(rf"\1{HIDDEN}", text)


def _hide_value(match: re.Match[str]) -> str:
    name, value = match.groups()
    scheme = value.strip("\"'").lower()
    return match[0] if scheme in ("bearer", "basic", "digest", "none", "null", "") else f"{name}{HIDDEN}"


# Progress as an integer step, for tools without fractional steps: Optuna, MLflow, TensorBoard.


def steps_of_one(unit: str) -> int:
    """Integer steps per unit of progress: 1000 per epoch, because evals occur at fractions of an epoch; else 1.

    The same for all trials of a study, which are compared at equal steps. unit: samples, steps or epochs.
    """
    return 1000 if unit == "epochs" else 1


def whole_step(progress: float, unit: str) -> int:
    """The integer step for ``progress``, counted in ``unit``."""
    return round(progress * steps_of_one(unit))
