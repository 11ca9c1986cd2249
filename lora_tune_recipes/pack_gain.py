"""Predicts, from the study and its model's config alone, whether trials gain from sharing a GPU.

A pass takes the longer of two times: the host's to launch kernels, which grows with the layers, and the GPU's to
compute, which grows with the tokens. Trials side by side share the first. A pack measures its gain itself; this
warns in advance where there will be none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lora_tune.base.llama import Shape
from lora_tune.config.parameters import CategoricalParameter, FixedParameter, IntParameter, choices_of
from lora_tune.config.study import Study
from lora_tune_recipes.packed.job import LEAST_GAIN

LAYER_SECONDS = 4.3e-3
"""Host seconds to launch one layer's forward and backward pass with adapters, measured on an H200's host."""
RATE = 460e12
"""Floating-point operations per second of an H200 in long passes (``benchmarks/records/packed.md``)."""


def pair_gain(shape: Shape, sequences: int, seq: int) -> float:
    """Ratio of steps per second of two trials side by side on an H200 to those of one.

    Each pass has ``sequences`` sequences of ``seq`` tokens.
    """
    launched = shape.layers * LAYER_SECONDS
    computed = shape.step_flops(sequences * seq, seq) / RATE
    return 2 * max(launched, computed) / max(launched, 2 * computed)


def packing_warnings(study: Study) -> list[str]:
    """A warning if even the smallest passes of the study fill a GPU; empty if that is unknown."""
    site = study.site
    if site.slots is None or site.gpus_per_node == 0 or site.model is None:
        return []
    shape, passes = _shape(site.model), sorted(_passes(study), key=lambda one: one[0] * one[1])
    if shape is None or not passes:
        return []
    sequences, seq = passes[0]
    gain = pair_gain(shape, sequences, seq)
    if gain >= LEAST_GAIN:
        return []
    return [
        f"site.slots: {sequences} x {seq:,} tokens over a model of {shape.parameters / 1e9:.1f} billion weights fill a "
        f"GPU by themselves: on an H200 two such trials side by side make about {gain:.2f} times the steps of one. "
        "A pack measures that, trains them one after another, and saves only their start-ups"
    ]


def _passes(study: Study) -> Iterator[tuple[int, int]]:
    """(sequences, tokens per sequence) of the passes that trials may run, if the study states both."""
    lengths = study.space.get("SEQ")
    if not isinstance(lengths, IntParameter | CategoricalParameter | FixedParameter):
        return
    seqs = [length for length in choices_of(lengths) if isinstance(length, int)]
    for values in study.search_space.each_layout():
        sequences = values.get("MBS", values.get("MINIBS"))
        if seqs and isinstance(sequences, int):
            yield sequences, min(seqs)


def _shape(folder: Path) -> Shape | None:
    """The size in the model's config; None if it is unreadable or of another kind."""
    try:
        return Shape.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, OverflowError):
        return None
