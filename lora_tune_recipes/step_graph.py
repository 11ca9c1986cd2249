"""Work on batches of one shape, recorded once as a CUDA graph; a replay launches no kernel from Python.

Small steps are bound by kernel launches (135 M parameters, 8 x 512 tokens: 3 ms of arithmetic in a step of 115 ms). A
graph runs the same kernels in the same order, so its losses equal those of the eager step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from lora_tune_recipes.settings import Settings

Inputs = TypeVar("Inputs", bound=tuple[torch.Tensor, ...])
"""A named tuple of tensors on the device."""
WARM_UP_STEPS = 2
"""The first allocates and selects kernels, the second shows caches and compilers the steady path."""


def why_eager(settings: Settings, device: str, world: int) -> str:
    """Why steps of these settings cannot be a graph; "" if they can.

    device: type of the device, such as ``cuda``. world: processes of the run.
    """
    reasons = {
        "it needs a CUDA GPU": device != "cuda",
        "it records one process, not several": world > 1,
        "the kernels of 4-bit weights are not recorded": bool(settings.load_in_4bit),
        "recomputation reads the state of the random numbers, which no graph may": settings.recompute,
        "PACKING=1 finds where samples begin on the host": settings.packing,
        f"ATTN={settings.attn} makes masks on the host": settings.attn != "sdpa",
        "it is recorded in the warm-up": not settings.warmup,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


CAUSAL = "causal_sdpa"
"""sdpa for whole sequences without padding; transformers builds no mask for this name. With ``sdpa`` it inspects the
mask's values on the host, and during a recording it builds another, slower mask."""
AttentionInterface.register(CAUSAL, sdpa_attention_forward)


def is_plainly_causal(config: Any, seq: int) -> bool:
    """Whether each of ``seq`` tokens attends to all before it, in every layer of a model of this config."""
    text = config.get_text_config()
    spans = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    return all(span is None or span >= seq for span in spans) and set(
        getattr(text, "layer_types", None) or ["full_attention"]
    ) <= {"full_attention", "sliding_attention"}


def compile_layers(model: torch.nn.Module, base: Any) -> None:
    """Compile every layer of ``model`` in place; layers of one kind share a program.

    base: its class names the layer modules. Programs are of fixed shape: on an H100 a dynamic one took 100 s instead of
    18 to compile, and ran a tenth slower.
    """
    kinds = frozenset(base._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in kinds:
            module.compile(dynamic=False)
    # Without this, the first layer's input has no gradient and needs a second program for each shape.
    base.get_input_embeddings().register_forward_hook(lambda *call: call[-1].requires_grad_(torch.is_grad_enabled()))


class StepGraph(Generic[Inputs]):
    """``work``, recorded on inputs of the shapes of ``example``; each replay repeats its side effects."""

    def __init__(self, work: Callable[[Inputs], torch.Tensor], example: Inputs, pool: Any) -> None:
        """Runs ``work`` before recording it; the caller must undo its side effects.

        pool: of ``torch.cuda.graph_pool_handle``. Graphs that are never replayed concurrently may share it.
        """
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in example]
        self._inputs: Inputs = type(example)(*copies)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                work(self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        # The cached memory of these runs would be unusable next to the graph's own.
        torch.cuda.empty_cache()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = work(self._inputs)

    def fits(self, inputs: Inputs) -> bool:
        """Whether ``inputs`` have the recorded shapes."""
        return all(own.shape == new.shape for own, new in zip(self._inputs, inputs, strict=True))

    def replay(self, inputs: Inputs) -> torch.Tensor:
        """The result of ``work`` for ``inputs``, as a copy that the caller may keep."""
        for recorded, new in zip(self._inputs, inputs, strict=True):
            recorded.copy_(new)
        self._graph.replay()
        return self._result.clone()


HOST_SHORT = "DefaultCPUAllocator: can't allocate memory"
"""torch's message when the host is out of memory."""


def short_of_memory(error: BaseException | None) -> bool:
    """Whether the device or the host was out of memory, by this error or one in its context."""
    while error is not None:
        # torch reports a lack of host memory as a plain RuntimeError.
        host = isinstance(error, RuntimeError) and HOST_SHORT in str(error)
        if host or isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        error = error.__context__
    return False
