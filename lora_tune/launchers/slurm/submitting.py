"""Submissions that take as long as ``sbatch`` does, while jobs that run are watched.

A busy controller, a site's wrapper or its filter may keep ``sbatch`` for minutes. So it runs in a thread of its own,
for one job at a time; who submits waits a moment for the answer and otherwise asks again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lora_tune.base.errors import LauncherError
from lora_tune.launchers.slurm.client import run_bounded

ANSWER_SECONDS = 120.0
"""How long sbatch may take; the client itself tries a busy controller again for about a minute."""

PATIENCE_SECONDS = 3.0
"""How long a tick waits for an answer."""


def sbatch_answer(command: list[str]) -> str:
    """What ``command``, an sbatch, prints. Raises RuntimeError with its words, LauncherError where it is silent.

    A silent one is ended, and may have submitted all the same: its job is then found by its token.
    """
    done = run_bounded(command, ANSWER_SECONDS, None, name="sbatch")
    if done.returncode:
        raise RuntimeError(done.stderr or done.stdout)
    return done.stdout


class PendingSubmissions:
    """The submissions of one launcher, by the names of their jobs; one runs at a time."""

    def __init__(self) -> None:
        self._begun: dict[str, _Submission] = {}

    def knows(self, job: str) -> bool:
        """Whether the answer for ``job`` is still to be fetched."""
        return job in self._begun

    def answer(self, job: str, submit: Callable[[], str]) -> str:
        """What ``submit`` returns for ``job``, or raises. LauncherError while it goes on: ask again, and again."""
        begun = self._begun.get(job)
        if begun is None:
            if any(other.is_alive() for other in self._begun.values()):
                raise LauncherError(f"{job} is not submitted yet: sbatch has not answered for the job before it")
            begun = self._begun[job] = _Submission(submit)
            begun.start()
            begun.join(PATIENCE_SECONDS)
        if begun.is_alive():
            raise LauncherError(f"{job}: sbatch has not answered yet; jobs that run are watched meanwhile")
        del self._begun[job]
        if begun.error is not None:
            raise begun.error
        return begun.job_id


class _Submission(threading.Thread):
    """One call of sbatch, with what came of it."""

    def __init__(self, submit: Callable[[], str]) -> None:
        super().__init__(name="sbatch", daemon=True)  # who presses Ctrl-C does not wait for it
        self._submit = submit
        self.job_id = ""
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.job_id = self._submit()
        except BaseException as error:  # noqa: BLE001  # raised where the answer is asked for
            self.error = error
