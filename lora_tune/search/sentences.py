"""Why the portfolio proposes and recommends what it does, in sentences."""

from __future__ import annotations

from lora_tune.base.format import duration
from lora_tune.search.advantage import Advantage
from lora_tune.search.whole.proposals import Believed, WholeProposal

TO_BE_SURE = "short run of a layout that would replace the one of today, to see that it lives"


def why_proposed(proposal: WholeProposal, nodes: int) -> str:
    """Why the whole model proposed this."""
    return (
        f"every parameter may drive speed and convergence; expected to improve the recommendation by "
        f"{100 * proposal.gain:.2f}% for {proposal.seconds * nodes / 3600:.2f} node-hours"
    )


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


def expectation(best: Believed) -> str:
    """What the whole model expects of its recommendation."""
    runs = "1 run" if best.runs == 1 else f"{best.runs} runs"
    return (
        f"expected {duration(best.score)} to the target, {runs} of this configuration; the next run is "
        f"expected to improve on it by {100 * best.regret:.1f}%"
    )
