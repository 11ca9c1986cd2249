"""The GPUs of this machine: own scripts get one each without a word of the study, and init writes how many it has."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from lora_tune.base.host import gpus_of_command, gpus_of_machine
from lora_tune.config.study import Study, parse_study
from lora_tune.init import main as init
from lora_tune.launchers import make_launcher
from lora_tune.launchers.base import JobState
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Job
from tests.launchers.test_local import job_of, log_until, poll_until, ticket_of

H100 = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)\nGPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)\n"
MIG = (
    "GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 3g.40gb     Device  0: (UUID: MIG-a)\n"
    "  MIG 3g.40gb     Device  1: (UUID: MIG-b)\nGPU 1: NVIDIA H100 (UUID: GPU-2)\n"
)
AMD = "GPU[0]\t\t: Device Name: MI300X\nGPU[0]\t\t: GUID: 1\nGPU[1]\t\t: Device Name: MI300X\n"


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder first on PATH, for the program that says what GPUs there are."""
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def has(machine: Path, text: str, program: str = "nvidia-smi", code: int = 0) -> None:
    file = machine / "bin" / program
    file.write_text(f"#!/bin/sh\ncat <<'END'\n{text}END\nexit {code}\n")
    file.chmod(0o755)


@pytest.mark.parametrize(
    ("text", "program", "code", "ids"),
    [
        (H100, "nvidia-smi", 0, ("0", "1")),
        (MIG, "nvidia-smi", 0, ("MIG-a", "MIG-b", "1")),
        (AMD, "rocm-smi", 0, ("0", "1")),
        ("NVIDIA-SMI has failed\n", "nvidia-smi", 9, ()),
        ("No devices were found\n", "nvidia-smi", 0, ()),
    ],
)
def test_the_machine_says_which_gpus_it_has(
    text: str, program: str, code: int, ids: tuple[str, ...], machine: Path
) -> None:
    has(machine, text, program, code)
    assert gpus_of_machine(None) == ids
    assert gpus_of_machine("6,7") == ("6", "7"), "what the driver may use is asked first"
    assert gpus_of_machine("") == ()


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        ("python train.py --lr 1", 1),
        ("torchrun --standalone --nproc-per-node=4 train.py", 4),
        ("python -m torch.distributed.run --nproc_per_node 2 train.py", 2),
        ("accelerate launch --num_processes 8 train.py", 8),
        ("python train.py --devices 0,1", 2),
        ("torchrun --nproc-per-node=gpu train.py", 1),
        ("train --gpus -1", 1),
    ],
)
def test_a_command_says_how_many_gpus_it_uses(words: str, gpus: int) -> None:
    assert gpus_of_command(words.split()) == gpus


def study(parallel: int = 1, site: str = "", argv: str = "['true']") -> Study:
    return parse_study(
        f"{site}\n[workload]\nkind = 'command'\nargv = {argv}\nlog = {{ kind = 'jsonl' }}\n"
        "[space]\nLR = { type = 'float', low = 1e-4, high = 1e-3 }\n"
        f"[objective]\ntarget = 0.5\n[budget]\ntrials = 4\nparallel = {parallel}\n",
        Path("mine.toml"),
    )


def running(folder: Path, number: int) -> Job:
    program = "import os, time; print('gpu', os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(600)"
    return replace(job_of(folder / str(number), program, name=f"g-{number}"))


def test_trials_spread_over_the_gpus_where_nobody_says_how_many_each_needs(machine: Path) -> None:
    """They saw none at all: CUDA_VISIBLE_DEVICES was empty."""
    has(machine, H100)
    launcher = make_launcher(study(parallel=3), machine / "packs")
    jobs = [running(machine, number) for number in range(3)]
    tickets = [ticket_of(job, launcher.submit(job)) for job in jobs]
    for job, device in zip(jobs, "010", strict=True):
        log_until(job, f"gpu {device}")
    for ticket in tickets:
        launcher.cancel(ticket, force=True)
        poll_until(launcher, ticket, JobState.ENDED)


@pytest.mark.parametrize(
    ("parallel", "site", "argv", "doubt"),
    [
        (4, "", "['true']", "4 trials at a time share 2 GPUs of this machine; budget.parallel = 2"),
        (1, "", "['true']", "1 of 2 GPUs of this machine stay idle; budget.parallel = 2 uses all"),
        (2, "", "['true']", ""),
        (1, "", "['true', '--nproc_per_node=2']", ""),
        (1, "site = { gpus_per_node = 2 }", "['true']", ""),
        (2, "site = { gpus_per_node = 0 }", "['true']", "trials see none of this machine's 2 GPUs"),
    ],
)
def test_the_sweep_says_what_a_study_makes_of_the_gpus(
    parallel: int, site: str, argv: str, doubt: str, machine: Path
) -> None:
    has(machine, H100)
    workload = load_workload(study(parallel, site, argv), Path("mine.toml"))
    doubts = [words for words in workload.check() if "GPU" in words]
    assert len(doubts) == bool(doubt)
    assert doubt in "".join(doubts)


@pytest.mark.parametrize(
    ("visible", "command", "gpus_per_node", "parallel"),
    [(None, (), 1, 2), ("5", (), 1, 1), (None, ("--nproc_per_node=2",), 2, 1), ("", (), None, 1)],
)
def test_init_writes_the_gpus_of_this_machine(
    visible: str | None,
    command: tuple[str, ...],
    gpus_per_node: int | None,
    parallel: int,
    machine: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    has(machine, H100)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    (machine / "train.py").touch()
    done = CliRunner().invoke(init, ["--no-help", "python", "train.py", "--lr=0.1", *command])
    assert done.exit_code == 0, done.output
    written = tomllib.loads((machine / "mine.toml").read_text())
    assert written.get("site", {}).get("gpus_per_node") == gpus_per_node
    assert written["budget"]["parallel"] == parallel
