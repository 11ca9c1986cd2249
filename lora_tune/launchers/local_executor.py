"""submitit's local executor with environment variables for the child only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from submitit import LocalExecutor
from submitit.local.local import LocalJob


class ExecutorWithSecrets(LocalExecutor):  # type: ignore[misc]  # submitit ships no types
    """Starts a job with variables that are never in this process's environment.

    submitit copies ``os.environ``; variables set there for a moment would leak into jobs that other threads start.
    """

    def __init__(self, folder: Path, secrets: Mapping[str, str]) -> None:
        super().__init__(folder=folder)
        self._secrets = dict(secrets)

    def _submit_command(self, command: str) -> Any:
        environment = {
            **os.environ,
            **self._secrets,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_NTASKS": "1",
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "CUDA_VISIBLE_DEVICES": "",
        }
        argv = [sys.executable, "-m", "submitit.local._local", str(self.folder)]
        process = subprocess.Popen(argv, env=environment)
        return LocalJob(folder=self.folder, job_id=str(process.pid), process=process, tasks=[0])
