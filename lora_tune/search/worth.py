"""Whether another node-hour pays for itself."""

from __future__ import annotations

from lora_tune.config.study import Study


def not_worth(study: Study, gain: float | None) -> str:
    """Why the next node-hour is not worth its cost, "" when it is or nobody knows.

    gain: share of the score by which it is expected to improve the recommendation (``session.expected_gain``).
    """
    least = study.budget.stop_below
    if least is None or gain is None or gain >= least:
        return ""
    return (
        f"the next node-hour is expected to improve the score by {100 * gain:.2g}%, "
        f"less than budget.stop_below = {100 * least:g}%"
    )
