"""The shipped tables of real trials: sane, searched truthfully, and reachable from a study and the laboratory."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks.laboratory.arena import play
from benchmarks.laboratory.ours import METHODS
from benchmarks.laboratory.problem import Problem
from benchmarks.laboratory.problems import PROBLEMS
from benchmarks.tables import EASIER, chosen_target, crossings, path_of, warmup_lost
from lora_tune.config.study import parse_study
from lora_tune.search.grey_box.acquisition import PROBE_BLOCKS
from lora_tune.search.grey_box.model import WARMUP_COST
from lora_tune.workloads.base import Proposal
from lora_tune_simulation import load
from lora_tune_simulation.lora_tables import small, tiny
from lora_tune_simulation.machine import Degrees
from lora_tune_simulation.simulated_run import PARAMETERS, SurfaceWorkload
from lora_tune_simulation.tabular import TABLES, Table, read_table

SURFACES = {"lora_tiny": tiny, "lora_small": small}
LAYOUTS = 3
"""Fastest layouts of each batch that the brute-force search below looks at."""


@pytest.mark.parametrize("name", SURFACES)
def test_the_target_follows_from_the_table_and_separates_good_from_bad_by_two_and_more(name: str) -> None:
    surface = SURFACES[name]
    assert surface.target == chosen_target(surface.table)
    means = surface.table.stops(surface.target).mean(axis=-1)
    reached = means[np.isfinite(means)]
    assert surface.table.seeds >= 5
    assert 0.2 < len(reached) / means.size < 0.3
    assert reached.max() > 2 * reached.min()


def test_crossings_lie_between_the_evals_around_them() -> None:
    losses = np.array([[[1.3, 1.1, 0.9], [0.9, 0.8, 0.7], [1.3, 1.2, 1.1]]])
    found = crossings(Table({"LR": (1e-3,)}, np.array([[[10.0, 20.0, 30.0]]]), losses), 1.0)
    assert found[0, 0] == pytest.approx(25)
    assert np.isnan(found[0, 1:]).all(), "before the first eval, and not at all"


@pytest.mark.parametrize("name", ["lora_tiny", "lora_small", "lora_warmup"])
def test_a_third_of_warm_up_is_lost_whatever_the_schedule(name: str) -> None:
    """What the search takes for granted; schedules differ by factors of 2 to 4."""
    table = read_table(path_of(name))
    for harder in (0.0, 0.04, 0.07):
        lost = warmup_lost(table, chosen_target(table) + EASIER - harder)
        assert WARMUP_COST / 1.5 < np.nanmedian(lost) < 1.5 * WARMUP_COST
    if name == "lora_small":  # its evals are too far apart for more
        return
    lost = warmup_lost(table, chosen_target(table) + EASIER)
    each = np.nanmedian(np.where(np.isfinite(lost).all(axis=2, keepdims=True), lost, np.nan), axis=-1)
    assert (each.max(axis=-1) < 1.5 * each.min(axis=-1)).all()


@pytest.mark.parametrize("name", SURFACES)
def test_a_good_run_takes_as_long_as_on_the_published_machine(name: str) -> None:
    problem = PROBLEMS[name](0)
    assert 15 < problem.best / 60 < 35
    assert problem.best * 2 < 60 * problem.trial_minutes


@pytest.mark.parametrize("name", SURFACES)
def test_brute_force_finds_nothing_better_than_the_best_that_regrets_are_counted_from(name: str) -> None:
    problem = PROBLEMS[name](4)
    lowest = min(problem.score(values) for values in _dense(problem))
    assert problem.best <= lowest * 1.005


def _dense(problem: Problem):
    """A fine grid over rate and warm-up, each schedule, the fastest layouts of each batch."""
    space, machine = problem.space, problem.surface.machine
    rates = np.geomspace(problem.distributions["LR"].low, problem.distributions["LR"].high, 60)
    warm = range(0, problem.distributions["WARMUP_STEPS"].high + 1, 10)
    steps = problem.surface.table.axes["MAX_STEPS"]
    by_batch: dict[float, list[str]] = {}
    for name, batch in problem.coordinates.batches_by_layout.items():
        by_batch.setdefault(batch, []).append(name)
    first = {"LR": rates[0], "WARMUP_STEPS": 0, "MAX_STEPS": int(steps[0])}
    for names in by_batch.values():
        alive = {n: space.resolve({**first, "layout": n}) for n in names}
        layouts = sorted(alive, key=lambda n: _seconds_per_block(machine, alive[n], problem.interval))[:LAYOUTS]
        for rate, warmup, length, layout in itertools.product(rates, warm, steps, layouts):
            yield {"LR": float(rate), "WARMUP_STEPS": warmup, "MAX_STEPS": int(length), "layout": layout}


def _seconds_per_block(machine, parameters, interval: float) -> float:
    layout = Degrees.of(parameters)
    if machine.oom_probability(layout) > 0.2:
        return math.inf
    return interval / machine.samples_per_second(layout) + machine.seconds_per_eval(layout)


def test_published_results_of_another_model_are_not_consulted_and_a_good_configuration_is_found_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "benchmarks.laboratory.ours.llama2_70b_lora", lambda: pytest.fail("the published table was read")
    )
    problem = PROBLEMS["lora_small"](1)
    trace = play(problem, METHODS["ours"](problem, 1), slots=1, budget=6.0, seed=1)
    assert trace.points[-1][1] < 0.5


STUDY = """
[workload]
kind = "surface"
surface = "lora_tiny"

