"""A pack trains each of its trials as if it were alone."""

from __future__ import annotations

import errno
import json
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lora_tune.base.files import write_json
from lora_tune.base.paths import AttemptPaths
from lora_tune.launchers.pack_folder import PackFolder
from lora_tune.logs.failures import FailureKind, diagnose
from lora_tune.logs.mllog import MllogReader
from lora_tune.workloads.base import Job
from lora_tune.workloads.base import SlotTerms as JobSlot
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed import loop as loop_module
from lora_tune_recipes.packed import trial as trial_module
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.dropout import SlotDropout, drop, mixed
from lora_tune_recipes.packed.frozen import FrozenHeadLoss, FusedNorm, chunk_losses, fuse_norms
from lora_tune_recipes.packed.group import Group
from lora_tune_recipes.packed.loop import PackLoop
from lora_tune_recipes.packed.pack import Pack
from lora_tune_recipes.packed.scheduler import Admission
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.packed.speed import Speeds, TrialSpeed
from lora_tune_recipes.packed.trial import ClaimedTrial
from lora_tune_recipes.settings import Settings
from tests.recipes.test_many_adapters import single_trial

FEW: dict[str, object] = {"MAX_STEPS": 6, "SEQ": 32, "EVAL_SAMPLES": 3, "VAL_CHECK_INTERVAL": 8}


def trial(**changed: object) -> Settings:
    return knobs.read({name: str(value) for name, value in {**FEW, **changed}.items()})


@pytest.fixture(scope="module")
def base() -> Iterator[PackedBase]:
    before = torch.get_num_threads()
    yield PackedBase(trial())
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _company_always_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the measured gain of a pair is noise, which must not decide who trains beside whom."""
    monkeypatch.setattr("lora_tune_recipes.packed.speed.LEAST_GAIN", 0.0)


Curve = list[float]
PROBES = 2
"""Joins by which a trial's speed is measured before it trains: alone, and beside another of its shape."""


def alone(base: PackedBase, settings: Settings) -> Curve:
    """Training losses of a pack of one, and its eval loss at the end."""
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(slot)
    curve = []
    while slot.step < settings.max_steps:
        curve += [float(loss) for loss in pack.round().values()]
    return [*curve, *pack.evaluate([slot])]


DIFFERENT = st.fixed_dictionaries(
    {
        "LR": st.sampled_from([1e-4, 3e-3, 2e-2]),
        "SEED": st.integers(0, 2**31 - 1),
        "WARMUP_STEPS": st.integers(0, 4),
        "MINIBS,MBS": st.sampled_from([(2, 2), (4, 4), (4, 2), (2, 1)]),
        "LORA_RANK": st.sampled_from([4, 8, 16, 32, 64]),
        "LORA_ALPHA": st.sampled_from([8, 32]),
        "LORA_DROPOUT": st.sampled_from([0.0, 0.1, 0.5]),
        "LORA_TARGETS": st.sampled_from(["attention", "mlp", "all", "q_proj,v_proj", "embed_tokens,lm_head,o_proj"]),
        "MODULES_TO_SAVE": st.sampled_from(["", "norm"]),
        "DORA": st.sampled_from([0, 1]),
        "RANK_PATTERN": st.sampled_from(["", "q_proj=64,v_proj=4"]),
        "ALPHA_PATTERN": st.sampled_from(["", "q_proj=8"]),
        "RSLORA": st.sampled_from([0, 1]),
        "LORA_PLUS_RATIO": st.sampled_from([1, 4]),
        "WEIGHT_DECAY": st.sampled_from([0, 0.1]),
        "GRAD_CLIP": st.sampled_from([0, 0.3]),
        "ADAM_BETA2": st.sampled_from([0.95, 0.999]),
        "SEQ": st.sampled_from([16, 32]),
    }
)


def knobs_of(drawn: dict[str, object]) -> dict[str, object]:
    """The drawn knobs, with pairs that depend on each other taken apart."""
    found: dict[str, object] = {}
    for names, value in drawn.items():
        values = value if isinstance(value, tuple) else (value,)
        found |= dict(zip(names.split(","), values, strict=True))
    return found


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(DIFFERENT, min_size=2, max_size=4), seed=st.integers(0, 1000))
def test_a_trial_computes_the_same_to_the_bit_whoever_joins_and_leaves(
    base: PackedBase, drawn: list[dict[str, object]], seed: int
) -> None:
    trials = [trial(**knobs_of(one)) for one in drawn]
    chance = random.Random(seed)
    pack, left = Pack(base), dict.fromkeys(range(len(trials)))
    slots = [Slot(one, base.texts(one)) for one in trials]
    curves: dict[Slot, Curve] = {slot: [] for slot in slots}
    states = {}
    while left or pack.slots:
        for number in list(left):
            if chance.random() < 0.5:
                pack.join(slots[number], states.pop(number, None))
                del left[number]
        for slot, loss in pack.round().items() if pack.slots else ():
            curves[slot].append(float(loss))
            if slot.step == slot.settings.max_steps:
                curves[slot] += pack.evaluate([slot])
                pack.leave(slot)
            elif chance.random() < 0.1:  # it makes room for a while and comes back
                states[slots.index(slot)] = pack.leave(slot)
                left[slots.index(slot)] = None
    for one, slot in zip(trials, slots, strict=True):
        assert curves[slot] == alone(base, one)


