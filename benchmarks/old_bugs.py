"""``python -m benchmarks.old_bugs [NAME...]``: reintroduce former bugs one by one, and check that a test fails.

Each bug is a change of a few characters in the current package; the quick tests of its room must fail with it and pass
without it. The checkout is changed while a bug is in it, and restored afterwards.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Bug(NamedTuple):
    """right: text that occurs once in the package. wrong: its replacement. tests: those that must fail."""

    right: str
    wrong: str
    tests: str


BUGS = {
    "an eval that is no number reaches the target": Bug(
        "return next((e for e in self.evals if e.loss <= target), None)",
        "return next((e for e in self.evals if not e.loss > target), None)",
        "tests/logs/test_mllog.py tests/curves/test_curve.py tests/controller/test_policy.py",
    ),
    "another attempt's record is taken": Bug(
        "if not expected or token == expected:", "if True:", "tests/launchers/test_job_records.py"
    ),
    "the olympic mean keeps its outliers": Bug(
        "kept = sorted(values)[1:-1]", "kept = sorted(values)[0:]", "tests/mlperf/test_prediction.py"
    ),
    "any falling curve is learnt by heart": Bug(
        "rise = min(e.loss for e in evals[-3:]) - lowest",
        "rise = sorted(e.loss for e in evals[-3:])[1] - lowest + 1e9",
        "tests/review/test_explain.py",
    ),
    "null in a base is no statement": Bug(
        'NULLS = ("null", "none")',
        'NULLS = ("none",)',
        "tests/workloads/test_record.py tests/workloads/test_base_config.py",
    ),
    "a token of a known form stays in a text": Bug(
        "text = _KNOWN_TOKEN.sub(HIDDEN, text)",
        "text = _KNOWN_TOKEN.sub(r'\\g<0>', text)",
        "tests/cli/test_secrets.py tests/launchers/test_slurm_answers.py",
    ),
    "a driver whose lease was taken writes on": Bug(
        "this_sweep = _is_lease(lease) & (table.c.saves >= least)",
        "this_sweep = (table.c.name == lease.sweep) & (table.c.saves >= 0)",
        "tests/store/test_store.py tests/store/test_leasing.py",
    ),
    "a program that begins anew inside its job is timed from its last beginning": Bug(
        "return samples > beyond", "return False", "tests/logs/test_restarts.py tests/logs/test_resumed.py"
    ),
    "a local driver takes the first GPUs of the machine": Bug(
        "if visible is None:\n        return tuple(str(index)",
        "if True:\n        return tuple(str(index)",
        "tests/launchers/test_gpus_of_this_machine.py",
    ),
    "a clock that runs too fast all along is not seen": Bug(
        "if abs(drift) > max(DRIFT_SECONDS, DRIFT_SHARE * (now - began)):",
        "if abs(drift) > 1e9 * max(DRIFT_SECONDS, DRIFT_SHARE * (now - began)):",
        "tests/launchers/test_clock_watch.py",
    ),
    "a seed is an arm": Bug(
        "return _SEED.search(name) is not None",
        "return False",
        "tests/search/test_campaign.py tests/search/test_roles.py",
    ),
    "each arm of a campaign has the whole error": Bug(
        "return EQUALLY_CHEAP / ((position + EQUALLY_CHEAP - 1) * (position + EQUALLY_CHEAP))",
        "return 1.0 + 0 * EQUALLY_CHEAP / ((position + EQUALLY_CHEAP - 1) * (position + EQUALLY_CHEAP))",
        "tests/search/test_campaign.py",
    ),
    "a probe is held to its trial's target": Bug(
        "return None if trial.probe else objective_of(study).stop(run)",
        "return objective_of(study).stop(run)",
        "tests/controller/test_one_attempt.py tests/controller/test_acceptance.py tests/search/test_stages.py "
        "tests/slurm/test_probe.py",
    ),
    "sbatch's job is the first number that a wrapper prints": Bug(
        "return str(lines[-1] if lines else",
        "return str(lines[0] if lines else",
        "tests/launchers/test_slurm_answers.py tests/launchers/test_slurm.py",
    ),
    "a hidden partition does not exist": Bug(
        'ask("sinfo", "--all", "--noheader", "--format=%P")',
        'ask("sinfo", "--noheader", "--format=%P")',
        "tests/launchers/test_slurm.py tests/launchers/test_slurm_answers.py",
    ),
    "a job that was given another one's id is taken for it": Bug(
        "return _writes_to(row, job) and submitted >=",
        "return True or submitted >=",
        "tests/launchers/test_slurm_text.py tests/launchers/test_slurm_answers.py",
    ),
    "nothing of a trial reaches a script with --export=NONE": Bug(
        "absent = [] if everything else sorted(set(needed) - named)",
        "absent = list[str]()",
        "tests/workloads/test_script_header.py",
    ),
    "an attempt whose nodes never came up is counted": Bug(
        "return sum(attempt.failure not in UNTRIED and attempt.fixed_at is None for attempt in attempts)",
        "return sum(attempt.fixed_at is None for attempt in attempts)",
        "tests/controller/test_company.py tests/controller/test_capacity.py",
    ),
    "the living driver of another container is taken for one that is gone": Bug(
        "return self.place not in (place(), boot()) if self.place else self.host != host()",
        "return self.host != host()",
        "tests/controller/test_folder_lock.py tests/controller/test_sweep_folder.py "
        "tests/launchers/test_job_records.py tests/store/test_leasing.py",
    ),
    "a run that goes on from another trial's checkpoint is the best": Bug(
        "if samples / seconds <= FASTER * fastest:",
        "if samples / seconds > 0:",
        "tests/controller/test_beginnings.py",
    ),
}
"""Bugs by their effect for a user."""


def place_of(bug: Bug) -> Path:
    """The one file of the package that contains the right text. Raises SystemExit if there is none or several."""
    files = [f for f in (ROOT / "lora_tune").rglob("*.py") if bug.right in f.read_text(encoding="utf-8")]
    if len(files) != 1:
        sys.exit(f"{bug.right!r} stands in {len(files)} files; this bug must be written anew")
    return files[0]


def caught(bug: Bug) -> str:
    """The first test that fails with the bug and passes without it; "" if there is none."""
    file, unsteady = place_of(bug), list[str]()
    before = file.read_text(encoding="utf-8")
    while True:
        try:
            file.write_text(before.replace(bug.right, bug.wrong), encoding="utf-8")
            failed = first_failure([*bug.tests.split(), *(f"--deselect={test}" for test in unsteady)])
        finally:
            file.write_text(before, encoding="utf-8")
        if not failed or not first_failure([failed]):
            return failed
        unsteady.append(failed)


def first_failure(tests: Sequence[str]) -> str:
    """The first of these tests that fails; "" if all pass. tests: arguments of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not long", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    summary = done.stdout.rpartition("short test summary info")[2]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.+?)(?: - .*)?$", summary, re.MULTILINE)
    return failed[1] if failed else ""


def main() -> int:
    """Reintroduce the bugs named on the command line, or all; return how many no test detects."""
    missed = 0
    for name in sys.argv[1:] or BUGS:
        began = time.monotonic()
        failed = caught(BUGS[name])
        missed += not failed
        print(f"{'caught' if failed else 'MISSED'} {name} ({time.monotonic() - began:.0f} s) {failed}", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main() > 0)
