"""FSDP settings from environment variables."""

from __future__ import annotations

from dataclasses import dataclass

from lora_tune_recipes.knobs import Knobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """FSDP's distribution of the model: FSDP_STRATEGY, FSDP_WRAP, FSDP_SHARDS, FSDP_OFFLOAD."""

    strategy: str
    """``full_shard`` frees gathered weights after each use, ``shard_grad_op`` keeps them for the backward pass."""
    wrap: str
    """Unit of gathering: a ``layer``, a linear ``module``, or ``none`` for the whole model."""
    shards: int
    """Ranks that share one copy of the model, with further copies on the others (hybrid); 0: all ranks."""
    offload: bool
    """Keep shards, gradients and optimizer state in host memory."""


DEFAULT_SHARDING = Sharding(strategy="full_shard", wrap="layer", shards=0, offload=False)


def read(knobs: Knobs) -> Sharding:
    """The settings. Raises InputError also for one without effect (FSDP=0), which must not be tuned."""
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