def test_what_a_trial_drops_does_not_depend_on_which_modules_were_adapted_before() -> None:
    settings = trial(LORA_DROPOUT=0.3, LORA_TARGETS="v_proj,down_proj", MAX_STEPS=2)
    expected = alone(PackedBase(settings), settings)
    elsewhere = PackedBase(settings)
    alone(elsewhere, trial(LORA_TARGETS="down_proj,lm_head", MAX_STEPS=1))
    assert alone(elsewhere, settings) == expected


def test_a_trial_with_magnitudes_computes_the_same_whether_its_company_drops_or_not(base: PackedBase) -> None:
    settings = trial(DORA=1, LORA_DROPOUT=0, MAX_STEPS=3)
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(slot)
    pack.join(Slot(trial(DORA=1, LORA_DROPOUT=0.5, SEED=2), base.texts(settings)))
    curve = []
    while slot.step < settings.max_steps:
        curve.append(float(pack.round()[slot]))
    assert [*curve, *pack.evaluate([slot])] == alone(base, settings)


@pytest.mark.parametrize(
    "changed",
    [
        {"LORA_RANK": 4, "LORA_ALPHA": 8, "GRAD_CLIP": 0.1},
        {"LORA_TARGETS": "all", "RSLORA": 1, "ADAM_BETA2": 0.95, "WARMUP_STEPS": 3},
        {"LORA_PLUS_RATIO": 8, "WEIGHT_DECAY": 0.1, "LR": 1e-3},
        {"MINIBS": 4, "MBS": 2, "MIN_LR": 1e-4},
        {"RANK_PATTERN": "q_proj=32,v_proj=4", "ALPHA_PATTERN": "v_proj=64", "RSLORA": 1},
        {"DORA": 1, "LORA_RANK": 4, "LR": 2e-2, "WEIGHT_DECAY": 0.1},
        {"LORA_TARGETS": "embed_tokens,q_proj", "LORA_PLUS_RATIO": 4},
        {"LORA_TARGETS": "embed_tokens,down_proj", "DORA": 1, "LORA_RANK": 8},
        {"LORA_TARGETS": "lm_head,q_proj"},
        {"LORA_TARGETS": "lm_head"},
        {"MODULES_TO_SAVE": "lm_head,norm", "WEIGHT_DECAY": 0.1, "LORA_PLUS_RATIO": 4},
        {"MODULES_TO_SAVE": "embed_tokens", "MINIBS": 4, "MBS": 2, "GRAD_CLIP": 0.1},
    ],
)
def test_a_trial_in_a_pack_trains_what_the_recipe_trains(base: PackedBase, changed: dict[str, object]) -> None:
    one = trial(LORA_DROPOUT=0, VAL_CHECK_INTERVAL=1000, **changed)
    other = trial(SEED=9, LR=2e-2)
    pack, slot = Pack(base), Slot(one, base.texts(one))
    pack.join(Slot(other, base.texts(other)))
    pack.join(slot)
    while slot.step < one.max_steps:
        pack.round()
    assert pack.evaluate([slot]) == pytest.approx(single_trial(one)[-1:], abs=3e-5)


def test_what_is_dropped_has_the_asked_rate_and_keeps_the_mean(base: PackedBase) -> None:
    dropout = SlotDropout.of([0.0, 0.25], [mixed(1), mixed(2)], 5, torch.device("cpu"))
    assert dropout is not None
    dropped = drop(torch.ones(2, 400, 100), *dropout.of_layer(3))
    assert dropped[0].eq(1).all()
    assert dropped[1].eq(0).float().mean() == pytest.approx(0.25, abs=0.01)
    assert dropped[1].mean() == pytest.approx(1.0, abs=0.02)
    assert not torch.equal(drop(torch.ones(2, 400, 100), *dropout.of_layer(4))[1], dropped[1])


def test_a_base_that_computes_activations_again_trains_the_same_and_is_seen_to_work() -> None:
    changed: dict[str, object] = {"LORA_DROPOUT": 0.2, "MINIBS": 4, "MBS": 2}
    again, kept = trial(RECOMPUTE_GRANULARITY="full", **changed), trial(**changed)
    base = PackedBase(again)
    assert alone(base, again) == alone(PackedBase(kept), kept)
    assert base.works(), "a pass of nobody goes through layers that had adapters"


