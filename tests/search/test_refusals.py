"""A refusal by a trial's own program is run once, and the same combination is not asked for again."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from hypothesis import given
from hypothesis import strategies as st
from optuna.trial import TrialState

from lora_tune.config.study import load_study
from lora_tune.logs.failures import FailureKind, diagnose, is_refusal
from lora_tune.search.samplers import make_sampler
from lora_tune.search.throughput import refused_chance

FOUR = Path(__file__).resolve().parents[2] / "studies" / "nemo_h200x4.toml"
REFUSALS = (
    "AssertionError: Do not use enable_cuda_graph (deprecated) with cuda_graph_impl=local.",
    "ValueError: tp_comm_overlap is only supported with sequence_parallel",
    "AssertionError: num_layers (80) must be divisible by pipeline_model_parallel_size (3)",
    "[rank0]: RuntimeError: FP8 weights cannot be used with CPU offloading",
)
OTHERS = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 80.00 MiB.",
    "ValueError: the training went wrong",
    "RuntimeError: NCCL Error 2: unhandled system error",
)


@pytest.mark.parametrize("line", REFUSALS)
def test_a_library_that_refuses_the_values_makes_them_infeasible_for_certain(line: str) -> None:
    found = diagnose(f'Traceback (most recent call last):\n  File "train.py", line 3\n{line}\n', exit_code=1)
    assert (found.kind, found.certain) == (FailureKind.INFEASIBLE, True)
    assert is_refusal(found.sentence)


@pytest.mark.parametrize("line", OTHERS)
def test_other_failures_are_no_refusals(line: str) -> None:
    assert not is_refusal(line)


def test_the_same_point_is_refused_again_and_what_shares_nothing_with_it_is_not() -> None:
    refused, other = {"GRAPH": 1, "FP8": 1}, {"GRAPH": 0, "FP8": 0}
    assert refused_chance([refused, other], [refused], []).tolist() == [1.0, 0.0]


def test_what_was_accepted_narrows_the_rule() -> None:
    """GRAPH=1 was refused wherever it was asked for, and everything else has been accepted with GRAPH=0."""
    refused = [{"GRAPH": 1, "FP8": 1, "layout": "tp2 pp1 cp1 minibs4 mbs1 sp1"}]
    again = {"GRAPH": 1, "FP8": 0, "layout": "tp4 pp1 cp1 minibs8 mbs1"}
    free = {"GRAPH": 0, "FP8": 1, "layout": "tp2 pp1 cp1 minibs4 mbs1 sp1"}
    before = refused_chance([again, free], refused, [])
    after = refused_chance([again, free], refused, [free])
    assert after[0] > 1.4 * before[0]
    assert after[1] == 0 < before[1]


@given(st.lists(st.fixed_dictionaries({"A": st.integers(0, 1), "B": st.integers(0, 3)}), max_size=5))
def test_what_was_accepted_is_never_taken_for_refused(accepted) -> None:
    refused = [{"A": 2, "B": 5}]
    chances = refused_chance([*accepted, *refused], refused, accepted)
    assert (chances[:-1] == 0).all()
    assert chances[-1] == 1


def test_the_search_soon_leaves_a_switch_alone_that_is_refused() -> None:
    study = load_study(FOUR)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = study.search_space.distributions()
    made = optuna.create_study(direction="maximize", sampler=make_sampler(study))
    for point, graph in ((study.search.enqueue[0], 0), (study.search.enqueue[1], 0), (study.search.enqueue[3], 1)):
        made.enqueue_trial({**point, "GRAPH": graph})
        trial = made.ask(space)
        if graph:
            trial.set_user_attr("verdict", "infeasible")
            trial.set_user_attr("refused", True)
            made.tell(trial, state=TrialState.PRUNED)
        else:
            trial.set_user_attr("samples_per_second", 1.1)
            made.tell(trial, 1.1)
    graphs = 0
    for _ in range(4):
        trial = made.ask(space)
        graphs += int(trial.params["GRAPH"])
        refused = bool(trial.params["GRAPH"])
        trial.set_user_attr("verdict" if refused else "samples_per_second", "infeasible" if refused else 1.1)
        trial.set_user_attr("refused", refused)
        made.tell(trial, None if refused else 1.1, state=TrialState.PRUNED if refused else TrialState.COMPLETE)
    assert graphs <= 2
