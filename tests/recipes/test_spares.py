"""A spare is a process that has rehearsed a trial's start. A trial that becomes one runs as in any other."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lora_tune.base.errors import SetupError
from lora_tune_recipes import hand_over
from lora_tune_recipes.spares import overlap, read_once
from tests.recipes.test_warm_worker import BOUND, Client, started
from tests.waiting import wait_for


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """The socket and the process id of a worker that keeps spares."""
    path = tmp_path / "worker.sock"
    with started(path, "--spare") as process:
        yield path, process.pid


def children(pid: int) -> list[int]:
    """Processes that a worker has forked and that run."""
    held = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in held if Path(f"/proc/{child}/stat").read_text().split()[2] != "Z"]


def passes_on(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def test_the_second_trial_has_its_start_rehearsed(worker: tuple[Path, int], tmp_path: Path) -> None:
    """Its own knobs, folder and output count: nothing but what a library keeps is the spare's."""
    (tmp_path / "other").mkdir()
    assert Client(worker[0], "rehearsed", tmp_path, KNOB="1").result() == (0, f"False 1 {tmp_path}\n")
    answer = Client(worker[0], "rehearsed", tmp_path / "other", KNOB="2").result()
    assert answer == (0, f"True 2 {tmp_path / 'other'}\n")
    assert Client(worker[0], "exit 3", tmp_path).result()[0] == 3


def test_nor_does_its_garbage_collector_go_through_what_a_rehearsal_left(
    worker: tuple[Path, int], tmp_path: Path
) -> None:
    Client(worker[0], "exit 0", tmp_path).result()
    imported, own = map(int, Client(worker[0], "collect", tmp_path).result()[1].split())
    assert own < imported / 5


@pytest.mark.parametrize("name", ["NCCL_ALGO", "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NVTE_FLASH_ATTN"])
def test_a_spare_serves_no_trial_whose_libraries_would_have_read_something_else(
    worker: tuple[Path, int], tmp_path: Path, name: str
) -> None:
    path = worker[0]
    first = {name: "0", "KNOB": "1"}
    assert Client(path, "rehearsed", tmp_path, **first).result()[1].startswith("False")
    assert Client(path, "rehearsed", tmp_path, **{**first, name: "1"}).result()[1].startswith("False")
    assert Client(path, "rehearsed", tmp_path, **{**first, name: "1", "KNOB": "3"}).result()[1].startswith("True 3")


def test_a_trial_is_timed_only_when_nobody_rehearses_beside_it(worker: tuple[Path, int], tmp_path: Path) -> None:
    done = tmp_path / "done"
    client = Client(worker[0], "alone", tmp_path, REHEARSAL=f"until {done}")
    begun = client.line().split()
    (spare,) = {*children(worker[1])} - {int(begun[1])}
    assert client.process.poll() is None
    done.touch()
    assert client.line().startswith("timed")
    assert client.result()[0] == 0
    assert spare in children(worker[1]), "it waits for the trial after this one"


@pytest.mark.parametrize("hangs", [False, True])
def test_a_trial_waits_for_the_rehearsal_beside_it_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    monkeypatch.setattr(hand_over, "REHEARSAL_SECONDS", 0.01)
    ends, rehearses = os.pipe()
    hand_over.rehearsed_beside(ends)
    if hangs:
        with pytest.raises(SetupError, match="it hangs; start the worker again"):
            hand_over.alone_on_gpu()
        os.close(rehearses)
    else:
        os.close(rehearses)
        hand_over.alone_on_gpu()
    hand_over.alone_on_gpu()


@pytest.mark.parametrize("when", ["it waits", "it rehearses"])
def test_a_spare_that_dies_costs_nothing(worker: tuple[Path, int], tmp_path: Path, when: str) -> None:
    never = tmp_path / "never"
    rehearsal = {"REHEARSAL": f"until {never}"} if when == "it rehearses" else {}
    Client(worker[0], "exit 0", tmp_path, **rehearsal).result()
    (spare,) = children(worker[1])
    if when == "it waits":
        os.kill(spare, signal.SIGKILL)
        wait_for(lambda: spare not in children(worker[1]), BOUND, "the spare lives")
        client = Client(worker[0], "rehearsed", tmp_path)
    else:
        client = Client(worker[0], "rehearsed", tmp_path)
        wait_for(lambda: len(children(worker[1])) == 2, BOUND, "the trial was not given to the spare")
        os.kill(spare, signal.SIGKILL)
    code, out = client.result()
    assert (code, out.split()[0]) == (0, "False"), "the trial was forked as without spares"