def test_the_chunked_loss_is_the_cross_entropy_and_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_tune_recipes.packed.frozen.CHUNK", 3)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(8, 5), torch.randn(11, 5), torch.randn(11)
    predict, counts = torch.randint(0, 11, (8,)), torch.rand(8)
    found, expected = (hidden.clone().requires_grad_() for _ in range(2))
    losses = FrozenHeadLoss.apply(found, weight, bias, predict, counts, chunk_losses)
    logits = torch.nn.functional.linear(expected, weight, bias)
    wanted = torch.nn.functional.cross_entropy(logits, predict, reduction="none") * counts
    (losses * torch.arange(8)).sum().backward()
    (wanted * torch.arange(8)).sum().backward()
    torch.testing.assert_close(losses, wanted)
    torch.testing.assert_close(found.grad, expected.grad)


def test_a_round_that_failed_half_way_is_made_again_without_a_trace(base: PackedBase) -> None:
    settings = trial(MINIBS=4, MBS=2, LORA_DROPOUT=0.2)
    pack, slot = Pack(base), Slot(settings, base.texts(settings))
    pack.join(slot)
    curve: Curve = []
    for number in range(20):
        if number == 3:
            pack.rewind()  # in the middle of the second step
        curve += [float(loss) for loss in pack.round().values()]
        if slot.step == settings.max_steps:
            break
    assert [*curve, *pack.evaluate([slot])] == alone(base, settings)


# -- the program around it


class Sweep:
    """Asks a pack for trials, and reads what it wrote of them."""

    def __init__(self, root: Path, pack: str = "0000") -> None:
        self.root, self.folder = root, PackFolder(root / "packs" / pack)
        self.folder.make()

    def ask(self, name: str, company: int = 0, **changed: object) -> AttemptPaths:
        attempt = AttemptPaths(self.root / "trials" / name)
        attempt.folder.mkdir(parents=True)
        read = {key: str(value) for key, value in {**FEW, **changed}.items()}
        slot = JobSlot(argv=(), knobs=read, company=company)
        job = Job(
            name=name.replace("/", "-"), folder=attempt.folder, token=f"of {name}", argv=(), log=attempt.log, slot=slot
        )
        assert self.folder.ask(job)
        return attempt

    def serve(self) -> None:
        assert PackLoop(self.folder, idle=0.0).serve()


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    return Sweep(tmp_path)


def end_of(attempt: AttemptPaths) -> dict[str, object]:
    found: dict[str, object] = json.loads(attempt.ended.read_text())
    return found


def read(attempt: AttemptPaths) -> MllogReader:
    reader = MllogReader()
    reader.feed(attempt.log.read_bytes())
    return reader


def test_every_trial_has_its_own_log_on_the_clock_of_a_trial_alone(sweep: Sweep) -> None:
    short, long = sweep.ask("a", MAX_STEPS=4), sweep.ask("b", SEED=2, TARGET=0.1)
    sweep.serve()
    for attempt, samples in ((short, [8.0, 16.0]), (long, [8.0, 16.0, 24.0])):
        run = read(attempt).run()
        assert [point.samples for point in run.evals] == samples
        assert run.status == "aborted"
        assert run.hyperparameters["clock"] == "alone"
        packed = run.hyperparameters["packed_seconds"]
        assert isinstance(packed, float)
        assert run.seconds is not None
        assert run.seconds > 0
        assert end_of(attempt)["exit_code"] == 0
    assert 0 < float(str(end_of(short)["node_share"])) < 1
    first, second = (read(attempt).run() for attempt in (short, long))
    # Of one shape, so as fast alone: an eval comes as late in one as in the other.
    assert first.evals[1].seconds == pytest.approx(second.evals[1].seconds, abs=0.002)


def test_a_trial_that_reaches_its_target_ends_and_says_so(sweep: Sweep) -> None:
    attempt = sweep.ask("a", TARGET=50)
    sweep.serve()
    assert read(attempt).run().status == "success"
    assert len(read(attempt).run().evals) == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"LR": "much"}, "LR='much': allowed is"),
        ({"LORA_TARGETS": "qqq"}, "no adapter fits a layer qqq of this model; allowed are"),
        ({"DATADIR": "/"}, "allowed is one file train"),
        ({"SEQ": 1024}, "SEQ=1024: allowed is at most the model's 512 positions"),
        ({"TP": 2}, "a trial in a pack has one process"),
        ({"FSDP": 1}, "FSDP=1: a trial in a pack has one process; allowed is 0"),
        ({"MODULES_TO_SAVE": "head"}, "MODULES_TO_SAVE: this model has no module head; allowed are"),
        ({"LOAD_IN_4BIT": "nf4"}, "LOAD_IN_4BIT=nf4: this pack has nothing"),
        ({"DTYPE": "bfloat16"}, "DTYPE=bfloat16: this pack has auto"),
    ],
)
def test_what_a_trial_is_to_blame_for_ends_it_and_no_other(
    sweep: Sweep, changed: dict[str, object], message: str
) -> None:
    good, bad = sweep.ask("a", MAX_STEPS=2), sweep.ask("b", **changed)
    sweep.serve()
    assert end_of(bad)["exit_code"] == 2
    assert message in bad.log.read_text().splitlines()[-1]
    failure = diagnose(bad.log.read_bytes(), exit_code=2)
    assert failure.kind in (FailureKind.CONFIGURATION, FailureKind.INFEASIBLE), "no second attempt"
    assert end_of(good)["exit_code"] == 0


