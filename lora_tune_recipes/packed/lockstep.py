"""The packs of a job that share one base: each holds a part of its weights, so all make every pass at the same time.

Before a pass each says what it wants, and all do the greatest of that: a pack whose wish it is makes its own pass,
every other one the shortest pass of that kind, so that the base's weights can be gathered from all of them. So packs
need not have the same trials, lengths or numbers of passes. A round is over for all when none wants a pass any more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lora_tune_recipes.packed.base import Meeting

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
