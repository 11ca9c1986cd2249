"""A layout as numbers that speed and memory depend on."""

from __future__ import annotations

import math
from functools import lru_cache

from lora_tune.config.layout import parse_layout


@lru_cache(maxsize=4096)  # the same few hundred layouts in every proposal
def layout_features(text: str) -> tuple[float, ...]:
    """Degrees in doublings, idle share of the pipeline, micro-batches and nodes; raises as ``parse_layout`` does."""
    layout = parse_layout(text)
    micro = max(1.0, layout.minibs / layout.mbs)
    degrees = (math.log2(v) for v in (layout.tp, layout.cp, layout.pp, layout.mbs, layout.vp))
    # The share of time that a pipeline of this depth idles, (PP - 1) / (VP * micro-batches).
    idle = math.log1p((layout.pp - 1) / (layout.vp * micro))
    nodes = (math.log2(layout.nodes),) if layout.nodes else ()
    return (*degrees, idle, math.log2(micro) / 4, float(layout.sp), *nodes)


def layout_labels(text: str) -> tuple[str, ...]:
    """What each of the features of this layout means."""
    known = ("tp", "cp", "pp", "mbs", "vp", "bubble", "micro", "sp")
    return (*known, "nodes") if parse_layout(text).nodes else known
