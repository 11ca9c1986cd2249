"""Secrets out of text that is stored or shown: tokens, passwords, keys, in every form in which logs print them."""

from __future__ import annotations

import re

HIDDEN = "***"

_ESCAPE = (
    r"\x1b\[[0-9:;?<=>!]{0,40}[ -/]{0,4}[@-~]"  # CSI: colours, cursor
    r"|\x1b[\]PX^_][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)?"  # OSC and other strings: titles, links
    r"|\x1b[ -/]{0,4}[0-~]?"
)
_ESCAPES = re.compile(_ESCAPE + r"|\x9b[0-9;?]{0,40}[@-~]")
_ESCAPES_IN_BYTES = re.compile(_ESCAPE.encode())  # without the 8-bit CSI, which is a part of letters in UTF-8
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
_WORD = (
    r"token|secret|passw(?:or)?d|passphrase|passwd|api[_-]?key|access[_-]?key|private[_-]?key|signing[_-]?key"
    r"|encryption[_-]?key|credentials?|authorization|auth[_-]?key|cookie|_pwd|license[_-]?key|_jwt"
)
# A tokenizer's special tokens are no secrets; neither are counts of tokens.
_NO_SECRET = "".join(
    rf"(?<!{word}_)" for word in ("eos", "bos", "pad", "unk", "sep", "cls", "mask", "image", "special")
)
_ASSIGNED = re.compile(
    rf"(?i){_NO_SECRET}((?:{_WORD})(?:[_-][a-z0-9]{{1,20}}){{0,3}}[\"']?\s{{0,4}}(?:=|:(?!//))\s{{0,4}}){_VALUE}"
)
_OPTION = re.compile(rf"(?i)(--?[a-z0-9_-]{{0,40}}(?:{_WORD})(?:[_-][a-z0-9]{{1,20}}){{0,3}}\s{{1,4}}){_VALUE}")
_LOGIN = re.compile(r"((?:\s(?:-u|--user)[ =]['\"]?[^\s:'\"]{1,200}:)|\blogin\b[^\n]{0,200}?\s-p[ =]?)[^\s'\"]{1,4000}")
_SPOKEN = re.compile(
    r"(?i)(\b(?:password|passphrase|token|api key)\b(?: (?:is|was)|[^\n:]{0,80}\benter:) )(?!required\b)(\S{4,4000})"
)


_SECRET_NAME = re.compile(rf"(?i){_NO_SECRET}(?:{_WORD})(?:[_-][a-z0-9]{{1,20}}){{0,3}}$")
_NAMES_A_PLACE = re.compile(r"(?i)_(?:file|path|dir|folder|name|url)$")


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret as a rule: HF_TOKEN does, MAX_TOKENS and TOKEN_FILE do not."""
    return bool(_SECRET_NAME.search(name)) and not _NAMES_A_PLACE.search(name)


def without_escapes(text: str) -> str:
    """The text without what only a terminal reads: colours, titles, links, cursor movements."""
    return _ESCAPES.sub("", text) if "\x1b" in text or "\x9b" in text else text


def bytes_without_escapes(line: bytes) -> bytes:
    """:func:`without_escapes` for bytes in UTF-8 or any other encoding that keeps ASCII."""
    return _ESCAPES_IN_BYTES.sub(b"", line) if b"\x1b" in line else line


def redact(text: str) -> str:
    """The text without secrets, terminal escapes and control characters; lines stay lines.

    Hidden are: logins in URLs; values assigned to names such as HF_TOKEN, WANDB_API_KEY or password (in shell, ``set
    -x`` traces, JSON, Python, options); authorization headers; private keys; and tokens of known forms anywhere.
    Of a secret of more than 2,000 characters a part may stay: the patterns' bounds keep hostile text from hanging.
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
