"""Trials of a git commit: each attempt runs in its own worktree of that commit.

Such a trial has COMMIT and TREE among its parameters: the named commit, and the hash of its files. Arms are identified
by the files (``search.campaign.arm_of``), so that a commit that changes none is a further run of the same arm.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tune.base.errors import InputError, LauncherError
from lora_tune.config.study import Study
from lora_tune.search.usual_names import COMMIT, TREE
from lora_tune.store.port import Request
from lora_tune.store.records import Trial, Value
from lora_tune.workloads.base import Job

_SHA = re.compile(r"[0-9a-f]{40,64}")
GIT_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Commit:
    """sha: of the commit. tree: hash of its files."""

    sha: str
    tree: str

    @property
    def of_request(self) -> dict[str, str]:
        """Its fields in a request."""
        return {"commit": self.sha, "tree": self.tree}


def resolve(study: Study, name: str) -> Commit:
    """The commit with a name (a branch, a tag, a hash) in the study's code.

    Raises InputError for an unknown name, and for a study whose trials cannot run a commit.
    """
    if problem := refusal(study):
        raise InputError(problem)
    folder = _code_of(study)
    try:
        # --end-of-options: a name that begins with a dash is not an option.
        sha = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except LauncherError:
        raise InputError(f"commit {name!r}: {folder} has none of that name; git log lists them") from None
    return Commit(sha, _git(folder, "rev-parse", f"{sha}^{{tree}}"))


def refusal(study: Study) -> str:
    """Why no trial of a study can run a commit; "" if one can."""
    settings = study.workload
    if settings.kind != "command":
        return f'workload.kind = "{settings.kind}": a commit is run by kind = "command" alone'
    if study.search.sampler != "requests":
        return (
            f'search.sampler = "{study.search.sampler}" would take what a commit changes for noise of its values; '
            'commits need sampler = "requests"'
        )
    return ""


def parameters_of(request: Request | None) -> dict[str, Value]:
    """The additional parameters of a trial whose request names a commit."""
    if request is None or not request.what.get("commit"):
        return {}
    return {COMMIT: str(request.what["commit"]), TREE: str(request.what["tree"])}


def at_commit(job: Job, trial: Trial) -> Job:
    """The job in a worktree of its trial's commit, created in the job's folder if necessary.

    Raises LauncherError if git fails.
    """
    sha = trial.parameters.get(COMMIT)
    if not isinstance(sha, str) or not _SHA.fullmatch(sha):
        return job
    folder, place = (job.cwd or Path.cwd()).absolute(), job.folder.absolute() / "tree"
    if not (place / ".git").exists():
        part = place.with_name("tree.part")
        shutil.rmtree(part, ignore_errors=True)  # left by a driver that was killed
        part.parent.mkdir(parents=True, exist_ok=True)
        _git(folder, "worktree", "prune")
        _git(folder, "worktree", "add", "--force", "--detach", "--quiet", str(part), sha)
        _git(folder, "worktree", "move", str(part), str(place))
    return replace(job, cwd=place / _git(folder, "rev-parse", "--show-prefix"))


def _code_of(study: Study) -> Path:
    """The working folder of a study's command."""
    cwd = (study.workload.model_extra or {}).get("cwd")
    return Path(str(cwd)).expanduser() if cwd else Path.cwd()


def _git(folder: Path, *arguments: str) -> str:
    """git's output. Raises LauncherError with its message if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LauncherError(f"git {arguments[0]} in {folder}: {error}; install git, or look at the disk") from error
    if done.returncode != 0:
        output = " ".join(done.stderr.split()) or f"ended with {done.returncode}"
        raise LauncherError(f"git {arguments[0]} in {folder}: {output}; run it by hand to see why")
    return done.stdout.strip()
