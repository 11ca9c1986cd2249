"""``python -m benchmarks.search``: search methods side by side on simulated trials.

Every repeat is another site: speeds, the best learning rate and layouts' kernels vary as between public submissions.
Results are kept in the output file, one JSON object a line; the same command again goes on where it was.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core: the matrices are small, and other runs share the machine

import json
import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import click

from benchmarks.laboratory.summary import Record, ahead, calibration, percent, table
from lora_tune.base.errors import InputError
from lora_tune.cli.options import guarded

DEFAULT_METHODS = "ours,as published,two stages,tpe+median,tpe+median; narrow"


@click.command()
@click.option("--study", "studies", default="h100", help="problems, separated by commas")
@click.option("--methods", default=DEFAULT_METHODS, help="methods, separated by commas (; for a comma in a name)")
@click.option("--repeats", default=30, type=click.IntRange(1), help="sites, one a repeat")
@click.option(
    "--first-site", default=1, type=click.IntRange(1), help="the first of them; sites from 101 on are held out"
)
@click.option("--nodes", default="1", help="trials at one time, separated by commas")
@click.option("--budgets", default="1,2,5,10,20", help="node-hours at which regret is reported; the last ends a run")
@click.option("--looks", default="", help="node-hours of looks at the recommendation; none: whenever a trial has ended")
@click.option("--seconds", default=0.0, help="begin no search after so many seconds; 0: no limit")
@click.option(
    "--output", default="bench.jsonl", type=click.Path(path_type=Path), help="results, one JSON object a line"
)
@guarded
def main(
    studies: str, methods: str, repeats: int, first_site: int, nodes: str, budgets: str, looks: str, seconds: float,
    output: Path,
) -> None:  # fmt: skip
    """Compare search methods by the regret of what they recommend against node-hours spent.

    Every problem at every width on one site before the next site.
    """
    from benchmarks.laboratory.catalogue import CATALOGUE

    makers = all_methods()
    names = [m.replace(";", ",").strip() for m in methods.split(",")]
    limits, at = _numbers(budgets, "--budgets"), _numbers(looks, "--looks") if looks else None
    for name, known, option in [(s, CATALOGUE, "--study") for s in studies.split(",")] + [
        (m, makers, "--methods") for m in names
    ]:
        if name not in known:
            raise InputError(f"{option} {name!r} is unknown; one of {', '.join(known)}")
    slots = [int(n) for n in _numbers(nodes, "--nodes")]
    sites = range(first_site, first_site + repeats)
    done, until = read(output), time.monotonic() + (seconds or math.inf)
    for repeat, study, width, name in product(sites, studies.split(","), slots, names):
        key = (study, name, width, repeat, limits[-1])
        if time.monotonic() < until and not any(_key(r) == key for r in done):
            done.append(_run(makers[name], key, at))
            _append(output, done[-1])
    for study, width in product(studies.split(","), slots):
        chosen = [r for r in done if r.study == study and r.nodes == width and r.method in names]
        if chosen:
            _report(chosen, study, width, limits, output)


def all_methods() -> dict[str, Callable[[Any, int], Any]]:
    """Every method by name; those of other libraries import them when they are made."""
    from benchmarks.laboratory import expert, optuna_methods, ours, peers

    return {**ours.METHODS, **expert.METHODS, **optuna_methods.METHODS, **peers.METHODS}


def _numbers(text: str, option: str) -> list[float]:
    try:
        return sorted(float(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r}: numbers separated by commas are wanted, such as 5,10,20") from None


def _key(record: Record) -> tuple[str, str, int, int, float]:
    return record.study, record.method, record.nodes, record.repeat, record.budget


@cache
def _site(study: str, repeat: int) -> Any:
    """The problem of a repeat; its best score is searched once for all methods."""
    from benchmarks.laboratory.catalogue import CATALOGUE

    return CATALOGUE[study](repeat)


def _run(maker: Callable[[Any, int], Any], key: tuple[str, str, int, int, float], looks: list[float] | None) -> Record:
    from benchmarks.laboratory.arena import play

    study, method, slots, repeat, budget = key
    site = _site(study, repeat)
    begin, cpu = time.perf_counter(), time.process_time()
    trace = play(site, maker(site, repeat), slots=slots, budget=budget, seed=repeat, looks=looks)
    took, core = time.perf_counter() - begin, time.process_time() - cpu
    click.echo(f"{study} {method} {slots} nodes, repeat {repeat}: {took:.0f} s, {core:.1f} of a processor", err=True)
    return Record(
        study=study, method=method, nodes=slots, repeat=repeat, budget=budget, trials=trace.trials,
        points=changes([(round(h, 4), round(r, 5)) for h, r in trace.points]),
        claims=tuple((round(h, 4), round(c, 5), round(r, 5)) for h, c, r in trace.claims),
    )  # fmt: skip


def changes(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The points at which the regret changes, and the last one: all that figures need, in a tenth of the space."""
    kept = [p for at, p in enumerate(points) if at == 0 or p[1] != points[at - 1][1] or at == len(points) - 1]
    return tuple(kept)


def _append(output: Path, record: Record) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    with output.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read(output: Path) -> list[Record]:
    """The records in a results file; none when it does not exist."""
    if not output.exists():
        return []
    return [_record(json.loads(line)) for line in output.read_text(encoding="utf-8").splitlines() if line]


def _record(data: Mapping[str, Any]) -> Record:
    points = tuple((h, r) for h, r in data["points"])
    claims = tuple((h, c, r) for h, c, r in data["claims"])
    return Record(**{**data, "points": points, "claims": claims})


def _report(records: list[Record], study: str, slots: int, budgets: list[float], output: Path) -> None:
    from benchmarks.laboratory.chart import draw

    click.echo(f"\n{study}, {slots} trials at a time; {date.today()}, {platform.machine()}, one core\n")
    click.echo(table(records, budgets))
    for method in dict.fromkeys(r.method for r in records):
        found = calibration([r for r in records if r.method == method], budgets[0])
        if found is not None:
            click.echo(
                f"{method}: claims a regret of {100 * found.claimed:.2f}% on average from {budgets[0]:g} node-hours "
                f"on, true {100 * found.true:.2f}%: ratio {found.claimed / max(found.true, 1e-12):.2f} "
                f"(90% of draws of other sites: {found.low:.2f} to {found.high:.2f})"
            )
    for method in (m for m in dict.fromkeys(r.method for r in records) if m.startswith("ours")):
        others = [m for m in dict.fromkeys(r.method for r in records) if not m.startswith("ours")]
        if (beside := ahead(records, method, others, budgets)) is not None:
            worse = ", ".join(f"{100 * w:+.1f}" for w in beside.worse)
            click.echo(
                f"{method} on {beside.sites} sites: what {beside.best} has after {budgets[-1]:g} node-hours "
                f"({percent(beside.regret)}) it has after {beside.hours:g}; percent points above the lowest of the "
                f"others at {', '.join(f'{b:g}' for b in budgets)}: {worse}"
            )
    chart = output.with_name(f"{output.stem}-{study}-{slots}.svg")
    chart.write_text(draw(records, f"{study}, {slots} trials at a time"), encoding="utf-8")
    click.echo(f"chart: {chart}")


if __name__ == "__main__":
    main()
