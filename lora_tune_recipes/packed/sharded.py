"""A frozen base that does not fit one GPU: FSDP2 lays its layers over the packs of a job, which stay in lockstep.

Each pack trains its own trials on its own data: what a trial computes depends on nobody else, for the gathered weights
are the same to the bit as a whole base's. Embeddings, output layer and what else is in no layer are whole in each pack.

Before a pass each says what it wants, and all do the greatest of that: a pack whose wish it is makes its own pass,
every other one the shortest pass of that kind, so that the base's weights can be gathered from all of them. So packs
need not have the same trials, lengths or numbers of passes. A round is over for all when none wants a pass any more.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch.distributed.device_mesh import init_device_mesh

from lora_tune.base.errors import InputError, SetupError
from lora_tune_recipes.packed.base import Meeting, PackedBase, check_process
from lora_tune_recipes.packed.frozen import fuse_norms
from lora_tune_recipes.packed.job import JobPack
from lora_tune_recipes.settings import Settings

SILENCE = timedelta(minutes=30)
"""How long a pack waits for the others: one may read data or measure a trial meanwhile."""
NOTHING, EVALUATION, TRAINING = range(3)
"""What a pack wants. Above these come the same of a pack that measures a trial alone, by its number."""


class PassLost(BaseException):
    """A pass failed half way, so the packs are out of step and none can follow. ``__cause__`` says why.

    No Exception: a trial's fault ends that trial, and this is none. own: this pack itself failed, no other one.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(" ".join(str(error).split()))
        self.own = not _of_another(error)


def _of_another(error: BaseException) -> bool:
    """Whether ``error`` tells that another process is gone: gloo's are any RuntimeError."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class Lockstep:
    """Pack ``rank`` of ``world``, which meet at the file ``store``.

    accompany: makes the shortest pass, with a backward pass where its argument is true.
    """

    def __init__(self, rank: int, world: int, store: Path, accompany: Callable[[bool], None]) -> None:
        self._rank, self._accompany, self._measures = rank, accompany, False
        # All packs of a job are on one node.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        where = store.resolve().as_uri()
        with _in_step():
            dist.init_process_group(backend, init_method=where, rank=rank, world_size=world, timeout=SILENCE)

    @contextlib.contextmanager
    def turn(self, *, training: bool) -> Iterator[None]:
        """Wait for this pack's turn; the pass belongs inside. Raises PassLost where a pass fails, of any pack."""
        mine = TRAINING if training else EVALUATION
        if self._measures:
            mine += TRAINING * (1 + self._rank)
        with _in_step():
            while (now := self._agree(mine)[0]) != mine:
                self._join(now)
            yield

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """In it this pack's passes come before all others'; packs that measure at once follow each other."""
        self._measures = True
        try:
            yield
        finally:
            self._measures = False

    def meet(self, *, ending: bool) -> Meeting:
        """Join in the passes of the others until none wants one. Raises PassLost."""
        passes = False
        with _in_step():
            while (agreed := self._agree(NOTHING, ending=ending))[0] != NOTHING:
                passes = True
                self._join(agreed[0])
        return Meeting(passes, agreed[1])

    def any(self, own: bool) -> bool:
        """Whether any pack says so; all of them ask. Raises PassLost."""
        with _in_step():
            return self._agree(NOTHING, ending=own)[1]

    def _join(self, wish: int) -> None:
        self._accompany(wish % TRAINING == 0)

    def _agree(self, wish: int, *, ending: bool = False) -> tuple[int, bool]:
        """The greatest wish of all packs, and whether any of them is to end."""
        wishes = torch.tensor([wish, int(ending)])
        dist.all_reduce(wishes, op=dist.ReduceOp.MAX)
        greatest, ends = wishes.tolist()
        return greatest, bool(ends)


@contextlib.contextmanager
def _in_step() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise PassLost(error) from error


