"""One attempt, one set of facts: its name, nodes and folder reach the job, the config and the search alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lora_tune.base.paths import SweepPaths
from lora_tune.config.study import Study
from lora_tune.controller.jobs import Jobs
from lora_tune.search.recorded import recorded_trials
from lora_tune.store.records import Attempt, StudyRecords, Trial
from lora_tune.workloads import load
from tests.builders import study_of, sweep_of

STUDY = {
    "name": "scaled",
    "workload": {"kind": "surface", "surface": "h100"},
    "site": {"launcher": "simulated", "gpus_per_node": 8},
    "space": {"LR": 4e-4, "layout": {"type": "layout", "tp": [4], "minibs": [4], "nodes": [1, 2]}},
    "budget": {"trials": 1},
}


def test_the_nodes_of_a_layout_are_the_nodes_of_its_job_and_of_its_config(tmp_path: Path) -> None:
    study = Study.model_validate(STUDY)
    workload = load(study, "scaled.toml")
    layouts = study.search_space.layouts("layout").layouts
    for layout in layouts:
        parameters = study.search_space.resolve({"layout": str(layout)})
        trial = Trial(number=3, seed=1, tuned={}, parameters=parameters, proposed_at=0.0)
        nodes = study.search_space.node_count(parameters)
        attempt = Attempt(
            trial=3, number=0, job_name=study.job_name(3, 0), folder="trials/0003/attempt-0", intended_at=0.0,
            node_count=nodes,
        )  # fmt: skip
        job = Jobs(workload, SweepPaths(tmp_path)).job(trial, attempt)
        assert (job.name, job.resources.nodes) == ("scaled-0003-0", nodes)
        (name,) = workload.export(_proposal(trial), ()).files
        assert name.startswith(f"config_LOCAL_{nodes}x8x4x")
    assert {study.search_space.node_count(study.search_space.resolve({"layout": str(x)})) for x in layouts} == {1, 2}


def _proposal(trial: Trial):  # type: ignore[no-untyped-def]
    from lora_tune.controller.jobs import proposal

    return proposal(trial, 0)


def test_a_probe_is_a_probe_to_whoever_asks_the_records() -> None:
    study = study_of()
    sweep: StudyRecords = sweep_of(study)
    ended = next(t for t in sweep.trials.values() if t.verdict)
    probed = replace(sweep, trials={**sweep.trials, ended.number: replace(ended, probe=True)})
    kinds = {t.number: t.user_attrs.get("kind") for t in recorded_trials(study, probed)}
    assert kinds[ended.number] == "probe"
    assert all(kind is None for number, kind in kinds.items() if number != ended.number)
