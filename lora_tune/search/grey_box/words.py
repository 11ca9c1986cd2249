"""What the grey box says of its recommendation and of its proposals."""

from __future__ import annotations

import math

from lora_tune.base.text import counted, duration
from lora_tune.search.grey_box.acquisition import Action
from lora_tune.search.grey_box.model import SearchModel
from lora_tune.search.grey_box.recommendation import Recommendation


def sentence(best: Recommendation) -> str:
    """The recommendation in words."""
    above = f"expected to be {100 * best.regret:.1f}% above the best there is"
    if not math.isfinite(best.regret):
        above = "nothing has reached the target yet, so how good it is remains unknown"
    return (
        f"expected {duration(best.score)} to the target, {counted(best.runs, 'runs')} of these hyperparameters; {above}"
    )


def explain(model: SearchModel, action: Action) -> str:
    """Why an action was chosen, in one sentence."""
    names = model.coordinates.convergence_names
    again = any(
        not o.source and all(o.values.get(n) == action.values.get(n) for n in names) for o in model.observations
    )
    parts = []
    if action.kind == "probe":
        features = model.coordinates.memory_features
        own = [o for o in model.observations if o.infeasible and not o.source]
        died = features(action.values) in [features(o.values) for o in own]
        parts.append(
            "short run " + ("of a layout that died, in case of bad luck" if died else "to measure an untried layout")
        )
    elif again:
        parts.append("another seed of known hyperparameters" + (" on an untried layout" if action.new_layout else ""))
    else:
        parts.append("new hyperparameters" + (" on an untried layout" if action.new_layout else " on a known layout"))
    if action.risk > 0.02:
        parts.append(f"{100 * action.risk:.0f}% risk of running out of memory")
    parts.append(
        f"expected to improve the recommendation by {100 * action.gain:.2f}% for {action.node_hours:.2f} node-hours"
    )
    return "; ".join(parts)
