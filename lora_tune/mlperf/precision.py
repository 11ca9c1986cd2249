"""The numerical precision that a trial trains in, read from the settings that its program is given or has printed.

NVIDIA's implementations from v5.1 on train in FP4 when ``FP4`` is on and change to a higher precision ("healing") at
step ``HEALING_ITER``; 0 means never. ``HEALING_ITER`` has no effect on a run that is not in FP4.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

FP4, FP8, BF16 = "fp4", "fp8", "bf16"

_HEALING = re.compile(r"(.*_)?healing_(iter|step)s?")
_STATED = re.compile(r"(.*_)?(linear_precision|precision_(in_)?linear|fp4_recipe|precision)")
_SWITCHES = {"fp4": FP4, "nvfp4": FP4, "mxfp4": FP4, "fp8": FP8, "mxfp8": FP8, "bf16": BF16}
_OFF = ("", "0", "0.0", "false", "none", "null", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What a run's linear layers compute in.

    lowest: "fp4", "fp8", "bf16", or "" where nothing says it. healing_steps: optimizer step from which an FP4 run
    goes on in a higher precision; 0: it does not, or nothing says so.
    """

    lowest: str = ""
    healing_steps: int = 0

    def __or__(self, other: Precision) -> Precision:
        """This, with what it leaves open taken from ``other``."""
        return self if self.lowest or self.healing_steps else other


def precision_of(settings: Mapping[str, object]) -> Precision:
    """The precision in ``settings``: environment variables, parameters, or what a log printed; names in any case.

    A switch (``FP4``, ``FP8``, ...) counts before a name that states a precision in words
    (``MLPERF_LINEAR_PRECISION``, ``lowest_numerical_precision_in_linear``). A healing step is disregarded where the
    settings say that the run is not in FP4.
    """
    named = {name.strip().lower(): _text(value) for name, value in settings.items()}
    on = {_SWITCHES[name] for name, value in named.items() if name in _SWITCHES and value not in _OFF}
    off = {_SWITCHES[name] for name, value in named.items() if name in _SWITCHES and value in _OFF}
    stated = {kind for name, value in named.items() if _STATED.fullmatch(name) for kind in _kinds(value)}
    kinds = on or (stated - off)
    lowest = next((kind for kind in (FP4, FP8, BF16) if kind in kinds), "")
    steps = max((_steps(value) for name, value in named.items() if _HEALING.fullmatch(name)), default=0)
    denied = lowest not in ("", FP4) or FP4 in off - on
    return Precision(lowest=lowest, healing_steps=0 if denied else steps)


def _text(value: object) -> str:
    return str(value).strip().strip("'\"").lower()


def _kinds(value: str) -> list[str]:
    return [kind for kind in (FP4, FP8, BF16) if kind in value]


def _steps(value: str) -> int:
    try:
        steps = float(value)
    except ValueError:
        return 0
    return int(steps) if 0 < steps < 1e12 else 0