[site]
launcher = "simulated"
gpus_per_node = 8

[space]
LR = { type = "float", low = 1e-4, high = 3e-2, log = true }
MAX_STEPS = { type = "int", low = 80, high = 200, step = 60 }
WARMUP_STEPS = { type = "int", low = 0, high = 40 }
VAL_CHECK_INTERVAL = 40
layout = { type = "layout", tp = [1, 2, 4, 8], pp = [1, 2], cp = [1, 2, 4], mbs = [1, 2], gbs = [4, 8] }

[objective]
target = 1.64

[search]
sampler = "grey_box"
probes = true

[budget]
node_hours = 4
"""


def test_a_study_names_it_and_a_probe_is_two_blocks_of_the_studys_own_evals(tmp_path: Path) -> None:
    study = parse_study(STUDY, tmp_path / "table-study.toml")
    surface = load("lora_tiny")
    settings = SurfaceWorkload.Settings(surface="lora_tiny")
    space = study.search_space
    parameters = space.resolve({"LR": 1e-3, "MAX_STEPS": 200, "WARMUP_STEPS": 0, "layout": "tp4 pp1 cp1 minibs4 mbs1"})
    proposal = Proposal(number=0, attempt=0, seed=1, parameters=parameters, probe=True)
    job = SurfaceWorkload(study, settings).job(proposal, tmp_path)
    probe = json.loads(job.files[PARAMETERS])["parameters"]
    log = [text for _, text in surface(probe, 1)]
    assert [json.loads(line[9:])["metadata"]["samples_count"] for line in log if "eval_accuracy" in line] == [40, 80]


@pytest.mark.parametrize("name", [*SURFACES, "h100"])
def test_the_search_expects_a_short_run_to_train_what_the_laboratory_charges_for_it(name: str) -> None:
    problem = PROBLEMS[name](1)
    model = METHODS["ours"](problem, 1)._sampler.model(problem.distributions, [])
    batches = set(problem.coordinates.batches_by_layout.values())
    assert {PROBE_BLOCKS * model.block_samples(batch) for batch in batches} == {problem.probe_samples}


@pytest.mark.parametrize("name", SURFACES)
def test_what_is_shipped_says_where_it_was_measured_and_names_no_folder(name: str) -> None:
    with np.load(TABLES / f"{name}.npz", allow_pickle=False) as data:
        meta = json.loads(str(data["meta"]))
        assert {"grid", "device", "date", "torch", "seconds"} <= meta.keys()
        assert all("/" not in str(value) for value in meta.values())
        assert not {"MODEL", "DATADIR"} & {*data.files, *meta["grid"]}
