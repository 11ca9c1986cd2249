"""Reads typed values from an environment, with one-line error messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from lora_tune.base.errors import InputError

Number = TypeVar("Number", int, float)


class Knobs:
    """Reads the variables of one trial. Unset and empty variables take their defaults.

    Each method raises InputError where the value is not allowed; the line names the variable, what came and what
    is allowed.
    """

    def __init__(self, environment: Mapping[str, str], spellings: Mapping[str, tuple[str, ...]] | None = None) -> None:
        """spellings: our name -> accepted variables, the preferred one first; by default the name itself.

        Raises InputError if two spellings of one knob are set to different values.
        """
        self._environment = environment
        self._spellings = spellings or {}
        for names in self._spellings.values():
            held = {name: text for name in names if (text := environment.get(name, "").strip())}
            if len(set(held.values())) > 1:
                spelled = " ".join(f"{name}={text!r}" for name, text in held.items())
                raise InputError(f"{spelled}: allowed is one value, for they name one knob")

    def spelling(self, name: str) -> str:
        """The variable of this knob: the one that is set, or the preferred one."""
        names = self._spellings.get(name, (name,))
        return next((one for one in names if self._environment.get(one, "").strip()), names[0])

    def given(self, *names: str) -> bool:
        """Whether any of these variables is set and not empty."""
        return any(self._text(name) for name in names)

    def refusal(self, name: str, allowed: str) -> InputError:
        variable = self.spelling(name)
        return InputError(f"{variable}={self._environment.get(variable, '')!r}: allowed is {allowed}")

    def integer(self, name: str, default: int, *, low: int, high: int | None = None) -> int:
        """A whole number from ``low`` to ``high``."""
        if not self._text(name):
            return default
        allowed = f"a whole number of at least {low}" + (f" and at most {high}" if high is not None else "")
        value = self._number(name, int, allowed)
        if value < low or (high is not None and value > high):
            raise self.refusal(name, allowed)
        return value

    def real(
        self, name: str, default: float, *, low: float = 0.0, high: float = math.inf, exclusive: bool = False
    ) -> float:
        """A finite number from ``low`` to ``high``; ``exclusive`` leaves ``low`` out."""
        if not self._text(name):
            return default
        allowed = f"a number {'above' if exclusive else 'of at least'} {low:g}"
        allowed += f" and at most {high:g}" if math.isfinite(high) else ""
        value = self._number(name, float, allowed)
        if value < low or value > high or (exclusive and value == low):
            raise self.refusal(name, allowed)
        return value

    def choice(self, name: str, allowed: tuple[str, ...]) -> str:
        """One of ``allowed``; the first is the default."""
        value = self._text(name) or allowed[0]
        if value not in allowed:
            raise self.refusal(name, "one of " + ", ".join(word or "nothing" for word in allowed))
        return value

    def switch(self, name: str, *, default: bool) -> bool:
        """1 or 0, True or False in any case, as the public configs write them."""
        meanings = {"": default, "1": True, "true": True, "0": False, "false": False}
        value = meanings.get(self._text(name).lower())
        if value is None:
            raise self.refusal(name, "1, 0, True or False")
        return value

    def text(self, name: str, default: str = "") -> str:
        return self._text(name) or default

    def folder(self, name: str, default: Path | None) -> Path | None:
        """An existing folder."""
        if not self._text(name):
            return default
        path = Path(self._text(name))
        if not path.is_dir():
            raise self.refusal(name, "an existing folder")
        return path

    def _text(self, name: str) -> str:
        return self._environment.get(self.spelling(name), "").strip()

    def _number(self, name: str, kind: Callable[[str], Number], allowed: str) -> Number:
        try:
            value = kind(self._text(name))
        except ValueError:
            raise self.refusal(name, allowed) from None
        if not math.isfinite(value):
            raise self.refusal(name, allowed)
        return value
