"""How FSDP shards, from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from lora_tune_recipes.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How FSDP lays the model over the ranks: FSDP_STRATEGY, FSDP_WRAP, FSDP_SHARDS, FSDP_OFFLOAD."""

    strategy: str
    """``full_shard`` frees a layer's gathered weights after each use, ``shard_grad_op`` keeps them for the backward."""
    wrap: str
    """What is gathered at a time: a ``layer``, a linear ``module``, or ``none``: the whole model at once."""
    shards: int
    """Ranks that share one copy of the model, the others having copies of their own (hybrid); 0: all ranks."""
    offload: bool
    """Shards, gradients and optimizer lie in the host's memory."""


DEFAULT_SHARDING = Sharding(strategy="full_shard", wrap="layer", shards=0, offload=False)


def read(knobs: Knobs) -> Sharding:
    """Raises InputError, too, for what has no effect without FSDP=1: such a knob must not be tuned."""
    sharding = Sharding(
        strategy=knobs.choice("FSDP_STRATEGY", ("full_shard", "shard_grad_op")),
        wrap=knobs.choice("FSDP_WRAP", ("layer", "module", "none")),
        shards=knobs.integer("FSDP_SHARDS", 0, low=0),
        offload=knobs.switch("FSDP_OFFLOAD", default=False),
    )
    if not knobs.switch("FSDP", default=False):
        for name in ("FSDP_STRATEGY", "FSDP_WRAP", "FSDP_SHARDS"):
            if knobs.given(name):
                raise knobs.refusal(name, "nothing where FSDP=0: it says how FSDP=1 shards")
        if sharding.offload:
            raise knobs.refusal("FSDP_OFFLOAD", "0 where FSDP=0")
    return sharding
