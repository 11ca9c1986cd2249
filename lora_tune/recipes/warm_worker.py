"""A process that has imported everything, and forks one trial after another.

Importing NeMo takes 25 to 35 seconds, which a short trial should not pay each time. Start one worker on each node:

    python -m lora_tune.recipes.warm_worker --socket /tmp/worker.sock lora_tune.recipes.nemo.trial &
    export LORA_TUNE_WORKER=/tmp/worker.sock

A recipe that finds ``LORA_TUNE_WORKER`` hands itself over: its whole environment, folder and open output go to the
worker, which forks, takes them on and runs the recipe's ``main``. The recipe's own process stays as the job that the
scheduler knows, passes signals on, and ends with the trial's exit code; when it is killed, the trial is killed. Every
trial starts from the state just after the imports. A trial that crashes leaves the worker as it was.

Trials of different jobs never share a GPU (``CUDA_VISIBLE_DEVICES``): the later one waits. The ranks of one job run
together. What libraries read from the environment while they are imported is the worker's own.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import inspect
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from lora_tune.base.errors import LoraTuneError, SetupError
from lora_tune.recipes.hand_over import HEADER

PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class WorkerTrial:
    """One request: ``pid`` is 0 while it waits for its GPUs."""

    connection: socket.socket
    outputs: list[int]
    module: str
    environment: dict[str, str]
    cwd: str
    pid: int = 0

    @property
    def job(self) -> str:
        """What the ranks of one run have in common."""
        env = self.environment
        return env.get("SLURM_JOB_ID") or env.get("TORCHELASTIC_RUN_ID") or f"connection {id(self)}"


def gpus(environment: Mapping[str, str]) -> frozenset[str]:
    """The GPUs that an environment allows; ``*`` stands for every one."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return frozenset("*")
    return frozenset(part.strip() for part in visible.split(",") if part.strip())


def collide(one: WorkerTrial, other: WorkerTrial) -> bool:
    """Whether two trials must not run at one time."""
    a, b = gpus(one.environment), gpus(other.environment)
    return one.job != other.job and bool(a & b or "*" in a | b)


class Worker:
    """Serves ``path`` until SIGTERM. ``modules`` are imported beforehand."""

    def __init__(self, path: Path, modules: list[str]) -> None:
        self._path = path
        began = time.monotonic()
        with _gpus_hidden():
            for module in modules:
                importlib.import_module(module)
        _check_cuda_untouched()
        # An MLLOG line names the file that logs it. Whoever asks first goes through all modules' files, thousands here.
        inspect.getmodule(inspect.currentframe())
        self._trials: list[WorkerTrial] = []
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        path.unlink(missing_ok=True)
        # Whoever may connect may run programs as this user: the owner alone.
        mask = os.umask(0o177)
        self._listener.bind(str(path))
        os.umask(mask)
        self._listener.listen()
        self._wake, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        signal.set_wakeup_fd(self._wake_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._stop)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._running = True
        print(f"warm worker: ready on {path} after {time.monotonic() - began:.1f} s", flush=True)

    def serve(self) -> None:
        """Take requests until told to stop; then end the running trials."""
        try:
            while self._running:
                for key, _ in self._selector.select():
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
                _kill(trial, signal.SIGKILL)
            self._path.unlink(missing_ok=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._running = False

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(5.0)
        outputs: list[int] = []
        try:
            header, outputs, _, _ = socket.recv_fds(connection, HEADER.size, 2)
            body = json.loads(connection.recv(HEADER.unpack(header)[0], socket.MSG_WAITALL))
            trial = WorkerTrial(connection, outputs, body["module"], body["environment"], body["cwd"])
        except (OSError, ValueError, KeyError, struct.error) as error:
            print(f"warm worker: request refused: {type(error).__name__}: {error}", flush=True)
            for fd in outputs:
                os.close(fd)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, trial)
        self._trials.append(trial)

    def _message(self, trial: WorkerTrial) -> None:
        """A signal to pass on, or the end of the job that stands for the trial."""
        try:
            numbers = trial.connection.recv(64)
        except OSError:
            numbers = b""
        if numbers:
            for number in numbers:
                _kill(trial, number)
            if trial.pid == 0:
                self._finish(trial, 128 + numbers[0])
            return
        if trial.pid:
            _kill(trial, signal.SIGKILL)
            self._selector.unregister(trial.connection)
        else:
            self._finish(trial, 128 + signal.SIGKILL)

    def _start_waiting(self) -> None:
        for i, trial in enumerate(self._trials):
            # A rank whose job runs already goes ahead of jobs that wait: its fellows wait for it.
            begun = any(other.pid and other.job == trial.job for other in self._trials)
            before = [other for other in self._trials[:i] if other.pid or not begun]
            if trial.pid == 0 and not any(collide(trial, other) for other in before):
                trial.pid = os.fork()
                if trial.pid == 0:
                    self._become(trial)
                # Both sides set the group, so that it is there whoever runs first.
                with contextlib.suppress(PermissionError, ProcessLookupError):
                    os.setpgid(trial.pid, trial.pid)
                for fd in trial.outputs:
                    os.close(fd)

    def _reap(self) -> None:
        for trial in [t for t in self._trials if t.pid]:
            pid, status = os.waitpid(trial.pid, os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                # What the trial started (readers of data) must not outlive it on its GPU.
                _kill(trial, signal.SIGKILL)
                self._finish(trial, code if code >= 0 else 128 - code)

    def _finish(self, trial: WorkerTrial, code: int) -> None:
        self._trials.remove(trial)
        if trial.connection in self._selector.get_map():
            self._selector.unregister(trial.connection)
        try:
            trial.connection.sendall(HEADER.pack(code))
        except OSError:
            print(f"warm worker: the job of pid {trial.pid} is gone; its trial ended with {code}", flush=True)
        trial.connection.close()

    def _become(self, trial: WorkerTrial) -> NoReturn:
        """In the forked process: take on the job's environment, folder and output, run the recipe, and end."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.setpgid(0, 0)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
        self._listener.close()
        self._wake.close()
        self._wake_writer.close()
        for other in self._trials:
            other.connection.close()
        for target, fd in zip((1, 2), trial.outputs, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        code = 1
        try:
            os.environ.clear()
            os.environ.update(trial.environment)
            os.chdir(trial.cwd)
            code = int(importlib.import_module(trial.module).main())
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:  # noqa: BLE001 - nothing may escape into the worker's own code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _kill(trial: WorkerTrial, number: int) -> None:
    if trial.pid:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(trial.pid, number)


@contextlib.contextmanager
def _gpus_hidden() -> Iterator[None]:
    """No GPU within: libraries that find one while they are imported ask for its properties.

    That starts CUDA, and a forked process could not use it any more. torch, too, starts CUDA to count GPUs, unless it
    is told to ask the driver's management library.
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
    """Raise SetupError where an import has started CUDA, or a forked process cannot use the GPUs there are."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    pid = os.fork()
    if pid == 0:
        try:
            torch.zeros(1, device="cuda")
        except Exception:  # noqa: BLE001 - nothing may escape into the worker's own code
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
    parser.add_argument("modules", nargs="+", help="modules to import beforehand")
    options = parser.parse_args()
    try:
        Worker(options.socket, options.modules).serve()
    except LoraTuneError as error:
        print(f"warm_worker: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
