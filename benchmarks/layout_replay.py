"""Replays recorded sweeps of layouts: ``python -m benchmarks.layout_replay``.

Two H200: the search chooses among the points of ``sweeps/records/nemo_h200x2`` and receives their recorded results,
until every remaining point is more likely to fail than to run; without the physics prior (as the sweep was made) and
with it. Prints how many of its proposals failed or were refused, and when it proposed the fastest. Four H200: memory
peaks and speeds of the physics model against measured ones of ``sweeps/records/nemo_70b_probes_h200x4``, and what the
search would propose in ``studies/nemo_h200x4.toml`` after the study's first point, with the peak by physics.
"""

from __future__ import annotations

import csv
import json
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import TrialState, create_trial

from lora_tune.base.llama import SHAPES
from lora_tune.config.layout import Layout
from lora_tune.config.study import Study, load_study
from lora_tune.search import physics
from lora_tune.search.grey_box.features import Coordinates
from lora_tune.search.grey_box.model import learn
from lora_tune.search.grey_box.objective import Goal
from lora_tune.search.observations import Observation
from lora_tune.search.physics import StudyPhysics, physics_of
from lora_tune.search.throughput import ThroughputSampler, best

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "sweeps" / "records"
LIKELIER_DEAD = 0.5
FIRST_ON_FOUR = 1.146
"""samples/s of the first point of ``studies/nemo_h200x4.toml`` on four H200."""


def recorded(folder: Path, study: Study) -> list[Observation]:
    """The ended trials of a record, as observations for the search."""
    space, found = study.search_space.distributions(), []
    with (folder / "trials.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["verdict"] not in ("reached", "infeasible"):
                continue
            found.append(
                Observation(
                    number=int(row["trial"]),
                    values={name: _typed(d, row[name]) for name, d in space.items()},
                    samples_per_second=float(row["samples_per_second"] or math.nan),
                    infeasible=row["verdict"] == "infeasible",
                )
            )
    return found


def _typed(distribution: BaseDistribution, text: str) -> Any:
    if isinstance(distribution, CategoricalDistribution):
        return next(choice for choice in distribution.choices if str(choice) == text)
    return int(text)


def replay(study: Study, world: Sequence[Observation], known: StudyPhysics | None) -> list[Observation]:
    """The points in the order of the search's proposals, beginning with the study's first enqueued point."""
    space = study.search_space.distributions()
    coordinates = Coordinates(distributions=space, gpus=study.search_space.gpus, roles=dict.fromkeys(space, "speed"))
    by_point = {tuple(sorted(o.values.items())): o for o in reversed(world)}
    told = [by_point.pop(tuple(sorted(world[0].values.items())))]
    while by_point:
        model = learn(coordinates, Goal(), told, needs=known)
        left = [o.values for o in by_point.values()]
        risks, _ = model.memory.chance(left)
        likely = [v for v, risk in zip(left, risks, strict=True) if risk <= LIKELIER_DEAD]
        if not likely:
            break
        choice = best(model, likely)
        told.append(by_point.pop(tuple(sorted(choice.values.items()))))
    return told


def summary(name: str, told: Sequence[Observation], fastest: float) -> str:
    """Failures among the proposals, and when the fastest point was proposed."""
    died = sum(o.infeasible for o in told)
    at = next((n for n, o in enumerate(told, 1) if o.samples_per_second == fastest), None)
    return f"  {name:<34}{len(told):>4} proposed, {died} died or refused ({died / len(told):.0%}), fastest at {at}"


def two_gpus() -> None:
    folder = RECORDS / "nemo_h200x2"
    study = load_study(folder / "study.toml")
    world = recorded(folder, study)
    fastest = max(o.samples_per_second for o in world if not o.infeasible)
    print(f"two H200: {len(world)} points, fastest {fastest:.4g} samples/s")
    print(summary("as recorded", world, fastest))
    print(summary("the search without physics", replay(study, world, None), fastest))
    print(summary("the search", replay(study, world, physics_of(study)), fastest))


def four_gpus() -> None:
    probes = json.loads((RECORDS / "nemo_70b_probes_h200x4" / "probes.json").read_text(encoding="utf-8"))
    print("\nfour H200, 70B shape: physics and measured")
    for record in probes["records"]:
        values = record["variables"]
        layout = Layout(tp=values["TP"], cp=values.get("CP", 1), sp=values.get("SP", 0), minibs=4)
        step = physics.step_of(SHAPES["70b"], probes["fixed"]["SEQ"], values)
        gib, peak = physics.gib(step, layout, 4), record["gib"]
        print(f"  {record['name']:<22}{gib:>7.1f} GiB ({peak:.1f} measured, {gib / peak - 1:+.0%})")
    study = load_study(ROOT / "studies" / "nemo_h200x4.toml")
    known = physics_of(study)
    assert known is not None
    first = dict(study.search.enqueue[0])
    print(f"  proposed after {FIRST_ON_FOUR} samples/s of the first point, a GPU has {known.limit} GiB:")
    for values in proposals(study, first, known):
        print(f"    {known.gib(values):>6.1f} GiB  {' '.join(f'{n}={v}' for n, v in values.items())}")


def proposals(study: Study, first: Mapping[str, Any], known: StudyPhysics, count: int = 8) -> list[dict[str, Any]]:
    """Consecutive proposals if every point that fits by the physics model runs at the first one's speed."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = study.search_space.distributions()
    sampler = ThroughputSampler(space, gpus=study.search_space.gpus, seed=study.search.seed, physics=known)
    made = optuna.create_study(direction="maximize", sampler=sampler)
    made.add_trial(
        create_trial(
            params=dict(first), distributions=space, user_attrs={"samples_per_second": FIRST_ON_FOUR},
            state=TrialState.COMPLETE, value=FIRST_ON_FOUR,
        )
    )  # fmt: skip
    found = []
    for _ in range(count):
        trial = made.ask(space)
        found.append(dict(trial.params))
        if known.gib(trial.params) > known.limit:
            trial.set_user_attr("verdict", "infeasible")
            made.tell(trial, state=TrialState.PRUNED)
            continue
        trial.set_user_attr("samples_per_second", FIRST_ON_FOUR)
        made.tell(trial, FIRST_ON_FOUR)
    return found


def main() -> None:
    print(f"{date.today()}, {platform.machine()}, one core")
    two_gpus()
    four_gpus()


if __name__ == "__main__":
    main()
