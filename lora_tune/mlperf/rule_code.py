"""The rules' code, compiled once: the package's checker and this one's readers compile it anew for every record."""

from __future__ import annotations

from functools import cache
from types import CodeType
from typing import Any, Literal

Mode = Literal["eval", "exec"]

_EXPRESSIONS = frozenset({"CHECK", "FIRST_CHECK", "ATLEAST_ONE_CHECK"})
_STATEMENTS = frozenset({"PRE", "POST", "CODE"})


@cache
def compiled(text: str, mode: Mode) -> CodeType:
    """The code of a rule. Raises SyntaxError as ``eval`` and ``exec`` would."""
    return compile(text.strip(), "<rule>", mode)


class _Code(str):
    """A rule's text, whose ``strip()`` is its code: the checker hands that to ``eval`` and ``exec`` as it is.

    Shown, compared and formatted it is the text, so that complaints quote it.
    """

    __slots__ = ("_mode",)
    _mode: Mode

    def __new__(cls, text: str, mode: Mode) -> _Code:
        code = super().__new__(cls, text)
        code._mode = mode
        return code

    def strip(self, chars: str | None = None, /) -> Any:
        """The code; the text where characters are named."""
        return compiled(str(self), self._mode) if chars is None else super().strip(chars)


def with_code(rules: Any, key: str = "") -> Any:
    """What a YAML file of rules holds, with the text of each rule replaced by one that compiles once.

    key: the name under which ``rules`` stands. Text that is no Python stays text: the checker says what it lacks.
    """
    if isinstance(rules, dict):
        return {name: with_code(value, name) for name, value in rules.items()}
    if isinstance(rules, list):
        return [with_code(value, key) for value in rules]
    if not isinstance(rules, str) or key not in _EXPRESSIONS | _STATEMENTS:
        return rules
    mode: Mode = "eval" if key in _EXPRESSIONS else "exec"
    try:
        compiled(rules, mode)
    except SyntaxError:
        return rules
    return _Code(rules, mode)
