"""The frozen model shared by all slots of a pack, and their data."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from lora_tune.base.errors import InputError
from lora_tune_recipes import text
from lora_tune_recipes.batch import Batch, weighted_losses
from lora_tune_recipes.lora_model import (
    check_modules_to_save,
    check_positions,
    leaf_names,
    linear_names,
    load_base,
    target_names,
    tokenizer,
)
from lora_tune_recipes.packed.frozen import FrozenHeadLoss, chunk_losses, fuse_norms
from lora_tune_recipes.packed.group import Module
from lora_tune_recipes.packed.job import OF_BASE
from lora_tune_recipes.packed.layers import PackedEmbedding, PackedLayer, PackedLinear, Part
from lora_tune_recipes.packed.slot import Texts
from lora_tune_recipes.settings import AdapterSettings, Settings
from lora_tune_recipes.step_graph import CAUSAL, Inputs, StepGraph, compile_layers, is_plainly_causal, why_eager


def check_packable(settings: Settings) -> None:
    """Raise InputError for a trial that needs several processes, or one-row passes."""
    for name, one in (("tp", 1), ("cp", 1), ("fsdp", 0)):
        if (value := int(getattr(settings, name))) > one:
            raise InputError(f"{name.upper()}={value}: a trial in a pack has one process; allowed is {one}")
    if settings.packing and settings.attn == "flash_attention_2":
        raise InputError(
            "PACKING=1: in a pack not with ATTN=flash_attention_2, which wants passes of one row; use sdpa"
        )


def refuse_own_dropout(model: Any, settings: Settings) -> None:
    """Raise InputError for a base with dropout under recomputation: results would depend on the other slots."""
    rates = {type(m).__name__: m.p for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p}
    attention = getattr(model.config, "attention_dropout", 0.0)
    if settings.recompute and (rates or attention):
        raise InputError(
            f"MODEL={str(settings.model)!r}: the base has dropout of its own, which a pack with "
            "RECOMPUTE_GRANULARITY=full cannot leave out; allowed is a base without"
        )


class PackedBase:
    """The model of ``settings.model`` on this process's device, frozen.

    Linear layers and input embeddings can take adapters; any module without children can be trained whole.

    records: whether passes can be recorded. Raises InputError if the model cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        torch.set_num_threads(settings.threads)
        self.settings = settings
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.device_name = torch.cuda.get_device_name() if self.device.type == "cuda" else ""
        self.model = load_base(settings).requires_grad_(False).to(self.device)
        if self.device.type == "cuda":
            fuse_norms(self.model)
        refuse_own_dropout(self.model, settings)
        if settings.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train(settings.recompute)
        self._tokenize = tokenizer(settings.model)
        self._texts: dict[tuple[object, ...], Texts] = {}
        self._layers, self._leaves = _adaptable(self.model), leaf_names(self.model)
        self._packed: dict[str, PackedLayer] = {}
        self._head = self._frozen_head()
        self._head_name = _name_of(self.model, self.model.get_output_embeddings())
        self._attention, self._chunk = settings.attn, chunk_losses
        self.records = not self.why_not_recorded(settings)
        self._graphs: weakref.WeakSet[StepGraph[Any]] = weakref.WeakSet()
        self._graph_pool: Any = None
        if settings.torch_compile and self.records:
            # One program per shape of layer, adapter and rows in a pack, for training and evaluation.
            torch._dynamo.config.recompile_limit = 128
            compile_layers(self.model, self.model)
            self._chunk = torch.compile(chunk_losses, dynamic=False)

    @property
    def layers(self) -> int:
        """Number of distinct layer numbers."""
        return len(self._layers) + 1

    def why_not_recorded(self, settings: Settings) -> str:
        """Why passes of trials of these settings are not recorded; "" if they are."""
        adapters = settings.adapters
        reasons = {
            "CUDA_GRAPH=0 stands in the way": settings.cuda_graph == "0",
            "DORA, MODULES_TO_SAVE and adapters of embeddings are not recorded": adapters.dora
            or bool(adapters.modules_to_save)
            or "embed_tokens" in adapters.targets,
            "layers of this model attend to a part of the sequence": not is_plainly_causal(
                self.model.config, settings.seq
            ),
        }
        why = why_eager(replace(settings, warmup=True), self.device.type, 1)
        return why or next((reason for reason, holds in reasons.items() if holds), "")

    def check(self, settings: Settings) -> None:
        """Raise InputError for a trial that does not fit this base, or that no pack can train."""
        check_packable(settings)
        for variable, name in OF_BASE.items():
            if getattr(settings, name) != getattr(self.settings, name):
                raise InputError(
                    f"{variable}={getattr(settings, name)!s}: this pack has "
                    f"{getattr(self.settings, name) or 'nothing'!s}; trials of one pack share it: fix it in [space], "
                    "or take site.slots out"
                )
        check_positions(self.model.config, settings)
        asked = {"TORCH_COMPILE": settings.torch_compile, "CUDA_GRAPH": settings.cuda_graph == "1"}
        why = self.why_not_recorded(settings)
        for name, wants in asked.items():
            if wants and why:
                raise InputError(f"{name}=1: a pack does that with passes that it records, and {why}; allowed is 0")

    def texts(self, settings: Settings) -> Texts:
        """A trial's data, read once. Raises InputError if it cannot be used."""
        key = settings.datadir, settings.seq, settings.eval_samples, settings.packing
        if key not in self._texts:
            where, seq = settings.datadir, settings.seq
            train = text.load(where, "train", seq, self._tokenize, pack=settings.packing)
            validation = text.load(where, "validation", seq, self._tokenize)
            if settings.eval_samples:
                validation = validation.spread(settings.eval_samples)
            text.check(train, validation, self.model.config.get_text_config().vocab_size, settings.datadir)
            self._texts[key] = Texts(train, validation)
        return self._texts[key]

    def modules(self, settings: Settings) -> dict[str, Module]:
        """The modules that the trial adapts, made ready for adapters."""
        modules = {}
        for name in target_names(list(self._layers), settings.adapters.targets):
            layer = self._ready(name)
            norms = layer.norms() if settings.adapters.dora else None
            modules[name] = Module(layer.width_in, layer.width_out, isinstance(layer, PackedEmbedding), norms)
        return modules

    def whole(self, settings: Settings) -> dict[str, dict[str, torch.Tensor]]:
        """The modules that the trial trains whole, with their frozen parameters, made ready for copies.

        Raises InputError for a module that the model lacks, or with quantized parameters.
        """
        check_modules_to_save(self._leaves, settings)
        whole = {}
        # As in peft, which matches ends of names: "norm" also matches every input_layernorm.
        for name in [name for name in self._leaves if name.endswith(settings.adapters.modules_to_save)]:
            module = self._packed[name].base if name in self._packed else self.model.get_submodule(name)
            parameters = dict(module.named_parameters())
            if not all(parameter.is_floating_point() for parameter in parameters.values()):
                raise InputError(f"MODULES_TO_SAVE: {name} has weights of 4 bits; allowed are modules that have none")
            if parameters:
                self._ready(name)
                whole[name] = parameters
        return whole

    def _ready(self, name: str) -> PackedLayer:
        """The module of this name, wrapped for adapters and copies of its parameters."""
        if name not in self._packed:
            owner, _, child = name.rpartition(".")
            adaptable = list(self._layers)
            # The number seeds its dropout: the position in the model, independent of what was adapted before.
            number = adaptable.index(name) if name in adaptable else len(adaptable)
            kind = self._layers.get(name, PackedLayer)
            layer = kind(self.model.get_submodule(name), name, number)
            setattr(self.model.get_submodule(owner), child, layer)
            self._packed[name] = layer
        return self._packed[name]

    def makes_logits(self, adapters: AdapterSettings) -> bool:
        """Whether a pass with such adapters materializes all logits at once, which takes memory."""
        own = self._head_name.rpartition(".")[2] in adapters.targets
        return self._head is None or own or self._head_name.endswith(adapters.modules_to_save)

    @contextlib.contextmanager
    def through(self, parts: Sequence[Part], *, compiled: bool = False) -> Iterator[None]:
        """Apply the adapters of ``parts`` in a pass and its backward pass, which may recompute.

        compiled: use compiled layers, if the base has them; else eager ones.
        """
        eager = self.settings.torch_compile and not compiled
        stance = torch.compiler.set_stance("force_eager") if eager else contextlib.nullcontext()
        with stance:
            for layer in self._packed.values():
                layer.shares = tuple(part.share(layer.name, layer.number) for part in parts)
            try:
                yield
            finally:
                for layer in self._packed.values():
                    layer.shares = ()

    def losses(self, batch: Batch, *, whole_logits: bool, packing: bool = False) -> torch.Tensor:
        """The mean loss of each sequence [n], slot by slot, in the order of the parts of :meth:`through`.

        whole_logits: see :meth:`makes_logits`. packing: rows hold several samples, delimited by their positions.
        """
        self._attend(CAUSAL if self.records and not packing else self.settings.attn)
        positions = {"position_ids": batch.position} if packing else {}
        if whole_logits or self._head is None:
            logits = self.model(input_ids=batch.read, use_cache=False, **positions).logits
            return weighted_losses(logits, batch.predict, batch.weight).sum(1)
        hidden = self.model.get_decoder()(input_ids=batch.read, use_cache=False, **positions).last_hidden_state
        flat = hidden.flatten(0, 1), *self._head, batch.predict.flatten(), batch.weight.flatten()
        losses: torch.Tensor = FrozenHeadLoss.apply(*flat, self._chunk)
        return losses.view_as(batch.weight).sum(1)

    def record(self, work: Callable[[Inputs], torch.Tensor], example: Inputs) -> StepGraph[Inputs]:
        """A graph of ``work``; all graphs of this base share a memory pool. Raises as StepGraph does."""
        if not self._graphs:  # a pool is freed with its last graph
            self._graph_pool = torch.cuda.graph_pool_handle()
        graph = StepGraph(work, example, self._graph_pool)
        self._graphs.add(graph)
        return graph

    def _attend(self, implementation: str) -> None:
        if implementation != self._attention:
            self.model.set_attn_implementation(implementation)
            self._attention = implementation

    @torch.no_grad()
    def works(self) -> bool:
        """Whether the base alone still computes; after a device fault it does not."""
        try:
            with self.through(()):
                self.model(input_ids=self._probe(), use_cache=False).logits.sum().item()
        except RuntimeError:
            return False
        return True

    def _probe(self) -> torch.Tensor:
        """Input of a short test pass."""
        return torch.arange(4, device=self.device)[None]

    @torch.no_grad()
    def _frozen_head(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias of the output layer if logits are only its product with the hidden states; else None.

        Some models scale or cap their logits: then the loss uses the model's own forward pass.
        """
        head = self.model.get_output_embeddings()
        if head is None or not isinstance(head, torch.nn.Linear):
            return None
        probe = self._probe()
        hidden = self.model.get_decoder()(input_ids=probe, use_cache=False).last_hidden_state
        same = torch.equal(head(hidden), self.model(input_ids=probe, use_cache=False).logits)
        return (head.weight, head.bias) if same else None


def _adaptable(model: Any) -> dict[str, type[PackedLayer]]:
    """The layers that can take adapters, by name, in the model's order.

    Of embeddings only plain token embeddings, because some families scale theirs.
    """
    tokens = model.get_input_embeddings()
    linear = set(linear_names(model))
    layers: dict[str, type[PackedLayer]] = {}
    for name, module in model.named_modules():
        if name in linear:
            layers[name] = PackedLinear
        elif module is tokens and type(module) is torch.nn.Embedding:
            layers[name] = PackedEmbedding
    return layers


def _name_of(model: Any, searched: Any) -> str:
    """The full name of a module of the model; "" for None."""
    return next((name for name, module in model.named_modules() if module is searched), "")
