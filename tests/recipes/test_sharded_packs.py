"""Packs of one job share a base that lies in parts on all of them, and each trains its trials as if it were alone."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tune.base.errors import InputError
from lora_tune.base.paths import AttemptPaths
from lora_tune_recipes import packed_lora
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.job import JobPack, meeting_place
from lora_tune_recipes.packed.loop import PackLoop
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.sharded import ShardedBase
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.speed import Speeds, TrialSpeed
from tests.recipes.test_packed import Sweep, end_of, read, trial

ENDLESS = 10**6
"""Steps of a trial that something else ends."""


@contextlib.contextmanager
def packs(sweep: Sweep, number: int, slots: int) -> Iterator[subprocess.Popen[str]]:
    """A job of this many packs, as a launcher starts it."""
    options = ["--packs", str(number), "--slots", str(slots), "--idle", "1"]
    command = [sys.executable, str(packed_lora.__file__), str(sweep.folder.paths.folder), *options]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield job
    finally:
        job.terminate()
        job.communicate(timeout=200)


def wait_for(condition: Callable[[], bool], job: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not condition():
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)


def evaluated(attempt: AttemptPaths) -> int:
    """How often its log says so: asked again and again while it trains."""
    return attempt.log.read_bytes().count(b"eval_accuracy") if attempt.log.exists() else 0


def evaluations(attempt: AttemptPaths) -> list[float]:
    return [point.loss for point in read(attempt).run().evals] if attempt.log.exists() else []


@functools.cache
def whole_base() -> PackedBase:
    """A base that lies in one part."""
    return PackedBase(trial())


def reference(changed: dict[str, object], count: int) -> list[float]:
    """The first ``count`` eval losses of the trial in a pack of one, over a whole base."""
    settings, base = trial(**changed), whole_base()
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(slot)
    losses: list[float] = []
    while len(losses) < count:
        pack.round()
        if slot.passes == 0 and (
            slot.step % settings.interval(settings.minibs) == 0 or slot.step == settings.max_steps
        ):
            losses += pack.evaluate([slot])
    return losses


DIFFERENT: list[dict[str, object]] = [
    {"SEED": 1, "LORA_DROPOUT": 0.2, "MAX_STEPS": 7},
    {"SEED": 2, "LORA_RANK": 4, "SEQ": 16, "MAX_STEPS": 3},
    {"SEED": 3, "LORA_TARGETS": "lm_head", "MINIBS": 4, "MBS": 2, "MAX_STEPS": 4},
    {"SEED": 4, "LORA_TARGETS": "embed_tokens,down_proj", "LORA_PLUS_RATIO": 4, "MAX_STEPS": 5},
    {"SEED": 5, "LORA_TARGETS": "all", "LR": 2e-2, "MAX_STEPS": 2},
]
"""Of other lengths, modules and passes: they come and go at other steps, and no two packs do the same."""


def test_a_trial_computes_the_same_to_the_bit_over_a_base_in_parts(tmp_path: Path) -> None:
    sweep = Sweep(tmp_path)
    attempts = [sweep.ask(str(number), FSDP=1, **changed) for number, changed in enumerate(DIFFERENT)]
    refused = sweep.ask("refused", FSDP=1, DORA=1)
    with packs(sweep, 2, slots=2) as job:
        said, _ = job.communicate(timeout=300)
    assert job.returncode == 0, said
    assert "DORA=1: it reads whole weights" in refused.log.read_text().splitlines()[-1]
    pids = {json.loads(attempt.claim.read_text())["pid"] for attempt in (*attempts, refused)}
    assert len(pids) == 2, "each pack takes some"
    for attempt, changed in zip(attempts, DIFFERENT, strict=True):
        assert end_of(attempt)["exit_code"] == 0
        assert evaluations(attempt) == reference(changed, len(evaluations(attempt)))
        assert 0 < float(str(end_of(attempt)["node_share"])) <= 0.5, "the other pack has the node's other half"


@pytest.fixture
def alone_together(tmp_path: Path) -> Iterator[Callable[..., JobPack]]:
    """Makes the meeting place of a job of one pack, whose base has these knobs; each ends the one before."""
    made: list[Path] = []

    def place(**base: str) -> JobPack:
        if made:
            torch.distributed.destroy_process_group()
        made.append(tmp_path / f"place-{len(made)}")
        made[-1].mkdir()
        (made[-1] / "base.json").write_text(json.dumps({"FSDP": "1", "SEQ": "2", **base}))
        return JobPack(made[-1], 0, 1)

    yield place
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def test_where_a_pack_dies_the_job_ends_and_every_trial_goes_on_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[..., JobPack]
) -> None:
    """Over a base that computes its activations again, which changes no bit either."""
    shared: dict[str, object] = {"FSDP": "True", "RECOMPUTE_GRANULARITY": "full"}
    few: dict[str, object] = {"MAX_STEPS": ENDLESS, "VAL_CHECK_INTERVAL": 8, "LORA_DROPOUT": 0.2, "EVAL_SAMPLES": 2}
    kinds: dict[int, dict[str, object]] = {1: {**few, "SEED": 1}, 2: {**few, "SEED": 2, "LORA_RANK": 4, "SEQ": 16}}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    before = [first.ask(f"{i}/attempt-0", **shared, **kind) for i, kind in kinds.items()]
    with packs(first, 2, slots=1) as job:
        wait_for(lambda: all(evaluated(attempt) > 1 for attempt in before), job)
        killed, saved = before
        os.kill(json.loads(killed.claim.read_text())["pid"], signal.SIGKILL)
        job.communicate(timeout=200)
    assert job.returncode != 0
    assert not any(attempt.ended.exists() for attempt in before)
    assert (saved.checkpoint.exists(), killed.checkpoint.exists()) == (True, False)
    there = len(evaluations(saved))

    after = [second.ask(f"{i}/attempt-1", **shared, **kind) for i, kind in kinds.items()]
    place = alone_together(RECOMPUTE_GRANULARITY="full")
    host, rounds = PackLoop(second.folder, idle=0.0, packs=2, slots=2, together=place), Pack.round

    def until_they_are_further(pack: Pack, *done: Any) -> object:
        if evaluated(after[0]) > 1 and evaluated(after[1]) > there + 1:
            host.stop()
        return rounds(pack, *done)

    monkeypatch.setattr(Pack, "round", until_they_are_further)
    assert not host.serve()
    monkeypatch.setattr(Pack, "round", rounds)
    assert all(attempt.checkpoint.exists() for attempt in after), "a job that is asked to end saves them all"
    for kind, attempt in zip(kinds.values(), after, strict=True):
        losses = evaluations(attempt)[: there + 2]  # it trained on while the other one was waited for
        assert losses == reference(kind, len(losses))


# -- in one process: a job of one pack whose base lies in one part


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[int], BaseException | None]) -> list[int]:
    """Let passes of training fail; ``fails`` is told how many slots share one. Returns how many did, pass by pass."""
    passes: list[int] = []
    losses = PackedBase.losses

    def some_fail(base: PackedBase, batch: Any, **how: bool) -> torch.Tensor:
        if torch.is_grad_enabled():
            adapted = next(iter(base._packed.values()))
            passes.append(sum(share.slots for share in adapted.shares))
            if (error := fails(passes[-1])) is not None:
                raise error
        return losses(base, batch, **how)

    monkeypatch.setattr(PackedBase, "losses", some_fail)
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    return passes


def serve(sweep: Sweep, together: JobPack) -> bool:
    return PackLoop(sweep.folder, idle=0.0, packs=2, slots=8, together=together).serve()


def test_out_of_memory_ends_the_job_and_fewer_train_side_by_side_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    few: dict[str, object] = {"FSDP": 1, "MAX_STEPS": 4}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    before = [first.ask(f"{i}/attempt-0", SEED=i, **few) for i in range(4)]
    passes = failing(monkeypatch, lambda slots: torch.OutOfMemoryError("CUDA out of memory") if slots > 3 else None)
    assert not serve(first, alone_together())
    assert not any(attempt.ended.exists() for attempt in before)
    after = [second.ask(f"{i}/attempt-1", SEED=i, **few) for i in range(4)]
    passes.clear()
    assert serve(second, alone_together())
    assert [end_of(attempt)["exit_code"] for attempt in after] == [0] * 4
    assert max(passes) == 3


def test_a_trial_that_cannot_be_measured_says_nothing_of_a_pass_that_is_lost_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    few: dict[str, object] = {"FSDP": 1, "MAX_STEPS": 4}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    before = [first.ask(f"{i}/attempt-0", SEED=i, **few) for i in range(4)]
    passes = failing(monkeypatch, lambda slots: torch.OutOfMemoryError("CUDA out of memory") if slots > 2 else None)
    measured: list[Slot] = []

    def last_fails(_: Speeds, slot: Slot) -> TrialSpeed:
        measured.append(slot)
        if len(measured) == len(before):
            raise ValueError("its data are broken")
        return TrialSpeed(1.0, 0.5, 0)

    monkeypatch.setattr(Speeds, "of", last_fails)
    assert not serve(first, alone_together())
    left = [i for i, attempt in enumerate(before) if not attempt.ended.exists()]
    assert len(left) == 3
    after = [second.ask(f"{i}/attempt-1", SEED=i, **few) for i in left]
    passes.clear()
    assert serve(second, alone_together())
    assert [end_of(attempt)["exit_code"] for attempt in after] == [0] * 3
    assert max(passes) == 2


def test_a_trial_of_which_only_one_fits_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    measure = Speeds.of
    sweep = Sweep(tmp_path)
    attempt = sweep.ask("0/attempt-0", FSDP=1, MAX_STEPS=4)
    failing(monkeypatch, lambda slots: torch.OutOfMemoryError("CUDA out of memory") if slots > 1 else None)
    monkeypatch.setattr(Speeds, "of", measure)
    assert serve(sweep, alone_together())
    assert end_of(attempt)["exit_code"] == 0


def test_a_trial_that_no_pass_can_train_ends_and_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    few: dict[str, object] = {"FSDP": 1, "MAX_STEPS": 3}
    seeds = {0: 0, 1: 13}
    rows = Slot.rows
    present: list[int] = []

    def remember(slot: Slot) -> Any:
        present.append(slot.settings.seed)
        return rows(slot)

    def of_thirteen(slots: int) -> BaseException | None:
        return RuntimeError("a kernel is missing") if 13 in present[-slots:] else None

    monkeypatch.setattr(Slot, "rows", remember)
    failing(monkeypatch, of_thirteen)
    ends: dict[int, AttemptPaths] = {}
    for job in range(4):
        sweep = Sweep(tmp_path, f"{job:04d}")
        asked = {i: sweep.ask(f"{i}/attempt-{job}", SEED=seed, **few) for i, seed in seeds.items() if i not in ends}
        serve(sweep, alone_together())
        ends |= {i: attempt for i, attempt in asked.items() if attempt.ended.exists()}
    assert end_of(ends[0])["exit_code"] == 0
    assert end_of(ends[1])["exit_code"] == 1
    assert "a kernel is missing" in ends[1].log.read_text().splitlines()[-1]


def test_what_is_over_when_a_pass_is_lost_ends_and_what_was_to_be_evaluated_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    few: dict[str, object] = {"FSDP": 1, "MAX_STEPS": 8, "VAL_CHECK_INTERVAL": 16}
    diverging = {"LR": 10, "GRAD_CLIP": 0, "LORA_ALPHA": 1e30, "LORA_RANK": 4}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    over, waits = first.ask("1/attempt-0", **few, **diverging), first.ask("2/attempt-0", SEED=2, **few)
    failing(monkeypatch, lambda slots: None)
    evaluate = Pack.evaluate

    def lost(pack: Pack, slots: Any) -> Any:
        with pack.base.turn(training=False):
            raise RuntimeError("[gloo/pair.cc] Connection closed by peer")

    monkeypatch.setattr("lora_tune_recipes.packed.trial.TRAIN_LOSS_EVERY", 4)
    monkeypatch.setattr(Pack, "evaluate", lost)
    assert not serve(first, alone_together())
    assert end_of(over)["exit_code"] == 0
    monkeypatch.setattr(Pack, "evaluate", evaluate)
    going_on = second.ask("2/attempt-1", SEED=2, **few)
    assert serve(second, alone_together())
    assert not waits.ended.exists()
    assert evaluations(going_on) == reference({**few, "SEED": 2, "FSDP": 0}, 2)
    assert [point.samples for point in read(going_on).run().evals] == [16.0, 32.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LOAD_IN_4BIT": "nf4"}, "LOAD_IN_4BIT='nf4': bitsandbytes' weights cannot be sharded here"),
        ({"FSDP_STRATEGY": "shard_grad_op"}, "FSDP_STRATEGY=shard_grad_op: allowed in packs is full_shard"),
        ({"FSDP_WRAP": "none"}, "FSDP_WRAP=none: allowed in packs is layer"),
        ({"FSDP_SHARDS": 2}, "FSDP_SHARDS=2: allowed in packs is 0"),
        ({"FSDP_OFFLOAD": 1}, "FSDP_OFFLOAD=1: allowed in packs is 0"),
    ],
)
def test_a_base_that_cannot_be_shared_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    settings = knobs.read({"FSDP": "1", **{name: str(value) for name, value in changed.items()}})
    with pytest.raises(InputError, match="allowed") as refused:
        ShardedBase(settings, JobPack(tmp_path, 0, 1))
    assert message in str(refused.value)


def test_a_base_that_cannot_be_loaded_is_the_last_line_of_every_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone_together: Callable[[], JobPack]
) -> None:
    sweep = Sweep(tmp_path)
    attempts = [sweep.ask(name, FSDP=1) for name in "ab"]
    monkeypatch.setattr("lora_tune_recipes.packed.base.load_base", unreadable)
    assert serve(sweep, alone_together())
    for attempt in attempts:
        assert "no usable config.json" in attempt.log.read_text().splitlines()[-1]
        assert end_of(attempt)["exit_code"] == 2


def unreadable(settings: knobs.Settings) -> Any:
    raise InputError(f"MODEL={str(settings.model)!r}: no usable config.json")


def test_packs_meet_where_the_first_trial_asks_for_one_base(tmp_path: Path) -> None:
    whole, shared = Sweep(tmp_path / "a"), Sweep(tmp_path / "b")
    whole.ask("a", FSDP=0)
    shared.ask("a", FSDP=1, LR="much", SEQ=64, DTYPE="float32")
    with meeting_place(whole.folder, idle=0.0) as place:
        assert place is None
    with meeting_place(shared.folder, idle=0.0) as place:
        assert place is not None
        assert JobPack(place, 0, 2).base_knobs == {"FSDP": "1", "DTYPE": "float32", "SEQ": "2"}
    with meeting_place(Sweep(tmp_path / "c").folder, idle=0.0) as place:
        assert place is None, "nobody came"
