"""Why the configuration of today is run again and handed over, in sentences."""

from __future__ import annotations

from lora_tune.base.text import duration
from lora_tune.search.advantage import Advantage

TO_BE_SURE = "short run of a layout that would replace the one of today, to see that it lives"


def why_decides(*, of_other: bool) -> str:
    """Why a known configuration is run again. of_other: it is that of today."""
    which = "configuration of today" if of_other else "one believed best"
    return f"another seed of the {which}, to tell whether the one believed best is better than that of today"


def staying(seconds: float, best: Advantage, *, moved: bool) -> str:
    """That the configuration of today stays, on its layout or a faster one; seconds, best: of the one believed best."""
    today = "the configuration of today" + (" on a faster layout" if moved else "")
    return (
        f"{today}: the one believed best is expected to take {duration(seconds)} and to save {100 * best.share:.1f}% "
        f"(give or take {100 * best.sd:.1f}%), which is not yet clear"
    )
