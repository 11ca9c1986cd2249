"""A process that has imported everything, and forks one trial after another.

Importing NeMo takes 25 to 35 seconds, which a short trial should not pay each time. Start one worker on each node:

    python -m lora_tune_recipes.warm_worker --socket /tmp/worker.sock lora_tune_recipes.nemo.trial &
    export LORA_TUNE_WORKER=/tmp/worker.sock

A recipe that finds ``LORA_TUNE_WORKER`` sends its environment, working folder and open output to the worker, which
forks, adopts them and runs the recipe's ``main``. The recipe's own process stays as the scheduler's job, forwards
signals, and exits with the trial's exit code; if it is killed, the trial is killed. Every trial starts from the state
just after the imports. A crash of a trial does not affect the worker.

Trials of different jobs never share a GPU (``CUDA_VISIBLE_DEVICES``): the later one waits. The ranks of one job run
together. Variables that libraries read at import time have the worker's values.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import inspect
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lora_tune.base.errors import LoraTuneError, SetupError
from lora_tune.base.host import send_signal
from lora_tune_recipes.worker_request import HEADER, TrialRequest, receive

PR_SET_PDEATHSIG = 1
LAST_SECONDS = 5.0
"""Idle limit after SIGUSR1, for a trial whose job has just started."""


@dataclass(slots=True)
class WorkerTrial:
    """One request: ``pid`` is 0 while it waits for its GPUs."""

    connection: socket.socket
    outputs: list[int]
    request: TrialRequest
    pid: int = 0

    @property
    def job(self) -> str:
        """Id shared by the ranks of one run."""
        env = self.request.environment
        return env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID") or f"connection {id(self)}"

    def release(self) -> None:
        """Close the worker's copies of the job's output."""
        while self.outputs:
            os.close(self.outputs.pop())


def gpus(environment: Mapping[str, str]) -> frozenset[str]:
    """The GPUs visible in an environment; ``*`` means all."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return frozenset("*")
    return frozenset(part.strip() for part in visible.split(",") if part.strip())


