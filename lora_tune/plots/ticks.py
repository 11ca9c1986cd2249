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
    """The number as short as it can be told apart from its neighbours ``step`` away."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 0
    if step > 0 and abs(step * 10**decimals - round(step * 10**decimals)) > 1e-6:
        decimals += 1
    if step > 0:
        return f"{value:,.{decimals}f}"
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
