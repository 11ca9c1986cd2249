"""The distribution of a model over the processes: degrees of parallelism and batch."""

from __future__ import annotations

from dataclasses import dataclass

from lora_tune.base.errors import InputError
from lora_tune_recipes.knobs import Knobs
from lora_tune_recipes.megatron.shapes import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLayout:
    """Degrees of tensor, pipeline (virtual), context and data parallelism, and the batch.

    sp: sequence parallel. minibs: sequences per data-parallel rank and step. mbs: sequences per forward pass.
    """

    tp: int
    pp: int
    vp: int
    cp: int
    sp: bool
    dp: int
    minibs: int
    mbs: int

    @property
    def batch(self) -> int:
        """Global batch size: sequences per optimizer step."""
        return self.minibs * self.dp

    @property
    def accumulation(self) -> int:
        """Forward passes per optimizer step on each rank."""
        return self.minibs // self.mbs

    @property
    def turn(self) -> int:
        """The number of forward passes in a pipeline must be a multiple of this.

        Megatron-Core's interleaved schedule runs as many passes in a row through each chunk as there are stages.
        """
        return self.pp if self.vp > 1 else 1


def read_layout(knobs: Knobs, world: int) -> ProcessLayout:
    """The layout in the variables on ``world`` processes. Raises InputError if the degrees do not divide it."""
    tp, pp, cp = (knobs.integer(name, 1, low=1) for name in ("TP", "PP", "CP"))
    if world % (tp * pp * cp):
        raise InputError(f"TP={tp} PP={pp} CP={cp}: allowed is a product that divides the {world} processes")
    dp = world // (tp * pp * cp)
    default = 1
    if knobs.given("GLOBAL_BATCH_SIZE"):
        batch = knobs.integer("GLOBAL_BATCH_SIZE", dp, low=1)
        default = batch // dp
        if batch % dp or (knobs.given("MINIBS") and knobs.integer("MINIBS", 1, low=1) != default):
            raise InputError(
                f"GLOBAL_BATCH_SIZE={batch}: allowed is a multiple of the {dp} data-parallel ranks, and no other MINIBS"
            )
    minibs = knobs.integer("MINIBS", default, low=1)
    return ProcessLayout(
        tp=tp,
        pp=pp,
        vp=knobs.integer("VP", 1, low=1),
        cp=cp,
        sp=knobs.switch("SP", default=False),
        dp=dp,
        minibs=minibs,
        mbs=knobs.integer("MBS", 1, low=1, high=minibs),
    )


def check_layout(layout: ProcessLayout, shape: Shape, seq: int) -> None:
    """Raise InputError for the first rule of Megatron-Core that the layout breaks."""
    stages, shards = layout.pp * layout.vp, layout.tp * layout.cp
    rules = [
        (layout.minibs % layout.mbs, f"MBS={layout.mbs}", f"a divisor of MINIBS={layout.minibs}"),
        (shape.kv_groups % layout.tp, f"TP={layout.tp}", f"a divisor of the {shape.kv_groups} key-value heads"),
        (shape.vocab % layout.tp, f"TP={layout.tp}", f"a divisor of the {shape.vocab} rows of the vocabulary"),
        (shape.layers % stages, f"PP={layout.pp} VP={layout.vp}", f"a divisor of {shape.layers} layers"),
        (layout.vp > 1 and layout.pp == 1, f"VP={layout.vp}", "1 where PP is 1"),
        (layout.minibs % layout.mbs == 0 and layout.accumulation % layout.turn, f"VP={layout.vp}",
         f"1 unless MINIBS/MBS={layout.accumulation} is a multiple of PP={layout.pp}"),
        (layout.sp and layout.tp == 1, "SP=1", "0 where TP is 1"),
        (layout.cp > 1 and seq % (2 * layout.cp), f"SEQ={seq}", f"a multiple of 2*CP={2 * layout.cp}"),
        (layout.sp and seq % shards, f"SEQ={seq}", f"a multiple of TP*CP={shards} with SP=1"),
    ]  # fmt: skip
    for broken, what, allowed in rules:
        if broken:
            raise InputError(f"{what}: allowed is {allowed}")
