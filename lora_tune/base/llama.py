"""Llama shapes by name, with parameter and FLOP counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's size.

    layers: transformer blocks. hidden: width. ffn: width of the gated MLP. heads: query heads. kv_groups: key-value
    heads. vocab: rows of the embedding. rotary_base: base of the rotary frequencies. norm_eps: RMSNorm's epsilon.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_groups: int
    vocab: int = 32000
    rotary_base: int = 10000
    norm_eps: float = 1e-5

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The sizes in a Hugging Face ``config.json``.

        Raises KeyError, TypeError, ValueError or OverflowError if one is missing or not a positive number.
        """
        shape = cls(
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            ffn=int(config["intermediate_size"]),
            heads=int(config["num_attention_heads"]),
            kv_groups=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            vocab=int(config["vocab_size"]),
        )
        sizes = (shape.layers, shape.hidden, shape.ffn, shape.heads, shape.kv_groups, shape.vocab)
        if min(sizes) <= 0:
            raise ValueError(f"sizes {sizes}: allowed are positive ones")
        return shape

    @property
    def head(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Weights of the base model, including embedding and output layer."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_groups)
        block = attention + 3 * self.hidden * self.ffn + 2 * self.hidden
        return self.layers * block + 2 * self.vocab * self.hidden + self.hidden

    @property
    def is_benchmark(self) -> bool:
        """Whether this is the model of MLPerf's llama2_70b_lora."""
        return self.parameters == SHAPES["70b"].parameters

    def step_flops(self, tokens: int, seq: int) -> float:
        """Floating-point operations of a forward and backward pass over ``tokens`` tokens in sequences of ``seq``.

        Frozen matrices cost 2 operations per weight and token forward and 2 backward (no weight gradient); causal
        attention costs half of 4 * seq * width forward and 2.5 times that backward (it recomputes the scores).
        """
        matrices = self.parameters - self.vocab * self.hidden
        return tokens * (4.0 * matrices + 3.5 * 2.0 * seq * self.heads * self.head * self.layers)


SHAPES = {
    "tiny": Shape(layers=2, hidden=64, ffn=172, heads=4, kv_groups=2, vocab=256),
    "small": Shape(layers=8, hidden=512, ffn=1376, heads=8, kv_groups=4, vocab=256),
    "1b": Shape(layers=16, hidden=2048, ffn=8192, heads=32, kv_groups=8),
    "7b": Shape(layers=32, hidden=4096, ffn=11008, heads=32, kv_groups=32),
    "8b": Shape(layers=32, hidden=4096, ffn=14336, heads=32, kv_groups=8, vocab=128256, rotary_base=500000),
    "13b": Shape(layers=40, hidden=5120, ffn=13824, heads=40, kv_groups=40),
    "70b": Shape(layers=80, hidden=8192, ffn=28672, heads=64, kv_groups=8),
    "70b_slice8": Shape(layers=8, hidden=8192, ffn=28672, heads=64, kv_groups=8),
}
"""``LLAMA`` -> shape: 7b, 13b and 70b are Llama 2, 8b is Llama 3; ``70b_slice8`` is 8 of the 70B's 80 layers."""
