"""A shipped study, swept by the real command on the test cluster against the stand-in of its recipe."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study, load_study
from lora_tune.review.config_check import toml_text
from lora_tune.store.records import Attempt, StudyRecords, Trial, Verdict
from tests.cluster import Cluster
from tests.conftest import REPOSITORY
from tests.recorded import recorded

HOPELESS = (Verdict.PRUNED, Verdict.CENSORED)
"""How a trial ends that never comes near the target: with too few good ones to compare it with, at its last step."""

STANDINS = REPOSITORY / "tests" / "standins"


class Rig:
    """One recipe's folder, its study, its site profile and its sweep.

    recipe: name of the shipped study, and of the stand-in's folder unless ``standin`` names it. keys: new values of
    keys of the study, whose lines are replaced (a text in braces is TOML). points: tried first in place of the
    study's own, each a TOML table without braces. site: keys of the site profile.
    """

    def __init__(
        self,
        folder: Path,
        cluster: Cluster,
        recipe: str,
        *,
        site: dict[str, Any],
        standin: str = "",
        points: Sequence[str] = (),
        environment: dict[str, str] | None = None,
        **keys: Any,
    ) -> None:
        self.cluster, self.name = cluster, f"{recipe}-e2e"
        self.recipe = Path(shutil.copytree(STANDINS / (standin or recipe), folder / "recipe"))
        text = (REPOSITORY / "studies" / f"{recipe}.toml").read_text(encoding="utf-8")
        for key, value in keys.items():
            raw = isinstance(value, str) and value.startswith("{")
            shown = value if raw else json.dumps(str(value) if isinstance(value, Path) else value)
            text, count = re.subn(rf"(?m)^{key} = .*$", lambda _, k=key, s=shown: f"{k} = {s}", text)
            assert count == 1, f"{recipe}.toml holds {count} lines for {key}"
        if points:
            text = re.sub(r"(?ms)^enqueue = \[\n.*?^\]\n", "", text)
            listed = ", ".join(f"{{ {point} }}" for point in points)
            text = text.replace("\n[search]\n", f"\n[search]\nenqueue = [{listed}]\n")
        # Short runs lie within each other's noise: only what an eval curve shows may end a trial early.
        text += "\n[pruning]\ncap = false\n"
        self.file = folder / f"{self.name}.toml"
        self.file.write_text(text, encoding="utf-8")
        profile = folder / str(tomllib.loads(text)["site"]["profile"])
        profile.parent.mkdir(exist_ok=True)
        variables = {
            "STANDIN_PYTHON": sys.executable,
            "STANDIN_ROOT": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }
        site = {"launcher": "slurm", "kill_seconds": 5, "stall_minutes": 2, **site, "environment": variables}
        profile.write_text(toml_text(site), encoding="utf-8")
        self.paths = SweepPaths(folder / "sweep")

    def sweep_once(self, seconds: float = 150) -> subprocess.CompletedProcess[str]:
        """The command that users type, to its end."""
        command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(self.file), "--output", str(self.paths.root)]
        done = subprocess.run(
            command, env={**os.environ, **self.cluster.environment}, capture_output=True, text=True, timeout=seconds
        )
        self.said = done.stdout + done.stderr
        return done

    @property
    def study(self) -> Study:
        return load_study(self.file)

    def sweep(self) -> StudyRecords:
        return recorded(self.paths.database, self.name)

    def trials(self) -> list[Trial]:
        return list(self.sweep().trials.values())

    def attempts(self) -> list[Attempt]:
        return list(self.sweep().attempts.values())

    def log(self, trial: int, attempt: int = 0) -> str:
        return self.paths.attempt(trial, attempt).log.read_text(errors="replace")

    def usage(self) -> str:
        """The line that the export says to type."""
        (line,) = [line for line in self.said.splitlines() if line.startswith("run it   ")]
        return line.removeprefix("run it   ")

    def by_hand(self, line: str, **environment: str) -> str:
        """A line typed in the folder of the exported config, in a clean shell; its output."""
        shell = {k: os.environ[k] for k in ("PATH", "HOME", "LANG") if k in os.environ}
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", line],
            cwd=self.paths.best,
            env={**shell, **self.cluster.environment, **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def accepted_by_sbatch(self, **environment: str) -> str:
        """What ``sbatch --test-only`` says of the exported config's own line."""
        line = self.usage()
        assert line.count("sbatch ") == 1, line
        return self.by_hand(line.replace("sbatch ", "sbatch --test-only "), **environment)