def overlap(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Whether two environments share a visible GPU."""
    a, b = gpus(one), gpus(other)
    return bool(a & b or "*" in a | b)


def collide(one: WorkerTrial, other: WorkerTrial) -> bool:
    """Whether two trials must not run at one time."""
    return one.job != other.job and overlap(one.request.environment, other.request.environment)


class Worker:
    """Serves ``path`` until SIGTERM, or after SIGUSR1 until running and just starting trials have ended.

    modules: to import beforehand. idle: seconds without a trial after which it ends, None for never.
    """

    def __init__(self, path: Path, modules: list[str], idle: float | None = None) -> None:
        self._path = path
        self._idle = idle
        began = time.monotonic()
        # Listen before the imports: trials that connect meanwhile wait for their end instead of importing themselves.
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        # A client can run programs as this user, so only the owner may connect.
        mask = os.umask(0o177)
        self._listener.bind(str(path))
        os.umask(mask)
        self._listener.listen()
        with _gpus_hidden():
            for module in modules:
                importlib.import_module(module)
        _check_cuda_untouched()
        # An MLLOG line names the file that logs it; the first lookup scans all modules' files, thousands here.
        inspect.getmodule(inspect.currentframe())
        # Else a forked process scans all imported objects at each full collection, and copies their pages.
        gc.collect()
        gc.freeze()
        self._trials: list[WorkerTrial] = []
        self._selector = selectors.DefaultSelector()
        self._wake, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGUSR1, self._drain)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._running = True
        print(f"warm worker: ready on {path} after {time.monotonic() - began:.1f} s", flush=True)

    def serve(self) -> None:
        """Serve requests until stopped; then kill the running trials."""
        try:
            while self._running:
                events = self._selector.select(None if self._trials else self._idle)
                if not events and not self._trials:
                    break
                for key, _ in events:
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._wake:
                        self._wake.recv(4096)
                    else:
                        self._message(key.data)
                self._reap()
                self._start_waiting()
        finally:
            for trial in self._trials:
                send_signal(trial.pid, signal.SIGKILL, group=True)
            self._path.unlink(missing_ok=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._running = False

    def _drain(self, number: int, frame: FrameType | None) -> None:
        self._idle = LAST_SECONDS

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(5.0)
        try:
            request, outputs = receive(connection)
        except (OSError, ValueError) as error:
            print(f"warm worker: request refused: {error}", flush=True)
            connection.close()
            return
        trial = WorkerTrial(connection, outputs, request)
        self._selector.register(connection, selectors.EVENT_READ, trial)
        self._trials.append(trial)

    def _message(self, trial: WorkerTrial) -> None:
        """Handle a signal to forward, or the end of the trial's job."""
        try:
            numbers = trial.connection.recv(64)
        except OSError:
            numbers = b""
        if numbers:
            for number in numbers:
                send_signal(trial.pid, number, group=True)
            if trial.pid == 0:
                self._finish(trial, 128 + numbers[0])
            return
        if trial.pid:
            send_signal(trial.pid, signal.SIGKILL, group=True)
            self._selector.unregister(trial.connection)
        else:
            self._finish(trial, 128 + signal.SIGKILL)

    def _start_waiting(self) -> None:
        for i, trial in enumerate(self._trials):
            # A rank whose job already runs goes before waiting jobs, because the other ranks wait for it.
            begun = any(other.pid and other.job == trial.job for other in self._trials)
            before = [other for other in self._trials[:i] if other.pid or not begun]
            if trial.pid == 0 and not any(collide(trial, other) for other in before):
                self._fork(trial)

    def _fork(self, trial: WorkerTrial) -> None:
        trial.pid = os.fork()
        if trial.pid == 0:
            leave_worker({*self._files()} - {*trial.outputs})
            become(trial.request, trial.outputs)
        # Parent and child both set the group, so that it exists whichever runs first.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(trial.pid, trial.pid)
        trial.release()

    def _files(self) -> list[int]:
        """The worker's open files, which a forked process closes."""
        sockets = [self._listener, self._wake, self._wake_writer, *(trial.connection for trial in self._trials)]
        return [*(one.fileno() for one in sockets), *(file for trial in self._trials for file in trial.outputs)]

    def _reap(self) -> None:
        for trial in [t for t in self._trials if t.pid]:
            pid, status = os.waitpid(trial.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                # Child processes (data loaders) must not outlive the trial on its GPU.
                send_signal(trial.pid, signal.SIGKILL, group=True)
                self._finish(trial, code if code >= 0 else 128 - code)

    def _finish(self, trial: WorkerTrial, code: int) -> None:
        self._trials.remove(trial)
        trial.release()
        if trial.connection in self._selector.get_map():
            self._selector.unregister(trial.connection)
        try:
            trial.connection.sendall(HEADER.pack(code))
        except OSError:
            print(f"warm worker: the job of pid {trial.pid} is gone; its trial ended with {code}", flush=True)
        trial.connection.close()


def leave_worker(close: Iterable[int]) -> None:
    """In a forked process: set up a process group that dies with the worker; reset signals and close files."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.setpgid(0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    for file in close:
        os.close(file)


def become(request: TrialRequest, outputs: list[int]) -> NoReturn:
    """Adopt the job's environment, folder and output, run the recipe, and exit."""
    for target, file in zip((1, 2), outputs, strict=False):
        os.dup2(file, target)
        os.close(file)
    code = 1
    try:
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.cwd)
        code = int(importlib.import_module(request.module).main())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - no exception may reach the worker's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _gpus_hidden() -> Iterator[None]:
    """Hide all GPUs: some libraries query a visible GPU's properties while they are imported.

    That initializes CUDA, which a forked process then cannot use. torch also initializes CUDA to count GPUs, unless
    it counts through NVML.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _check_cuda_untouched() -> None:
    """Raise SetupError if an import has initialized CUDA, so that a forked process cannot use the GPUs."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    pid = os.fork()
    if pid == 0:
        try:
            torch.zeros(1, device="cuda")
        except Exception:  # noqa: BLE001 - no exception may reach the worker's code
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(pid, 0)[1] or torch.cuda.is_initialized():
        raise SetupError(
            "an imported module starts CUDA, so forked trials cannot; preload fewer modules, or run without a worker"
        )


def main() -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--socket", type=Path, required=True, help="path of the socket to make")
    parser.add_argument("--idle", type=float, help="seconds without a trial after which it ends [never]")
    parser.add_argument("modules", nargs="+", help="modules to import beforehand")
    options = parser.parse_args()
    try:
        Worker(options.socket, options.modules, options.idle).serve()
    except LoraTuneError as error:
        print(f"warm_worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
