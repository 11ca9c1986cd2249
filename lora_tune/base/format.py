"""Values as people read them: durations, small curves, text that is safe to show."""

from __future__ import annotations

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
    """Seconds as people read them; "-" for None."""
    if seconds is None:
        return "-"
    if not 100 <= seconds < float("inf"):
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def visible(text: object, keep: str = "") -> str:
    """Any text without what a terminal or a page would act on: control and direction characters become spaces.

    keep: characters to leave as they are, such as line ends.
    """
    return "".join(c if c.isprintable() or c in keep else " " for c in str(text))


def number(value: float) -> str:
    """A metric's value for people: four decimals where they say something, else five digits."""
    return f"{value:.4f}" if value == 0 or 0.01 <= abs(value) < 10_000 else f"{value:.5g}"


def counted(count: float, noun: str = "samples") -> str:
    """A number of things for people: "640 samples", "1 step", "0.5 epochs". noun: in the plural, which ends in s.

    Whole numbers are shown whole, others to six digits.
    """
    shown = f"{count:.0f}" if float(count).is_integer() and abs(count) < 1e15 else f"{count:g}"
    return f"{shown} {noun.removesuffix('s') if count == 1 else noun}"


def about(count: float) -> str:
    """An estimated count for people: whole from 100 on, below that three digits."""
    return f"{count:.0f}" if count >= 100 else f"{count:.3g}"
