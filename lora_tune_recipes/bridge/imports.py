"""Makes ``megatron.bridge`` importable without packages that it imports but a LoRA run never calls.

Megatron-Bridge 0.3 imports modelopt, nvidia-resiliency-ext, Hugging Face's datasets, Triton and Transformer Engine.
``prepare`` replaces those not installed by modules of empty classes; calling one raises. The arithmetic is unchanged.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

OPTIONAL = ("modelopt", "nvidia_resiliency_ext", "datasets", "megatron.energon")
"""Packages that a trial does not need."""
TRITON = (
    "megatron.core.inference.contexts.attention_context.triton",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.ssm.triton_cache_manager",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Megatron-Core's modules of Triton kernels. Triton itself gets no stand-in, as torch and transformers look for it."""


class _Empty(type):
    """A class that replaces a name of a missing package."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _empty(f"{cls.__qualname__}.{name}")

    def __call__(cls, *_: object, **__: object) -> object:
        raise RuntimeError(f"{cls.__qualname__} was called, but its package is not installed")


def _empty(name: str) -> type:
    return _Empty(name.rpartition(".")[2], (), {"__qualname__": name, "__module__": __name__})


class StandIn(ModuleType):
    """A module of empty classes."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        whole = f"{self.__name__}.{name}"
        value = sys.modules.get(whole) or _empty(whole)
        setattr(self, name, value)
        return value


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that serves ``names`` and their submodules, until ``remove``."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self._names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: ``StandIn`` creates its names on access."""

    def remove(self) -> None:
        """Uninstall the hook and its modules, which then count as absent."""
        sys.meta_path.remove(self)
        for name in [n for n, m in sys.modules.items() if isinstance(m, StandIn) and m.__loader__ is self]:
            del sys.modules[name]


def present(name: str) -> bool:
    """Whether a package is really installed."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the parent package is absent
        return False
    return spec is not None and not isinstance(spec.loader, StandIns)


def prepare() -> None:
    """Make ``megatron.bridge`` importable in this process. A second call changes nothing."""
    if any(isinstance(finder, StandIns) for finder in sys.meta_path):
        return
    if not present("triton"):
        StandIns(TRITON)
    # Newer Megatron-Core checks the version of nvidia-resiliency-ext if it finds one, so import it before the stand-in.
    importlib.import_module("megatron.core.dist_checkpointing")
    StandIns(name for name in OPTIONAL if not present(name))
    if not present("transformer_engine"):
        _without_transformer_engine()
    _without_what_is_absent()


def _without_transformer_engine() -> None:
    """Bridge's LoRA uses ``te.Linear`` unconditionally, while Megatron-Core checks for Transformer Engine.

    So import every module of Megatron-Core without it first, then use a stand-in for that one import.
    """
    core = importlib.import_module("megatron.core")
    root = Path(core.__path__[0])
    for file in sorted(root.rglob("*.py")):
        if "transformer_engine" in file.read_text(encoding="utf-8"):
            parts = ("megatron", "core", *file.relative_to(root).with_suffix("").parts)
            importlib.import_module(".".join(parts).removesuffix(".__init__"))
    engine = StandIns(["transformer_engine"])
    importlib.import_module("megatron.bridge.peft.lora")
    engine.remove()
    # Megatron-Core's module of layers imports without Transformer Engine, with None for the classes.
    for name in ("utils", "module_matcher"):
        module: Any = importlib.import_module(f"megatron.bridge.peft.{name}")
        module.HAVE_TE = False


def _without_what_is_absent() -> None:
    """Remove calls that a LoRA run does not need and that fail if a package is absent."""
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    # It runs make, which ends the process if there is no Makefile, as in pip's package; the wheel has the result.
    initialize.compile_helpers = lambda: None
    if present("modelopt"):
        return
    checkpointing: Any = importlib.import_module("megatron.bridge.training.checkpointing")
    for name in ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"):
        setattr(checkpointing, name, lambda *_, **__: None)
    train: Any = importlib.import_module("megatron.bridge.training.train")
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
