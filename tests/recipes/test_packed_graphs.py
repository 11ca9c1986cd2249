"""Recorded and compiled passes of packs, on a CPU: a graph is played by the work that it would record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from lora_tune.base.errors import InputError
from lora_tune_recipes import settings as knobs
from lora_tune_recipes.packed import base as base_module
from lora_tune_recipes.packed.base import PackedBase
from lora_tune_recipes.packed.dropout import drop, drop_on_gpu
from lora_tune_recipes.packed.group import exact, padded
from lora_tune_recipes.packed.pack import Pack, PassInputs
from lora_tune_recipes.packed.slot import Slot
from lora_tune_recipes.settings import Settings

FEW: dict[str, object] = {"MAX_STEPS": 20, "SEQ": 32, "EVAL_SAMPLES": 3, "MINIBS": 4, "MBS": 2}


class PlayedGraph:
    """Does what a graph would: work on the tensors that it was recorded with, and no others."""

    recorded = replayed = 0

    def __init__(self, work: Callable[[Any], torch.Tensor], example: Any, pool: Any) -> None:
        self._work, self._own = work, type(example)(*(tensor.clone() for tensor in example))
        PlayedGraph.recorded += 1
        work(self._own)

    def fits(self, inputs: Any) -> bool:
        return all(own.shape == new.shape for own, new in zip(self._own, inputs, strict=True))

    def replay(self, inputs: Any) -> torch.Tensor:
        PlayedGraph.replayed += 1
        for own, new in zip(self._own, inputs, strict=True):
            own.copy_(new)
        return self._work(self._own).clone()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> type[PlayedGraph]:
    monkeypatch.setattr(base_module, "StepGraph", PlayedGraph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr("lora_tune_recipes.packed.base.why_eager", lambda *_: "")
    monkeypatch.setattr(PlayedGraph, "recorded", 0)
    monkeypatch.setattr(PlayedGraph, "replayed", 0)
    return PlayedGraph


def trial(**changed: object) -> Settings:
    return knobs.read({name: str(value) for name, value in {**FEW, **changed}.items()})


def curves(base: PackedBase, patience: float) -> list[list[float]]:
    """The losses of five trials that join and leave; the second goes out and comes back."""
    pack, losses = Pack(base, patience), [[] for _ in range(5)]
    shared = {"CUDA_GRAPH": base.settings.cuda_graph, "TORCH_COMPILE": int(base.settings.torch_compile)}
    own = [
        {"SEED": i, "LR": 1e-3 * (1 + i), "LORA_RANK": (4, 16)[i % 2], "LORA_DROPOUT": 0.1 * (i % 2)} for i in range(5)
    ]
    trials = [trial(**shared, **one) for one in own]
    slots = [Slot(one, base.texts(one)) for one in trials]
    left = None
    for round_number in range(24):
        if round_number in (0, 2, 4, 6, 8):
            pack.join(slots[round_number // 2])
        if round_number == 9:
            left = pack.leave(slots[1])
        if round_number == 13:
            pack.join(slots[1], left)
        if round_number == 18:
            pack.leave(slots[0])
        for slot, loss in pack.round().items():
            losses[slots.index(slot)].append(float(loss))
    for _ in range(3):
        for number, loss in zip(range(1, 5), pack.evaluate(slots[1:]), strict=True):
            losses[number].append(loss)
    return losses


def test_trials_that_end_together_leave_their_pass_to_those_that_follow(graphs: type[PlayedGraph]) -> None:
    base = PackedBase(trial())
    pack = Pack(base, 0.0)

    def four_join() -> list[Slot]:
        slots = [Slot(one, base.texts(one)) for one in (trial(SEED=i) for i in range(4))]
        for slot in slots:
            pack.join(slot)
        pack.round()
        return slots

    first = four_join()
    pack._patience = 1000.0
    recorded = graphs.recorded
    for slot in first:
        pack.leave(slot)
    for slot in four_join():
        pack.leave(slot)
    assert graphs.recorded == recorded
    pack.join(Slot(trial(SEQ=16), base.texts(trial(SEQ=16))))
    assert len(pack._groups) == 1, "another shape may need the memory"


def test_rows_without_slots_go_when_they_were_not_needed_for_a_while_or_memory_is_short(
    graphs: type[PlayedGraph],
) -> None:
    base = PackedBase(trial())
    pack = Pack(base, 0.0)
    slots = [Slot(one, base.texts(one)) for one in (trial(SEED=i) for i in range(4))]
    for slot in slots:
        pack.join(slot)
    pack.round()
    group, pack._patience = pack.group(slots[0]), 1000.0
    for slot in slots[1:]:
        pack.leave(slot)
    pack.round()
    assert (group.rows, group.graph is None) == (4, False)
    pack.give_up()
    assert (group.rows, group.graph) == (1, None)


def test_an_evaluation_is_recorded_when_it_comes_again(graphs: type[PlayedGraph]) -> None:
    base = PackedBase(trial())
    pack = Pack(base, 0.0)
    slots = [Slot(one, base.texts(one)) for one in (trial(SEED=i, LR=0.01 * (1 + i)) for i in range(3))]
    for slot in slots:
        pack.join(slot)
    for _ in range(4):
        pack.round()
    recorded, eager = graphs.recorded, pack.evaluate(slots)
    assert graphs.recorded == recorded
    assert pack.evaluate(slots) == pytest.approx(eager, rel=1e-5)
    assert len(set(eager)) == 3
    pack.evaluate(slots)
    # Of three sequences the passes have two and one, filled up: of one shape.
    assert graphs.recorded == recorded + 1


def test_recorded_passes_train_as_eager_ones_while_trials_come_and_go(graphs: type[PlayedGraph]) -> None:
    expected = curves(PackedBase(trial(CUDA_GRAPH=0)), 0.0)
    assert graphs.recorded == 0
    found = curves(PackedBase(trial()), 0.0)
    assert found == [pytest.approx(own, rel=1e-4) for own in expected]
    assert graphs.recorded < graphs.replayed / 3
    assert graphs.recorded >= 3, "at 1, 2, 4 and 8 rows"


def test_a_pass_that_lasts_a_moment_is_not_recorded(graphs: type[PlayedGraph]) -> None:
    curves(PackedBase(trial()), 1000.0)
    assert graphs.recorded == graphs.replayed == 0


def test_a_recording_without_memory_leaves_the_pass_eager(
    graphs: type[PlayedGraph], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = curves(PackedBase(trial(CUDA_GRAPH=0)), 0.0)

    def short(work: Callable[[PassInputs], torch.Tensor], example: PassInputs, pool: Any) -> None:
        work(example)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(base_module, "StepGraph", short)
    assert curves(PackedBase(trial()), 0.0) == [pytest.approx(own, rel=1e-4) for own in expected]
    assert "kernels are launched one by one" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changed",
    [
        {"CUDA_GRAPH": 0},
        {"PACKING": 1},
        {"DORA": 1},
        {"MODULES_TO_SAVE": "norm"},
        {"LORA_TARGETS": "q_proj,embed_tokens"},
        {"RECOMPUTE_GRANULARITY": "full"},
    ],
)
def test_what_cannot_be_recorded_is_eager_and_refuses_to_be_compiled(changed: dict[str, object]) -> None:
    base = PackedBase(trial())
    assert base.why_not_recorded(trial(**changed))
    compiled = PackedBase(trial(TORCH_COMPILE=1))
    with pytest.raises(InputError, match="TORCH_COMPILE=1: a pack does that with passes that it records"):
        compiled.check(trial(TORCH_COMPILE=1))


def test_compiled_passes_train_as_eager_ones_and_share_programs(
    graphs: type[PlayedGraph], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_tune_recipes.packed.pack.Pack._dropout", lambda *_: None)
    expected = curves(PackedBase(trial(CUDA_GRAPH=0)), 0.0)
    torch.compiler.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda work, **options: compiled(work, backend=backend, **options))
    assert curves(PackedBase(trial(TORCH_COMPILE=1)), 0.0) == [pytest.approx(own, rel=1e-4) for own in expected]
    # One for all layers, the first among them, of each shape, and one for the head: never again for each trial.
    assert 0 < backend.frame_count <= graphs.recorded + 2, (backend.frame_count, graphs.recorded)
    torch.compiler.reset()


def test_what_drops_activations_is_found_in_the_compilers_cache_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    drop_on_gpu.register_kernel("cpu", lambda x, rates, seeds: x * (1 - rates[:, None, None]) + seeds[:, None, None])
    x, rates, seeds = torch.ones(2, 3, 4, requires_grad=True), torch.tensor([0.0, 0.5]), torch.tensor([0, 2])
    for outcome in ("autograd_cache_miss", "autograd_cache_hit"):
        counters.clear()
        torch.compile(lambda x: drop(x, rates, seeds).sum())(x).backward()
        torch.compiler.reset()
        assert counters["aot_autograd"][outcome] == 1, dict(counters["aot_autograd"])
    assert x.grad is not None
    assert x.grad[:, 0, 0].tolist() == [2 * 1, 2 * 2.5]


def test_rows_are_few_sizes_and_shrink_only_when_half_are_empty() -> None:
    assert [padded(n, 0) for n in (1, 2, 3, 5, 9, 16, 17, 65)] == [1, 2, 4, 8, 12, 16, 24, 96]
    assert [padded(n, 16) for n in (15, 9, 8)] == [16, 16, 8]
    assert exact(5, 16) == 5
