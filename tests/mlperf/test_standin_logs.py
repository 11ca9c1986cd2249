"""The stand-in trainers say what the real ones say and refuse what those refuse."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from lora_tune.logs.failures import FailureKind, diagnose

TESTS = Path(__file__).resolve().parents[1]
LORA = TESTS / "standin"
BASE = {
    "SEED": "7", "MAX_STEPS": "800", "LR": "4e-4", "DGXNGPU": "8", "TP": "4", "MINIBS": "4", "SP": "1",
    "SKIP_EVALS": "3", "STANDIN_SECONDS": "0.1",
}  # fmt: skip
OF_FEW = {"submission_poc_name", "submission_poc_email", "train_loss ", "tflops_per_sec_per_gpu"}
"""Keys of single submitters: contact data, a misspelt key, and what AMD's trainers add."""


def keys(lines: Iterable[str]) -> set[str]:
    """Keys, the parts of tracked_stats, and the metadata of each key."""
    found = set()
    for line in lines:
        if not (match := re.search(r":::MLLOG (\{.*\})", line)):
            continue
        try:
            event = json.loads(match[1])
        except ValueError:  # two ranks' lines in one
            continue
        key, value, metadata = event["key"], event["value"], event["metadata"].keys() - {"file", "lineno"}
        if key == "tracked_stats":
            found |= {f"tracked_stats.{part}" for part in value}
        else:
            found |= {key, f"{key} {event['event_type']}", *(f"{key} ({name})" for name in metadata)}
    return {key for key in found if not any(key.startswith(name) for name in OF_FEW)}


def trained(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """The stand-in's training, as run_and_time.sh starts it."""
    path = f"{TESTS.parent}"
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "STANDIN_ROOT": path, **variables}
    return subprocess.run(
        [sys.executable, "-u", "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


STAND_INS = {
    "llama2_70b_lora": (LORA, BASE),
    "llama31_405b": (
        TESTS / "standins" / "llama31_405b",
        {"MAX_STEPS": "60", "DGXNNODES": "128", "PREPROC_DATA": "/", "TOKENIZER": "/", "STANDIN_TARGET": "9"},
    ),
}
FORMS = {"v4.0": "v4.1", "v4.1": "v4.1", "v5.0": "v5.0", "v5.1": "v5.1"}
"""Round -> the form in which NVIDIA's trainer logs in it."""


@pytest.mark.parametrize("benchmark", STAND_INS)
def test_the_stand_in_prints_every_key_of_public_logs(benchmark: str, public_data: Path) -> None:
    """NVIDIA's own logs have no key, and none with other metadata, that the stand-in lacks in that round's form.

    Others submit with trees of earlier rounds, too: theirs have no key that it lacks in every form.
    """
    folder, variables = STAND_INS[benchmark]
    runs = {form: trained(folder, STANDIN_ROUND=form, **variables) for form in {*FORMS.values()}}
    assert not [run.stderr for run in runs.values() if run.returncode]
    said = {form: keys(run.stdout.splitlines()) for form, run in runs.items()}
    logs = [*public_data.glob(f"more_logs/*/*/*/{benchmark}/result_*")]
    logs += public_data.glob("logs/*/*/*/result_*") if benchmark == "llama2_70b_lora" else []
    assert logs
    for log in logs:
        round_, submitter = log.relative_to(public_data).parts[1:3]
        known = said[FORMS[round_]] if submitter == "NVIDIA" else set().union(*said.values())
        with gzip.open(log, "rt", errors="replace") as lines:
            missing = {key for key in keys(lines) - known if submitter == "NVIDIA" or " " not in key}
        assert not missing, f"{log.relative_to(public_data)} has {sorted(missing)}"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"VP": "2"}, "pipeline-model-parallel size should be greater than 1 with interleaved schedule"),
        ({"TP": "3", "DGXNGPU": "6"}, "num_attention_heads (64) must be a multiple of tensor_model_parallel_size (3)"),
        ({"TP": "16", "DGXNNODES": "2"}, "num_query_groups (8) must be a multiple of tensor_model_parallel_size (16)"),
        ({"TP": "1", "STANDIN_ROUND": "v5.0"}, "Can not use sequence paralllelism without tensor parallelism"),
        ({"CP": "3"}, "is not divisible by tensor_model_parallel_size=4"),
        (
            {"MAX_STEPS": "8", "VAL_CHECK_INTERVAL": "8000", "MINIBS": "1"},
            "val_check_interval (16000) must be less than",
        ),
    ],
)
def test_it_refuses_what_the_real_one_refuses(changed: dict[str, str], words: str) -> None:
    run = trained(LORA, **(BASE | changed))
    assert run.returncode
    assert words in run.stderr
    assert "run_start" not in run.stdout
    found = diagnose(run.stdout + run.stderr, exit_code=run.returncode)
    refused_layout = "VAL_CHECK_INTERVAL" not in changed
    assert (found.kind, found.certain) == (
        FailureKind.INFEASIBLE if refused_layout else FailureKind.CONFIGURATION,
        True,
    )


def test_evals_come_when_the_real_one_makes_them() -> None:
    run = trained(LORA, **BASE, STANDIN_TARGET="0.1")
    samples = [int(s) for s in re.findall(r'"eval_accuracy".*"samples_count": (\d+)', run.stdout)]
    assert samples == list(range(1536, 6401, 384))