def test_a_stopped_trial_leaves_and_the_others_train_on(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.0)
    stopped, other = sweep.ask("a", MAX_STEPS=10**6), sweep.ask("b", MAX_STEPS=4)
    rounds = Pack.round

    def stop_after_the_first(pack: Pack, *done: Any) -> object:
        sweep.folder.stop("a")
        return rounds(pack, *done)

    monkeypatch.setattr(Pack, "round", stop_after_the_first)
    sweep.serve()
    assert end_of(stopped)["exit_code"] == 143
    assert end_of(other)["exit_code"] == 0
    assert len(read(other).run().evals) == 2


@pytest.mark.parametrize(("told", "for_others"), [(None, 1), (3, 0)])
def test_beside_other_packs_one_takes_what_it_trains_at_once_and_leaves_them_the_rest(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, told: int | None, for_others: int
) -> None:
    if told is not None:
        sweep.folder.widen(told)
    attempts = [sweep.ask(name, MAX_STEPS=2) for name in "abc"]
    rounds, left = Pack.round, []

    def count(pack: Pack, *done: Any) -> object:
        left.append(3 - len(list(sweep.folder.paths.taken.iterdir())))
        return rounds(pack, *done)

    # Its speed is known: a short run beforehand would be counted, too.
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", count)
    assert PackLoop(sweep.folder, idle=0.0, packs=2, slots=2).serve()
    assert left[0] == for_others
    for attempt in attempts:
        assert end_of(attempt)["exit_code"] == 0
        assert 0 < float(str(end_of(attempt)["node_share"])) <= 0.5, "the other pack has the node's other half"


