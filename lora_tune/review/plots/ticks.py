"""Where an axis has its numbers, and how they are written."""

from __future__ import annotations

import math


def linear_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten apart) within the range."""
    rough = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 times them where there is room; round numbers when within one power of ten."""
    decades = math.log10(high / low)
    if decades < 0.8:
        return [t for t in linear_ticks(low, high) if t > 0]
    factors = (1, 2, 5) if decades <= 3 else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [f * 10.0**p for p in powers for f in factors if low * 0.999 <= f * 10.0**p <= high * 1.001]


def tick_text(value: float, step: float = 0.0) -> str:
    """The number as short as it can be told apart from its neighbours ``step`` away (0: four digits)."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        power = math.floor(math.log10(abs(value)) + 1e-9)
        digits = max(0, power - _last_place(step)) if step > 0 else 3
        mantissa = f"{value / 10.0**power:.{digits}f}"
        return f"{mantissa.rstrip('0').rstrip('.') if step <= 0 else mantissa}e{power}"
    if step > 0:
        return f"{value:,.{max(0, -_last_place(step))}f}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _last_place(step: float) -> int:
    """The power of ten of the last digit that multiples of ``step`` (1, 2, 2.5 or 5 times a power of ten) need."""
    power = math.floor(math.log10(step) + 1e-9)
    return power if abs(step / 10.0**power - round(step / 10.0**power)) < 1e-6 else power - 1
