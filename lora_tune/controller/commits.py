"""An arm may be a commit: a git tree beside the parameters, of which each attempt runs a worktree of its own.

A trial of a commit has COMMIT and TREE among its parameters: the commit that was named, and the hash of its files. Arms
are told apart by the files (``search.campaign.arm_of``), so that a commit that changes none is a further run of the
same arm.
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
    """sha: of the commit. tree: of its files."""

    sha: str
    tree: str

    @property
    def of_request(self) -> dict[str, str]:
        """As a request states it."""
        return {"commit": self.sha, "tree": self.tree}


def resolve(study: Study, name: str) -> Commit:
    """The commit that a study's code has under a name (a branch, a tag, a hash).

    Raises InputError for no commit, and for a study whose trials cannot run one.
    """
    if problem := refusal(study):
        raise InputError(problem)
    folder = _code_of(study)
    try:
        # One that begins with a dash would be an option of git's.
        sha = _git(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    except LauncherError:
        raise InputError(f"commit {name!r}: {folder} has none of that name; git log lists them") from None
    return Commit(sha, _git(folder, "rev-parse", f"{sha}^{{tree}}"))


def refusal(study: Study) -> str:
    """Why no trial of a study can be of a commit; "" where one can."""
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
    """What a trial has beside its values where its request names a commit."""
    if request is None or not request.what.get("commit"):
        return {}
    return {COMMIT: str(request.what["commit"]), TREE: str(request.what["tree"])}


def at_commit(job: Job, trial: Trial) -> Job:
    """The job in a worktree of its trial's commit, which is made below the job's folder where it is not there yet.

    Raises LauncherError where git cannot make it.
    """
    sha = trial.parameters.get(COMMIT)
    if not isinstance(sha, str) or not _SHA.fullmatch(sha):
        return job
    folder, place = (job.cwd or Path.cwd()).absolute(), job.folder.absolute() / "tree"
    if not (place / ".git").exists():
        part = place.with_name("tree.part")
        shutil.rmtree(part, ignore_errors=True)  # of a driver that was killed half way
        part.parent.mkdir(parents=True, exist_ok=True)
        _git(folder, "worktree", "prune")
        _git(folder, "worktree", "add", "--force", "--detach", "--quiet", str(part), sha)
        _git(folder, "worktree", "move", str(part), str(place))
    return replace(job, cwd=place / _git(folder, "rev-parse", "--show-prefix"))


def _code_of(study: Study) -> Path:
    """Where a study's command runs."""
    cwd = (study.workload.model_extra or {}).get("cwd")
    return Path(str(cwd)).expanduser() if cwd else Path.cwd()


def _git(folder: Path, *arguments: str) -> str:
    """What git prints. Raises LauncherError with its words where it fails."""
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
