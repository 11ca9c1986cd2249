"""What a process is that the warm worker forks: the trial itself, or a spare that has rehearsed and waits for one.

Much of a small trial's start is the same every time: a GPU's context, the libraries' first kernels, code that is
compiled when it is first called. None of it passes to a forked process. A *spare* has it behind it: forked while
another trial starts, it calls the recipe's ``rehearse()`` under that trial's environment, and then waits for a trial
to become. What libraries read once must be the same for both, or the spare is of no use (``serves``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NoReturn

from lora_tune.base.host import send_signal
from lora_tune_recipes.hand_over import TrialRequest, receive, rehearsed_beside, send

PR_SET_PDEATHSIG = 1
BEGUN = b"b"
REHEARSAL_SECONDS = 60
"""A rehearsal that takes longer is ended: the trial beside it waits for it before its clock starts."""
IDLE_SECONDS = 60
"""A spare that no trial wants for so long ends, and its GPU is free."""
READ_ONCE = (
    *("CUDA", "CUBLAS", "CUDNN", "NVIDIA_", "NCCL_", "NVTE_", "NVSHMEM_", "UB_", "GLOO_", "UCX_"),
    *("TORCH_", "TORCHINDUCTOR_", "TORCHDYNAMO_", "PYTORCH_", "TRITON_", "OMP_", "MKL_", "KMP_"),
    *("LOCAL_RANK", "SLURM_LOCALID"),
)
"""Beginnings of the variables that a library may read at its first use, and of those that choose a rank's GPU."""


def read_once(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rehearsal may have settled."""
    return {name: value for name, value in environment.items() if name.startswith(READ_ONCE)}


def gpus(environment: Mapping[str, str]) -> frozenset[str]:
    """The GPUs that an environment allows; ``*`` stands for every one."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return frozenset("*")
    return frozenset(part.strip() for part in visible.split(",") if part.strip())


def overlap(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two environments allow the same GPU."""
    a, b = gpus(one), gpus(other)
    return bool(a & b or "*" in a | b)


def place(environment: Mapping[str, str]) -> tuple[frozenset[str], str]:
    """Where a process computes: the GPUs that it may see, and which of the job's processes on the node it is."""
    return gpus(environment), environment.get("LOCAL_RANK") or environment.get("SLURM_LOCALID") or "0"


@dataclass(slots=True)
class Spare:
    """A forked process that rehearses, or has, and waits. rehearsed: the trial under whose variables."""

    pid: int
    connection: socket.socket
    rehearsed: TrialRequest

    def serves(self, request: TrialRequest) -> bool:
        """Whether a trial may run in this process as if in a new one."""
        same = read_once(self.rehearsed.environment) == read_once(request.environment)
        return same and request.module == self.rehearsed.module

    def take(self, request: TrialRequest, files: list[int]) -> bool:
        """Give the spare its trial; False where it is dead. It may die before it begins: ``began`` says that later."""
        try:
            send(self.connection, request, files)
        except OSError:
            return False
        return True

    def began(self) -> bool:
        """Whether the process, which may have ended since, began the trial that it was given."""
        self.connection.setblocking(False)
        try:
            return self.connection.recv(1) == BEGUN
        except OSError:
            return False

    def end(self) -> None:
        """Kill it and wait: what it held of its GPU is free afterwards."""
        send_signal(self.pid, signal.SIGKILL, group=True)
        os.waitpid(self.pid, 0)
        self.connection.close()


class Spares:
    """The worker's spares, at most one for each place."""

    def __init__(self) -> None:
        self._held: list[Spare] = []

    def files(self) -> list[int]:
        """What a forked process must close."""
        return [spare.connection.fileno() for spare in self._held]

    def take(self, request: TrialRequest) -> Spare | None:
        """The spare that this trial may become; the caller has it from now on. Others on its GPUs are ended."""
        taken, where = None, place(request.environment)
        for spare in list(self._held):
            held = spare.rehearsed.environment
            if place(held) == where and spare.serves(request):
                taken = spare
            elif not (place(held) == where or (gpus(held) != where[0] and overlap(held, request.environment))):
                continue
            else:
                spare.end()
            self._held.remove(spare)
        return taken

    def fork(self, example: TrialRequest, close: Iterable[int]) -> int:
        """Fork a spare that rehearses as ``example`` begins; returns a pipe to whose end that can be read.

        close: open files of the worker that are not the spare's.
        """
        end_of_rehearsal, rehearsing = os.pipe()
        own, connection = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            leave_worker([*close, *self.files(), own.fileno(), end_of_rehearsal])
            wait_as_spare(connection, rehearsing, example)
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        os.close(rehearsing)
        connection.close()
        self._held.append(Spare(pid, own, example))
        return end_of_rehearsal

    def reap(self) -> None:
        """Forget the spares that have ended."""
        for spare in list(self._held):
            if os.waitpid(spare.pid, os.WNOHANG)[0]:
                send_signal(spare.pid, signal.SIGKILL, group=True)
                spare.connection.close()
                self._held.remove(spare)

    def end(self) -> None:
        """Kill them all."""
        while self._held:
            self._held.pop().end()


def leave_worker(close: Iterable[int]) -> None:
    """In a forked process: a group of its own that dies with the worker, without the worker's signals and files."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    for file in close:
        os.close(file)


def become(request: TrialRequest, files: list[int]) -> NoReturn:
    """Take on the job's environment, folder and output, run the recipe, and end. files: as of ``hand_over.FILES``."""
    for target, file in zip((1, 2), files, strict=False):
        os.dup2(file, target)
        os.close(file)
    for file in files[2:]:
        rehearsed_beside(file)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.cwd)
        code = int(importlib.import_module(request.module).main())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - nothing may escape into the worker's own code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_as_spare(connection: socket.socket, pipe: int, example: TrialRequest) -> NoReturn:
    """Rehearse as ``example`` would begin, close ``pipe``, wait for a trial and become it; end where none comes."""
    code = 1
    try:
        signal.alarm(REHEARSAL_SECONDS)
        os.environ.clear()
        os.environ.update(example.environment)
        os.chdir(example.cwd)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        rehearse = getattr(importlib.import_module(example.module), "rehearse", None)
        if rehearse is None:
            os._exit(0)
        rehearse()
        gc.freeze()  # as the worker's: what a rehearsal left is there for good
        sys.stdout.flush()
        signal.alarm(0)
        os.close(pipe)
        if not select.select([connection], [], [], IDLE_SECONDS)[0]:
            os._exit(0)
        request, files = receive(connection)
        connection.sendall(BEGUN)
        connection.close()
        become(request, files)
    except Exception as error:  # noqa: BLE001 - nothing may escape into the worker's own code
        print(f"warm worker: no spare: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(code)