def test_a_trial_that_is_cancelled_before_its_spare_begins_does_not_run(
    worker: tuple[Path, int], tmp_path: Path
) -> None:
    Client(worker[0], "exit 0", tmp_path, REHEARSAL=f"until {tmp_path / 'never'}").result()
    client = Client(worker[0], "rehearsed", tmp_path)
    wait_for(lambda: len(children(worker[1])) == 2, BOUND, "the trial was not given to the spare")
    wait_for(lambda: passes_on(client.process.pid, signal.SIGTERM), BOUND, "the job does not pass signals on")
    client.process.send_signal(signal.SIGTERM)
    code, out = client.result()
    assert (code, out) == (128 + signal.SIGTERM, "")


def test_a_rehearsal_that_fails_is_told_and_trials_are_forked(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    with started(path, "--spare") as process:
        for _ in range(2):
            client = Client(path, "alone", tmp_path, REHEARSAL="raise no kernels")
            assert client.result()[1].split()[-1] == "False"
        assert process.stdout
        assert process.stdout.readline() == "warm worker: no spare: RuntimeError: no kernels\n"


def test_two_trials_at_once_each_have_a_spare_of_their_gpu(worker: tuple[Path, int], tmp_path: Path) -> None:
    gpus = ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
    for one in gpus:
        Client(worker[0], "alone", tmp_path, **one).result()
    spares = {*children(worker[1])}
    go = tmp_path / "go"
    clients = [Client(worker[0], f"until {go}", tmp_path, **one) for one in gpus]
    assert {int(client.line().split()[2]) for client in clients} == spares
    go.touch()
    assert [client.result()[0] for client in clients] == [0, 0]


def test_a_trial_on_more_gpus_has_them_for_itself(worker: tuple[Path, int], tmp_path: Path) -> None:
    """A spare of one GPU would hold memory beside a trial on two."""
    Client(worker[0], "alone", tmp_path, CUDA_VISIBLE_DEVICES="0").result()
    (single,) = children(worker[1])
    Client(worker[0], "alone", tmp_path, CUDA_VISIBLE_DEVICES="0,1").result()
    (both,) = children(worker[1])
    assert both != single


def test_the_ranks_of_a_job_have_a_spare_each(worker: tuple[Path, int], tmp_path: Path) -> None:
    job = {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_JOB_ID": "1"}
    for again in (False, True):
        go = tmp_path / f"go {again}"
        held = {*children(worker[1])}
        ranks = [Client(worker[0], f"until {go}", tmp_path, **job, LOCAL_RANK=str(rank)) for rank in range(2)]
        pids = {int(client.line().split()[2]) for client in ranks}
        assert pids == held if again else not pids & held
        go.touch()
        assert [client.result()[0] for client in ranks] == [0, 0]
        wait_for(lambda: len(children(worker[1])) == 2, BOUND, "one spare a rank")


def test_spares_die_with_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "worker.sock"
    with started(path, "--spare") as process:
        Client(path, "alone", tmp_path).result()
        (spare,) = children(process.pid)
    wait_for(lambda: not Path(f"/proc/{spare}").exists(), BOUND, "the spare outlives its worker")


def test_what_a_job_says_of_itself_settles_no_library() -> None:
    job = {"SLURM_JOB_ID": "7", "TORCHELASTIC_RUN_ID": "7", "RANK": "0", "MASTER_PORT": "29500", "LR": "0.1"}
    assert read_once({**job, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}) == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_an_unset_list_of_gpus_is_all_of_them() -> None:
    assert overlap({}, {"CUDA_VISIBLE_DEVICES": "1"})
    assert not overlap({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"})
