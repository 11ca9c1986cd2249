"""``python -m benchmarks.stopping``: good runs stopped and bad runs caught, by rule, table and count of references.

For each table, references are drawn from its good runs; other good and bad runs are judged with them. Intervals are
90% bootstrap intervals over the draws of references, which all runs judged with one draw share. Used: the share of
their training that bad runs had when they were stopped (1 where they were not). Published runs need the public MLPerf
results (``LORA_TUNE_MLPERF``).
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.public_runs import folder
from benchmarks.stopping import belief, envelope, fp4, fresh, metrics, sweeps, unseen
from benchmarks.stopping.rules import Rule, ours, ours_supports
from benchmarks.stopping.shapes import all_shapes
from benchmarks.stopping.tables import Table, Whole, published, recorded
from lora_tune.curves.conformal import allowed
from lora_tune.curves.overlay import ComparedRun

RATES = (0.01, 0.05, 0.1)
REFERENCES = (0, 3, 8, 20, 50)
GOOD_EACH, BAD_EACH = 20, 10
WITHOUT_TABLES: dict[str, Callable[[], None]] = {
    "belief": belief.main, "envelope": envelope.main, "fp4": fp4.main, "fresh": fresh.main,
    "metrics": metrics.main, "sweeps": sweeps.main,
    "unseen": unseen.main,
}  # fmt: skip
PARTS = (*WITHOUT_TABLES, "ours")


@dataclass(frozen=True)
class Score:
    """By draw of references: share of good runs stopped, share of bad runs caught, training that these had used."""

    killed: Sequence[float]
    caught: Sequence[float]
    used: Sequence[float]


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.stopping", description=__doc__)
    parser.add_argument("--draws", type=int, default=40, help="draws of references a cell")
    parser.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="only this part; may be given again",
    )
    parser.add_argument("--table", action="append", help="only tables whose names begin so; may be given again")
    parser.add_argument("--references", type=int, action="append", help="only so many references; may be given again")
    options = parser.parse_args()
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, no GPU")
    tables = [*recorded(), *([published()] if (folder() / "runs.jsonl.gz").is_file() else []), *all_shapes()]
    if options.table:
        tables = [t for t in tables if t.name.startswith(tuple(options.table))]
    for part in options.part or PARTS:
        begin = time.perf_counter()
        if part in WITHOUT_TABLES:
            WITHOUT_TABLES[part]()
        else:
            our_table(tables, options.draws, options.references or REFERENCES)
        print(f"({part}: {time.perf_counter() - begin:.0f} s)", flush=True)


def our_table(tables: Sequence[Table], draws: int, counts: Sequence[int]) -> None:
    """The shipped rule by table, references and stated rate; rates that keep the same references' ranks are one row."""
    print("\n| table | references | stated | supported | good stopped | bad caught | used |")
    print("|---|---|---|---|---|---|---|")
    for table in tables:
        for count in (n for n in counts if n < len(table.good)):
            for rate in sorted({allowed(rate, count): rate for rate in reversed(RATES)}.values()):
                found = score(table, count, draws, lambda t, refs, rate=rate: ours(t, refs, rate))
                stated = ", ".join(f"{r:.0%}" for r in RATES if allowed(r, count) == allowed(rate, count))
                kept = ours_supports(count, rate)
                print(f"| {table.name} | {count} | {stated} | {kept:.1%} | {cells(found)} |", flush=True)


def score(
    table: Table,
    count: int,
    draws: int,
    make: Callable[[Table, Sequence[ComparedRun]], Rule],
) -> Score:
    """Judge runs with ``draws`` draws of ``count`` references. make: the rule, of (table, references)."""
    rng = np.random.default_rng([count, draws])
    rows = []
    for _ in range(draws):
        order, bad = rng.permutation(len(table.good)), rng.permutation(len(table.bad))
        references = [table.good[i] for i in order[:count]]
        rule = _or_diverged(make(table, references))
        killed = [rule(table.good[i]) is not None for i in order[count : count + GOOD_EACH]]
        stops = [(rule(run), run) for run in (table.bad[i] for i in bad[:BAD_EACH])]
        used = [1.0 if at is None else at / (run.length or at) for at, run in stops]
        rows.append((np.mean(killed), np.mean([at is not None for at, _ in stops]), np.mean(used)))
    killed_by, caught_by, used_by = np.array(rows).T
    return Score(killed_by.tolist(), caught_by.tolist(), used_by.tolist())


def _or_diverged(rule: Rule) -> Rule:
    """The rule, and two evals in a row that are not finite, which stop a run under any."""

    def stopped(run: ComparedRun) -> float | None:
        at = min(rule(run) or math.inf, run.diverged if isinstance(run, Whole) else math.inf)
        return at if math.isfinite(at) else None

    return stopped


def cells(found: Score) -> str:
    """Means, the first two with their bootstrap intervals."""
    rng = np.random.default_rng(0)

    def between(values: Sequence[float]) -> str:
        means = rng.choice(np.array(values), (1000, len(values))).mean(axis=1)
        low, high = np.quantile(means, (0.05, 0.95))
        return f"{np.mean(values):.1%} ({low:.1%} to {high:.1%})"

    return f"{between(found.killed)} | {between(found.caught)} | {np.mean(found.used):.0%}"


if __name__ == "__main__":
    main()