class ShardedBase(PackedBase):
    """A base of which this pack holds a part. All packs of the job make theirs at the same time.

    Raises InputError and SetupError as PackedBase does, and for what cannot be sharded.
    """

    recovers = False

    def __init__(self, settings: Settings, together: JobPack) -> None:
        _refuse(settings)
        self._lockstep = Lockstep(together.rank, together.world, together.store, self._accompany)
        self._world = together.world
        super().__init__(settings)
        self.model.get_input_embeddings().register_forward_hook(_learn)

    def _placed(self, load: Callable[[], Any]) -> Any:
        model = self._loaded(load)
        if self.device.type == "cuda":
            fuse_norms(model)  # before its weights are in parts
        mesh = init_device_mesh(self.device.type, (self._world,))
        layers = _layers(model)
        whole = set(model.parameters()) - {parameter for layer in layers for parameter in layer.parameters()}
        for layer in layers:
            torch.distributed.fsdp.fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        # Packs call the decoder and the output layer apart from each other: so the decoder is FSDP's root.
        torch.distributed.fsdp.fully_shard(model.get_decoder(), mesh=mesh, ignored_params=whole)
        return model.to(self.device)

    def _loaded(self, load: Callable[[], Any]) -> Any:
        """The model in the host's memory. Raises in every pack where it cannot be loaded in one."""
        model, failure = None, None
        try:
            model = load()
        except Exception as error:  # noqa: BLE001 - the others wait to hear of it, whatever it was
            failure = error
        if self._lockstep.any(failure is not None):
            where = f"MODEL={str(self.settings.model)!r}"
            # No refusal: what is wrong with the model itself, every pack finds.
            raise failure or RuntimeError(f"{where}: another pack of this job cannot load it; its log says why")
        return model

    def why_not_recorded(self, settings: Settings) -> str:
        return "packs that share a base make their passes in step"

    def check(self, settings: Settings) -> None:
        check_process(settings)
        self._check_shared(settings)
        if not settings.fsdp:
            raise InputError("FSDP=0: the packs of this job share their base, as its first trial asked; allowed is 1")
        _refuse(settings)
        for name in ("dora", "modules_to_save"):
            if setting := getattr(settings.adapters, name):
                value = ",".join(setting) if isinstance(setting, tuple) else int(setting)
                raise InputError(
                    f"{name.upper()}={value}: it reads whole weights, of which a pack with FSDP=1 holds parts; leave "
                    "it unset, or take FSDP out"
                )

    def turn(self, *, training: bool) -> AbstractContextManager[None]:
        return self._lockstep.turn(training=training)

    def measuring(self) -> AbstractContextManager[None]:
        return self._lockstep.measuring()

    def meet(self, *, ending: bool) -> Meeting:
        return self._lockstep.meet(ending=ending)

    def _accompany(self, training: bool) -> None:
        """The shortest pass, beside another pack's; this one may just have been about to evaluate."""
        with torch.set_grad_enabled(training):
            hidden = self.model.get_decoder()(input_ids=self._probe(), use_cache=False).last_hidden_state
            if training:
                hidden.sum().backward()


def _learn(_module: Any, _read: Any, embedded: torch.Tensor) -> None:
    """Let gradients reach the embeddings in every pack: else the layers that a backward pass gathers would differ."""
    if torch.is_grad_enabled():
        embedded.requires_grad_()


def _layers(model: Any) -> list[Any]:
    """The modules that are gathered by themselves. Raises InputError for a model whose layers are not known.

    They follow each other. Within one the order of a backward pass depends on the adapters, which packs do not share.
    """
    names = set(model._no_split_modules or ())
    layers = [module for module in model.get_decoder().modules() if type(module).__name__ in names]
    if not layers:
        raise InputError(f"FSDP=1: {type(model).__name__} does not tell what its layers are; allowed is 0")
    return layers


def _refuse(settings: Settings) -> None:
    """Raise for a base that cannot be sharded over packs."""
    if settings.load_in_4bit:
        raise InputError(
            f"LOAD_IN_4BIT={settings.load_in_4bit!r}: bitsandbytes' weights cannot be sharded here; allowed is FSDP=0, "
            "or LOAD_IN_4BIT unset"
        )
    sharding = settings.sharding
    for name, value, allowed in (
        ("FSDP_STRATEGY", sharding.strategy, ("full_shard",)),
        ("FSDP_WRAP", sharding.wrap, ("layer",)),
        ("FSDP_SHARDS", sharding.shards, (0,)),
        ("FSDP_OFFLOAD", int(sharding.offload), (0,)),
    ):
        if value not in allowed:
            raise InputError(f"{name}={value}: allowed in packs is {' or '.join(map(str, allowed))}")
    shard = getattr(torch.distributed.fsdp, "fully_shard", None)
    if shard is None or "ignored_params" not in inspect.signature(shard).parameters:
        raise SetupError(f"FSDP=1: torch {torch.__version__} is here; packs need torch 2.8 or later")
