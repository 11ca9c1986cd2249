"""The h100 study with switches against the former one, on simulated sites: ``python -m benchmarks.switches``.

The real driver on the virtual clock runs both files against sites whose switches are hidden from the search
(:mod:`lora_tune_simulation.simulated_run`), with a budget of node-hours and four concurrent trials. Prints the true
score of each recommendation against the published configuration's, and the share of the possible gain: the best score
of the whole space, searched with the true function.

    python -m benchmarks.switches 20 --first-site 101
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import math
import platform
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import numpy as np

from lora_tune.cli.api import Sweep
from lora_tune.config.study import Study, load_study
from lora_tune.search.recommendation import recommend
from lora_tune.store.records import StudyRecords
from lora_tune_simulation.h100 import with_switches
from lora_tune_simulation.simulated_run import LEVELS, SwitchedRun

HERE = Path(__file__).resolve().parent
STUDIES = {"shipped": HERE.parent / "studies" / "h100.toml", "former": HERE / "records" / "h100_former.toml"}
PUBLISHED: Mapping[str, object] = {
    "LR": 4e-4, "MAX_STEPS": 800, "WARMUP_STEPS": 0, "TP": 4, "PP": 1, "CP": 1, "MINIBS": 4, "MBS": 1, "SP": 1,
}  # fmt: skip
"""The published configuration, with all switches at their defaults."""
ROUNDS, TRIES = 3, 60


@dataclass(frozen=True, slots=True)
class Played:
    """One sweep: true score of its recommendation, node-hours, trials, probes, and the recommended values."""

    score: float
    hours: float
    trials: int
    probes: int
    tuned: Mapping[str, Any]


def simulated(text: str, surface: str, site: int, hours: float) -> str:
    """A study file, moved to a simulated site with ``hours`` node-hours."""
    text = re.sub(r"\[workload\].*?(?=\n\[space\])", _where(surface), text, flags=re.DOTALL)
    return re.sub(r"node_hours = \d+", f"node_hours = {hours:g}", text).replace("seed = 1\n", f"seed = {site}\n")


def _where(surface: str) -> str:
    workload = f'[workload]\nkind = "surface"\nsurface = "{surface}"\n'
    return workload + '\n[site]\nlauncher = "simulated"\nsystem = "SIMH100"\ngpus_per_node = 8\n'


def play(name: str, site: int, hours: float, folder: Path) -> Played:
    """Run one study on one site."""
    surface = folder / f"site{site}.py"
    surface.write_text(
        f"from lora_tune_simulation.h100 import with_switches\n\nfunction = with_switches.variant({site})\n",
        encoding="utf-8",
    )
    file = folder / f"{name}{site}.toml"
    file.write_text(
        simulated(STUDIES[name].read_text(encoding="utf-8"), f"{surface}:function", site, hours), encoding="utf-8"
    )
    sweep = Sweep(file, output=folder / f"{name}{site}", quiet=True)
    with (folder / "out.txt").open("a") as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sweep.run()
    study, records = load_study(file), sweep.records
    return _played(study, records, with_switches.variant(site))


def _played(study: Study, records: StudyRecords | None, truth: SwitchedRun) -> Played:
    best = recommend(study, records) if records is not None else None
    if records is None or best is None:
        return Played(math.inf, 0.0, 0, 0, {})
    probes = sum(t.probe for t in records.trials.values())
    score = truth.expected_score(best.trial.parameters)
    return Played(score, records.node_hours(0.0), len(records.trials), probes, best.trial.tuned)


def best_score(truth: SwitchedRun, study: Study) -> float:
    """The lowest true score of a study's space: random points, each improved one parameter at a time."""
    from benchmarks.laboratory.problem import at_random
    from lora_tune.search.grey_box.features import from_unit

    space, spread = study.search_space, study.search_space.distributions()
    rng = np.random.default_rng(3)
    usual = {n: LEVELS[n][0] for n in spread if n in LEVELS}
    start = space.tuned({**space.resolve(space.corner()), **PUBLISHED, **usual, "GBS": 8})

    def score(point: Mapping[str, Any]) -> float:
        return truth.expected_score(space.resolve(point), 256)

    lowest = math.inf
    for begin in [start, *({**start, **at_random(spread, tuple(usual), rng)} for _ in range(ROUNDS))]:
        point, here = begin, score(begin)
        for _ in range(2):
            for name, distribution in spread.items():
                choices = getattr(distribution, "choices", None)
                tries = choices or [from_unit(distribution, float(x)) for x in np.linspace(-1, 1, 9)]
                found = min(({**point, name: value} for value in tries), key=score)
                point, here = (found, s) if (s := score(found)) < here or math.isinf(here) else (point, here)
        lowest = min(lowest, truth.expected_score(space.resolve(point)))
    return lowest


@click.command()
@click.argument("sites", type=click.IntRange(1), default=20)
@click.option("--first-site", default=1, show_default=True, type=click.IntRange(1), help="from 101 on: held out")
@click.option("--hours", default=8.0, show_default=True, type=float, help="node-hours of each sweep")
@click.option("--studies", default="shipped,former", show_default=True, help="which of the two")
@click.option("--verbose", is_flag=True, help="print what is handed over")
def main(sites: int, first_site: int, hours: float, studies: str, verbose: bool) -> None:
    """Play the h100 study and its former self on simulated sites."""
    click.echo(f"{date.today()}, {platform.machine()}, two cores; {hours:g} node-hours, four trials at a time")
    shares: dict[str, list[float]] = {name: [] for name in studies.split(",")}
    gains: dict[str, list[float]] = {name: [] for name in shares}
    with tempfile.TemporaryDirectory() as folder:
        for site in range(first_site, first_site + sites):
            truth = with_switches.variant(site)
            base, best = truth.expected_score(PUBLISHED), best_score(truth, load_study(STUDIES["shipped"]))
            line = f"site {site}: {100 * (1 - best / base):.1f}% to win"
            for name in shares:
                done = play(name, site, hours, Path(folder))
                gains[name].append(1 - done.score / base)
                shares[name].append(gains[name][-1] / (1 - best / base))
                line += (
                    f"; {name} wins {100 * gains[name][-1]:.1f}%, {100 * shares[name][-1]:.0f}% of it, "
                    f"{done.hours:.1f} node-hours, {done.trials} trials, {done.probes} probes"
                )
                line += f"\n   {dict(done.tuned)}" if verbose else ""
            click.echo(line)
    for name, won in shares.items():
        slower = sum(g < 0 for g in gains[name])
        most = sum(s >= 0.8 for s in won)
        click.echo(
            f"{name}: {most} of {sites} sites at 80% or more of what is there, median {100 * np.median(won):.0f}%, "
            f"lowest {100 * min(won):.0f}%; {slower} hand over something slower than the published configuration"
        )


if __name__ == "__main__":
    main()