def test_a_trial_whose_job_was_killed_trains_in_small_company_and_what_does_not_fit_beside_it_is_untouched(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a pack that it kills again dies of it alone: the others have lost nothing."""
    for name, company in {"a": 0, "b": 0, "c": 2, "d": 2, "e": 1, "f": 0}.items():
        sweep.ask(name, company, MAX_STEPS=2)
    rounds, seen = Pack.round, set()

    def count(pack: Pack, *done: Any) -> object:
        claimed = [file.parent for file in (sweep.root / "trials").glob("*/claim.json")]
        seen.add("".join(sorted(place.name for place in claimed if not AttemptPaths(place).ended.exists())))
        return rounds(pack, *done)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", count)
    sweep.serve()
    assert seen == {"ab", "cd", "e", "f"}


def test_beside_other_packs_one_that_cannot_record_an_end_hands_its_trials_over(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, other = sweep.ask("a", MAX_STEPS=2), sweep.ask("b", MAX_STEPS=10**6)
    end = ClaimedTrial.end

    def no_room_for_the_first(tenant: ClaimedTrial, code: int) -> None:
        if tenant.name == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        end(tenant, code)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(ClaimedTrial, "end", no_room_for_the_first)
    assert not PackLoop(sweep.folder, idle=0.0, packs=2, slots=2).serve(), (
        "else the job would wait for its end for ever"
    )
    assert not lost.ended.exists()
    assert other.checkpoint.exists()


@pytest.mark.parametrize("gone", ["the attempt's folder", "its log, and room for a record"])
def test_beside_other_packs_one_that_cannot_claim_a_trial_hands_its_trials_over(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    lost, other = sweep.ask("a", MAX_STEPS=2), sweep.ask("b", MAX_STEPS=6)
    if gone == "the attempt's folder":
        shutil.rmtree(lost.folder)
    else:
        lost.log.mkdir()

    def no_room_for_its_end(path: Path, content: dict[str, object]) -> None:
        if path == lost.ended:
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, content)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr("lora_tune_recipes.packed.trial.write_json", no_room_for_its_end)
    assert not PackLoop(sweep.folder, idle=0.0, packs=2, slots=2).serve(), (
        "else the job would wait for its end for ever"
    )
    assert not lost.ended.exists()
    assert other.checkpoint.exists()


def test_a_pack_that_is_let_go_trains_what_it_has_and_ends(sweep: Sweep) -> None:
    attempt = sweep.ask("a", MAX_STEPS=2)
    sweep.folder.let_go()
    assert PackLoop(sweep.folder, idle=1e9).serve()
    assert end_of(attempt)["exit_code"] == 0


def test_a_trial_that_another_process_claimed_is_left_to_it(sweep: Sweep) -> None:
    attempt = sweep.ask("a", MAX_STEPS=2)
    attempt.claim.write_text("{}")
    sweep.serve()
    assert not attempt.log.exists()
    assert not attempt.ended.exists()


def test_a_pack_that_is_asked_to_end_hands_its_trials_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"MAX_STEPS": 6, "LORA_DROPOUT": 0.2, "MINIBS": 4, "MBS": 2}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    interrupted = [first.ask(f"{i}/attempt-0", SEED=i, **few) for i in (1, 2)]
    host, rounds = PackLoop(first.folder, idle=0.0), Pack.round

    def asked_in_the_middle(pack: Pack, *done: Any) -> object:
        if any(slot.step == 3 and slot.passes == 1 for slot in pack.slots):
            host.stop()
        return rounds(pack, *done)

    # Its speed is known: a short run beforehand would be stopped instead.
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", asked_in_the_middle)
    assert not host.serve()
    assert not any(attempt.ended.exists() for attempt in interrupted)
    monkeypatch.setattr(Pack, "round", rounds)
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(9.0, 9.0, 0))
    going_on = second.ask("1/attempt-1", SEED=1, **few)
    changed = second.ask("2/attempt-1", SEED=2, **{**few, "LR": 1e-4})
    second.serve()
    run = read(going_on).run()
    assert [(point.samples, point.seconds) for point in run.evals] == [(8.0, 2.5), (16.0, 5.0), (24.0, 7.5)]
    assert run.hyperparameters["lora_tune_attempt"] == "of 1/attempt-1"
    assert len(read(going_on).runs()) == 1
    settings = trial(SEED=1, **few)
    assert run.evals[-1].loss == alone(PackedBase(settings), settings)[-1]
    # Of other knobs nothing is taken over.
    assert [point.samples for point in read(changed).run().evals] == [8.0, 16.0, 24.0]
    assert read(changed).run().evals[0].loss != read(interrupted[1]).run().evals[0].loss


def test_a_pack_whose_folder_is_removed_hands_its_trials_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"MAX_STEPS": 6, "LORA_DROPOUT": 0.2}
    first, second = Sweep(tmp_path), Sweep(tmp_path, "0001")
    attempt = first.ask("1/attempt-0", **few)
    rounds = Pack.round

    def removed_in_the_middle(pack: Pack, *done: Any) -> object:
        if pack.slots[0].step == 3:
            shutil.rmtree(first.folder.paths.folder, ignore_errors=True)
        return rounds(pack, *done)

    monkeypatch.setattr(loop_module, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr("lora_tune_recipes.packed.scheduler.TELL_SECONDS", 0.0)
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", removed_in_the_middle)
    assert not PackLoop(first.folder, idle=0.0).serve()
    assert not attempt.ended.exists()
    monkeypatch.setattr(Pack, "round", rounds)
    going_on = second.ask("1/attempt-1", **few)
    second.serve()
    assert attempt.checkpoint.exists()
    settings = trial(**few)
    assert read(going_on).run().evals[-1].loss == alone(PackedBase(settings), settings)[-1]


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_clock_that_is_set_while_a_trial_waits_or_trains_does_not_move_its_log(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    attempt, began = sweep.ask("a", MAX_STEPS=4), time.time()
    clock = time.time

    def set_while_it_is_measured(_: Speeds, slot: Slot) -> TrialSpeed:
        monkeypatch.setattr("time.time", lambda: clock() + step)
        return TrialSpeed(1.0, 0.5, 0)

    monkeypatch.setattr(Speeds, "of", set_while_it_is_measured)
    sweep.serve()
    run = read(attempt).run()
    assert [point.seconds for point in run.evals] == [2.5, 5.0]
    assert run.run_start_ms == pytest.approx(began * 1000, abs=60_000)
    assert end_of(attempt)["node_share"] == pytest.approx(1.0, abs=0.2)


def test_sixty_four_trials_of_all_shapes_train_side_by_side_as_each_alone(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(4)
    kinds = [
        {"SEQ": chance.choice([8, 16]), "LORA_RANK": chance.choice([4, 8, 16, 32, 64]), "DORA": i % 2,
         "MINIBS": 2, "MBS": chance.choice([1, 2]), "LORA_DROPOUT": chance.choice([0.0, 0.3]), "SEED": i,
         "LORA_TARGETS": chance.choice(["attention", "q_proj", "mlp"]), "EVAL_SAMPLES": 1, "MAX_STEPS": 1 + i % 3}
        for i in range(64)
    ]  # fmt: skip
    widths, rounds = [], Pack.round

    def counted(pack: Pack, *done: Any) -> object:
        widths.append(len(pack.slots))
        return rounds(pack, *done)

    monkeypatch.setattr(Speeds, "of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", counted)
    attempts = [sweep.ask(f"{i:02d}", **kind) for i, kind in enumerate(kinds)]
    sweep.serve()
    assert widths[0] == 64
    assert [end_of(attempt)["exit_code"] for attempt in attempts] == [0] * 64
    monkeypatch.setattr(Pack, "round", rounds)
    base = PackedBase(trial())
    for i in range(0, 64, 9):  # a product of 64 at once may be summed in another order than one alone: a last bit
        assert read(attempts[i]).run().evals[-1].loss == pytest.approx(alone(base, trial(**kinds[i]))[-1], rel=1e-6)


def full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("what", ["claim", "state"])
def test_a_disk_that_is_full_for_a_while_ends_no_trial(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    training, new = sweep.ask("a", MAX_STEPS=4), sweep.ask("b", SEED=2, MAX_STEPS=4)
    monkeypatch.setattr("lora_tune_recipes.packed.scheduler.TELL_SECONDS", 0.0)
    if what == "state":
        monkeypatch.setattr(PackFolder, "tell", full_disk)
    else:
        created = trial_module.create_json
        monkeypatch.setattr(
            trial_module, "create_json", lambda path, known: full_disk() if path == new.claim else created(path, known)
        )
    sweep.serve()
    assert end_of(training)["exit_code"] == 0
    assert len(read(training).run().evals) == 2
    assert new.ended.exists() == (what == "state"), "one without a claim is run again when the pack has ended"


def test_a_trial_that_cannot_be_saved_keeps_no_other_from_it(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = sweep.ask("a"), sweep.ask("b", SEED=2)
    first.checkpoint.with_suffix(".partial").symlink_to("/dev/full")
    host, rounds = PackLoop(sweep.folder, idle=0.0), Pack.round

    def asked_to_end(pack: Pack, *done: Any) -> object:
        host.stop()
        return rounds(pack, *done)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "round", asked_to_end)
    assert not host.serve()
    assert (first.checkpoint.exists(), second.checkpoint.exists()) == (False, True)


@pytest.mark.parametrize("damage", [b"", b"x" * 99])
def test_a_damaged_checkpoint_is_none_and_the_trial_begins_anew(sweep: Sweep, damage: bytes) -> None:
    earlier = AttemptPaths(sweep.root / "trials" / "1" / "attempt-0")
    earlier.folder.mkdir(parents=True)
    earlier.checkpoint.write_bytes(damage)
    attempt = sweep.ask("1/attempt-1", MAX_STEPS=2)
    sweep.serve()
    assert end_of(attempt)["exit_code"] == 0
    assert len(read(attempt).run().evals) == 1


def test_out_of_memory_lets_some_wait_and_loses_no_trial(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = [sweep.ask(f"{i}", SEED=i, MAX_STEPS=4, LORA_DROPOUT=0.2) for i in range(4)]
    rounds, widths = Pack.round, []

    def short_of_memory(pack: Pack, *done: Any) -> object:
        widths.append(len(pack.slots))
        if len(pack.slots) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rounds(pack, *done)

    monkeypatch.setattr(Pack, "round", short_of_memory)
    # On a CPU memory is never known to be short: here a trial takes one unit, and is told of.
    monkeypatch.setattr(Admission, "fits", lambda self, present, new: self.limit is None or len(present) < 2)
    sweep.serve()
    assert max(widths) == 4
    assert [end_of(attempt)["exit_code"] for attempt in attempts] == [0] * 4
    monkeypatch.setattr(Pack, "round", rounds)
    settings = trial(SEED=3, MAX_STEPS=4, LORA_DROPOUT=0.2)
    assert read(attempts[3]).run().evals[-1].loss == alone(PackedBase(settings), settings)[-1]


def test_a_trial_that_made_room_for_the_evaluation_of_another_is_evaluated_when_it_is_back(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = [sweep.ask(f"{i}", SEED=i, MAX_STEPS=4) for i in range(2)]
    evaluate, shrunk = Pack.evaluate, []

    def only_alone(pack: Pack, slots: Any) -> list[float]:
        if len(pack.slots) > 1:
            shrunk.append(len(slots))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return evaluate(pack, slots)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Pack, "evaluate", only_alone)
    monkeypatch.setattr(Admission, "fits", lambda self, present, new: self.limit is None or not present)
    sweep.serve()
    assert shrunk == [2, 1]
    monkeypatch.setattr(Pack, "evaluate", evaluate)
    for seed, attempt in enumerate(attempts):
        settings = trial(SEED=seed, MAX_STEPS=4)
        assert end_of(attempt)["exit_code"] == 0
        assert [point.samples for point in read(attempt).run().evals] == [8.0, 16.0]
        assert read(attempt).run().evals[-1].loss == alone(PackedBase(settings), settings)[-1]


def poison_of(kind: str, folder: Path) -> dict[str, object]:
    """The knobs of a trial that goes wrong in its own way."""
    if kind == "it becomes NaN":
        return {"LR": 10, "GRAD_CLIP": 0, "LORA_ALPHA": 1e30, "VAL_CHECK_INTERVAL": 4}
    if kind == "its data name a module that is nowhere":
        pickled = b"cnowhere_at_all\nThing\n."
        header = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
        for split in ("train", "validation"):
            (folder / f"{split}.npy").write_bytes(
                b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + pickled
            )
        return {"DATADIR": folder}
    if kind == "it has no validation data":
        np.save(folder / "train.npy", np.ones((4, 33), np.int64))
        np.save(folder / "validation.npy", np.ones((0, 33), np.int64))
        return {"DATADIR": folder}
    if kind == "its adapter fits nowhere":
        return {"LORA_RANK": 10**9}
    (folder / "file").touch()
    return {"SAVE_ADAPTER": folder / "file", "MAX_STEPS": 2}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("it becomes NaN", "aborted"),
        ("its data name a module that is nowhere", "No module named 'nowhere_at_all'"),
        ("it has no validation data", "validation: no sequences; allowed is one at least"),
        ("its adapter fits nowhere", "LORA_RANK, LORA_TARGETS: the adapter has"),
        ("its adapter cannot be saved", "FileExistsError"),
    ],
)
def test_a_poisoned_trial_ends_for_itself_and_the_others_train_the_same_to_the_bit(
    sweep: Sweep, tmp_path: Path, kind: str, said: str
) -> None:
    knobs_of_others = [{"SEED": 4, "LORA_RANK": 8}, {"SEED": 5, "MINIBS": 8, "MBS": 4, "LORA_DROPOUT": 0.2}]
    first = sweep.ask("a", **knobs_of_others[0])
    poisoned = sweep.ask("b", **poison_of(kind, tmp_path))
    others = [first, sweep.ask("c", **knobs_of_others[1])]
    sweep.serve()
    assert said in poisoned.log.read_text().splitlines()[-1]
    assert (end_of(poisoned)["exit_code"] == 0) == (kind == "it becomes NaN")
    base = PackedBase(trial())
    for attempt, changed in zip(others, knobs_of_others, strict=True):
        assert end_of(attempt)["exit_code"] == 0
        assert read(attempt).run().evals[-1].loss == alone(base, trial(**changed))[-1]


def test_an_error_in_the_arithmetic_of_one_trial_ends_that_trial_alone(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = Slot.rows

    def broken(slot: Slot) -> Any:
        if slot.settings.seed == 13 and slot.step == 2:
            raise IndexError("index 9 is out of bounds")
        return rows(slot)

    monkeypatch.setattr(Slot, "rows", broken)
    bad, good = sweep.ask("a", SEED=13), sweep.ask("b", SEED=2, LORA_DROPOUT=0.2)
    sweep.serve()
    assert "packed_lora: raised IndexError: index 9 is out of bounds" in bad.log.read_text().splitlines()[-1]
    assert diagnose(bad.log.read_bytes(), exit_code=1).kind is FailureKind.UNKNOWN, "no refusal: it is tried again"
    assert end_of(bad)["exit_code"] == 1
    settings = trial(SEED=2, LORA_DROPOUT=0.2)
    assert read(good).run().evals[-1].loss == alone(PackedBase(settings), settings)[-1]


def test_a_trial_for_whose_adapter_there_is_no_memory_waits_until_others_have_gone(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins, tries = Group.join, []

    def short_beside_others(group: Group, slot: Slot, *state: Any) -> None:
        if slot.settings.seed == 2:
            tries.append(others := [t for t in (first, second) if not t.ended.exists()])
            if len(tries) > PROBES and others[0] is first:
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        joins(group, slot, *state)

    monkeypatch.setattr(Group, "join", short_beside_others)
    first, second = sweep.ask("a", MAX_STEPS=4), sweep.ask("b", SEED=2, LORA_RANK=4)
    sweep.serve()
    assert len(tries) > PROBES + 1
    assert [end_of(attempt)["exit_code"] for attempt in (first, second)] == [0, 0]


def test_a_step_for_which_memory_is_short_is_made_again_as_if_for_the_first_time(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = [{"SEED": 1, "LORA_RANK": 4}, {"SEED": 2, "LORA_RANK": 8}]
    expected = [alone(PackedBase(trial()), trial(**one))[-1] for one in changed]
    attempts = [sweep.ask(f"{i}", **one) for i, one in enumerate(changed)]
    steps, calls = Group.step, []

    def short_once(group: Group, due: Any) -> Any:
        calls.append(group.slots[0].settings.seed)
        if group.slots[0].step == 3 and group.slots[0].settings.seed == 2 and calls.count(-1) == 0:
            calls.append(-1)
            with monkeypatch.context() as patch:
                patch.setattr(torch, "empty_like", out_of_memory)
                return steps(group, due)
        return steps(group, due)

    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 0.5, 0))
    monkeypatch.setattr(Group, "step", short_once)
    sweep.serve()
    assert -1 in calls
    assert [read(attempt).run().evals[-1].loss for attempt in attempts] == expected


def out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory")


def test_what_does_not_fit_alone_fails_and_says_that_it_was_memory(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(pack: Pack, *done: Any) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")

    attempt = sweep.ask("a")
    monkeypatch.setattr(Pack, "round", never)
    sweep.serve()
    assert end_of(attempt)["exit_code"] == 1
    assert "OutOfMemoryError: CUDA out of memory" in attempt.log.read_text().splitlines()[-1]


def test_a_fault_of_the_pack_is_the_last_line_of_every_log(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pack: Pack, *done: Any) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    attempts = [sweep.ask("a"), sweep.ask("b", SEED=2)]
    monkeypatch.setattr(Pack, "round", broken)
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 1.0, 0))
    with pytest.raises(RuntimeError):
        sweep.serve()
    for attempt in attempts:
        assert "illegal memory access" in attempt.log.read_text().splitlines()[-1]


def test_trials_that_gain_nothing_by_company_train_one_at_a_time(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds, widths = Pack.round, []

    def counted(pack: Pack, *done: Any) -> object:
        widths.append(len(pack.slots))
        return rounds(pack, *done)

    attempts = [sweep.ask("a", MAX_STEPS=2), sweep.ask("b", SEED=2, MAX_STEPS=2)]
    monkeypatch.setattr("lora_tune_recipes.packed.speed.LEAST_GAIN", 1.05)
    monkeypatch.setattr("lora_tune_recipes.packed.speed.Speeds.of", lambda self, slot: TrialSpeed(1.0, 1.0, 0, 1.0))
    monkeypatch.setattr(Pack, "round", counted)
    sweep.serve()
    assert set(widths) == {1}
    assert [end_of(attempt)["exit_code"] for attempt in attempts] == [0, 0]


def test_whether_two_gain_by_company_is_measured_before_they_train(
    base: PackedBase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lora_tune_recipes.packed.speed.LEAST_GAIN", 1.05)
    clock = iter([float(n) for n in range(1000)])
    monkeypatch.setattr("time.process_time", lambda: next(clock))  # every step lasts a second, of one and of two
    settings = trial()
    assert Speeds(base).of(Slot(settings, base.texts(settings))).pair_gain == 2.0
    monkeypatch.setattr(Speeds, "_step_seconds", lambda self, pack, accumulation: 1.0 * len(pack.slots))
    speed = Speeds(base).of(Slot(settings, base.texts(settings)))
    assert not speed.packs
    assert "gain nothing side by side (1.00 x one)" in capsys.readouterr().out


def test_admission_counts_what_each_takes_alone_and_learns_from_a_failure() -> None:
    admission = Admission(torch.device("cpu"))
    assert admission.fits([10] * 100, 10)
    admission.limit = 35.0
    assert admission.fits([], 99)
    assert admission.fits([10, 10], 10)
    assert not admission.fits([10, 10, 10], 10)
    admission.too_much([10, 10, 10])
    assert admission.fits([10], 10)
    assert not admission.fits([10, 10], 10)


def test_norms_that_compute_the_same_are_fused_and_others_left() -> None:
    class AddsOne(torch.nn.Module):
        def __init__(self, plain: torch.nn.Module) -> None:
            super().__init__()
            self.weight, self.variance_epsilon = plain.weight, plain.variance_epsilon

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.rms_norm(x, (len(self.weight),), self.weight + 1, self.variance_epsilon)

    plain = PackedBase(trial()).model.get_decoder().norm
    both = torch.nn.ModuleList([plain, AddsOne(plain)])
    x = torch.randn(3, len(plain.weight))
    before = [norm(x) for norm in both]
    fuse_norms(both)
    assert [type(norm) is FusedNorm for norm in both] == [True, False]
    for norm, expected in zip(both, before, strict=True):
        torch.testing.assert_close(norm(x), expected)
    own = torch.rand(len(plain.weight))
    found = torch.func.functional_call(both[0], {"weight": own}, (x,))
    torch.testing.assert_close(found, before[0] / plain.weight * own, msg="a slot's copy stands in for its weight")
