"""Makes ``megatron.bridge`` importable where packages are missing that it imports and a LoRA run never calls.

Megatron-Bridge 0.3 names modelopt, nvidia-resiliency-ext, Hugging Face's datasets, Triton and Transformer Engine when
its modules are loaded. ``prepare`` answers the absent ones with modules of empty classes: what is installed wins, and a
call into a stand-in raises. No arithmetic is touched.
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
"""Packages without which a trial trains."""
TRITON = (
    "megatron.core.inference.contexts.attention_context.triton",
    "megatron.core.inference.contexts.fused_kv_append_kernel",
    "megatron.core.ssm.triton_cache_manager",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
)
"""Megatron-Core's modules of Triton kernels. Triton itself stays absent: torch and transformers look for it."""


class _Empty(type):
    """A class that stands for a name of a package that is not there."""

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
    """Answers the import of ``names`` and of what lies below them, until ``remove``."""

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
        """Nothing to run: ``StandIn`` makes its names as they are asked for."""

    def remove(self) -> None:
        """Forget the modules as well: they count as absent from here on."""
        sys.meta_path.remove(self)
        for name in [n for n, m in sys.modules.items() if isinstance(m, StandIn) and m.__loader__ is self]:
            del sys.modules[name]


def present(name: str) -> bool:
    """Whether a package is really installed."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the package above it is absent
        return False
    return spec is not None and not isinstance(spec.loader, StandIns)


def prepare() -> None:
    """Make ``megatron.bridge`` importable in this process. A second call changes nothing."""
    if any(isinstance(finder, StandIns) for finder in sys.meta_path):
        return
    if not present("triton"):
        StandIns(TRITON)
    # Newer versions of it insist on a version of nvidia-resiliency-ext where they find one.
    importlib.import_module("megatron.core.dist_checkpointing")
    StandIns(name for name in OPTIONAL if not present(name))
    if not present("transformer_engine"):
        _without_transformer_engine()
    _without_what_is_absent()


def _without_transformer_engine() -> None:
    """Bridge's LoRA names ``te.Linear`` unguarded, while Megatron-Core asks before it uses Transformer Engine.

    So every module of Megatron-Core learns first that it is absent; only then is there a stand-in, for one import.
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
    """Take out the calls that a LoRA run does not need and that fail where a package is absent."""
    initialize: Any = importlib.import_module("megatron.bridge.training.initialize")
    # Runs make where pip's package has no Makefile, and ends the process; the wheel holds what it would build.
    initialize.compile_helpers = lambda: None
    if present("modelopt"):
        return
    checkpointing: Any = importlib.import_module("megatron.bridge.training.checkpointing")
    for name in ("restore_modelopt_state", "save_modelopt_state", "save_sharded_modelopt_state"):
        setattr(checkpointing, name, lambda *_, **__: None)
    train: Any = importlib.import_module("megatron.bridge.training.train")
    train.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
