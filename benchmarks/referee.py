"""``python -m benchmarks.referee``: error rate and power of campaign verdicts.

Scripted agents run campaigns of arms through the functions that judge a sweep's records
(``lora_tune.search.campaign``). In null campaigns no arm differs from the baseline; the verdicts are compared with what
each agent would keep by its own rule. In the others one of many arms is two standard deviations better. Runs are drawn
from a normal distribution, or from recorded runs: one point of the shipped table ``lora_tiny`` per campaign, whose
eight seeds are drawn with replacement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import click
import numpy as np

from lora_tune.curves.evalues import log_evidence, two_samples
from lora_tune.search.campaign import CAMPAIGN_ERROR, ArmState, error_share, verdicts
from lora_tune.search.noise import ResultScale
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Trial, TrialState, Verdict

LOSSES = ResultScale(relative=False, timed=False)
EVAL = 3
"""Index of the compared eval of the recorded runs, which nearly all points of the table have."""

BASELINE_FIRST = 4
"""Runs of the baseline before any arm's, for the agent that checks after every run."""

Draw = Callable[[np.random.Generator], float]


def normal_runs(_: np.random.Generator) -> Draw:
    """Runs of one configuration, in standard deviations."""
    return lambda source: float(source.normal())


def recorded_runs(rng: np.random.Generator) -> Draw:
    """Runs of one point of the recorded table, standardised by its mean and standard deviation."""
    from lora_tune_simulation.lora_tables import tiny

    losses = tiny.table.losses[..., EVAL].reshape(-1, tiny.table.seeds)
    points = losses[np.isfinite(losses).all(axis=1) & (losses.std(axis=1) > 0)]
    runs = points[rng.integers(len(points))]
    standard = (runs - runs.mean()) / runs.std(ddof=1)
    return lambda source: float(source.choice(standard))


@dataclass
class Bench:
    """One campaign: arm 0 is the baseline. better: true improvement of each arm in standard deviations."""

    rng: np.random.Generator
    draw: Draw
    better: dict[int, float]
    trials: list[Trial] = field(default_factory=list)
    runs: dict[int, list[float]] = field(default_factory=dict)

    def run(self, arm: int) -> float:
        """Run an arm once more; return its loss in standard deviations."""
        loss = self.draw(self.rng) - self.better.get(arm, 0.0)
        number = len(self.trials)
        self.trials.append(
            Trial(
                number=number, seed=number, tuned={"ARM": arm}, parameters={"ARM": arm}, state=TrialState.FINISHED,
                verdict=Verdict.REACHED, metrics=TrialMetrics(objective=10.0 + loss, node_hours=1.0),
            )
        )  # fmt: skip
        self.runs.setdefault(arm, []).append(loss)
        return loss

    def called_better(self) -> set[int]:
        """The arms judged better; verdicts are final, so this also serves an agent that checks after every run."""
        judged = verdicts(self.trials, frozenset(), LOSSES)
        return {int(self.trials[a.trials[0]].tuned["ARM"]) for a in judged.arms if a.state is ArmState.BETTER}

    def might_be_better(self, arm: int) -> bool:
        """Whether the arm's evidence reaches the lowest threshold of any test: a check before the slow verdicts."""
        seen = two_samples(self.runs[arm][1:], self.runs[0])
        least = -math.log(CAMPAIGN_ERROR * error_share(1))
        return seen is not None and log_evidence(seen.statistic, seen.pairs, seen.freedom) >= least


def greedy(bench: Bench, arms: int) -> set[int]:
    """Tries one change after another, keeps what beats the best run so far, and runs that three times more."""
    best, kept = bench.run(0), set()
    for _ in range(4):
        bench.run(0)
    for arm in range(1, arms + 1):
        if (loss := bench.run(arm)) < best:
            best, kept = loss, {*kept, arm}
            for _ in range(3):
                bench.run(arm)
                bench.run(0)
    return kept


def factorial(bench: Bench, arms: int) -> set[int]:
    """Three seeds of everything; keeps arms with a mean two standard errors better than the baseline's."""
    for arm, _ in itertools.product(range(arms + 1), range(3)):
        bench.run(arm)
    base = np.array(bench.runs[0])
    means = {a: float(np.mean(r)) for a, r in bench.runs.items() if a}
    error = np.sqrt(2 * np.mean([np.var(r, ddof=1) for r in bench.runs.values()]) / 3)
    return {a for a, mean in means.items() if mean < base.mean() - 2 * error}


def seed_shopping(bench: Bench, arms: int) -> set[int]:
    """Runs each arm with up to eight seeds until one beats every baseline run; keeps such arms."""
    target = min(bench.run(0) for _ in range(8))
    kept = set()
    for arm in range(1, arms // 4 + 1):
        if any(bench.run(arm) < target for _ in range(8)):
            kept.add(arm)
    return kept


def sequential(bench: Bench, arms: int, runs: int | None = None) -> set[int]:
    """Every arm once; then, with a check after each run, the arm with the best shrunken mean, or the baseline if that
    has fewer runs, until an arm is judged better or the runs are used up: by default 60% of three seeds of everything.
    Keeps the best mean of all."""
    total = runs or int(0.6 * 3 * (arms + 1))
    for _ in range(BASELINE_FIRST):
        bench.run(0)
    for arm in range(1, arms + 1):
        bench.run(arm)
    means = {a: (len(r), float(np.mean(r))) for a, r in bench.runs.items() if a}
    base = float(np.mean(bench.runs[0]))
    while len(bench.trials) < total:
        arm = max(means, key=lambda a: means[a][0] / (means[a][0] + 1) * (base - means[a][1]))
        bench.run(0 if len(bench.runs[0]) < len(bench.runs[arm]) else arm)
        base, means[arm] = float(np.mean(bench.runs[0])), (len(bench.runs[arm]), float(np.mean(bench.runs[arm])))
        if bench.might_be_better(arm) and arm in bench.called_better():
            break
    return {min(means, key=lambda a: means[a][1])}


def knows_which(bench: Bench, arms: int) -> set[int]:
    """Like :func:`sequential`, but knows the better arm: an upper bound for all rules of choosing arms."""
    arm = next(iter(bench.better), 1)
    for a in [0] * BASELINE_FIRST + list(range(1, arms + 1)):
        bench.run(a)
    while len(bench.trials) < int(0.6 * 3 * (arms + 1)) and arm not in bench.called_better():
        bench.run(0 if len(bench.runs[0]) < len(bench.runs[arm]) else arm)
    return {arm}


AGENTS: dict[str, Callable[[Bench, int], set[int]]] = {
    "keeps what beats the best run": greedy,
    "three seeds of everything": factorial,
    "shops for seeds": seed_shopping,
    "looks after every run": sequential,
    "knows which": knows_which,
}


@dataclass(frozen=True)
class Played:
    """One campaign. kept: by the agent's rule."""

    called: set[int]
    kept: set[int]
    runs: int


def play(agent: str, arms: int, effect: float, source: Callable[[np.random.Generator], Draw], seed: int) -> Played:
    """A campaign in which one arm is better by ``effect`` standard deviations, or none for 0."""
    rng = np.random.default_rng([seed, arms])
    better = {int(rng.integers(1, arms + 1)): effect} if effect else {}
    bench = Bench(rng, source(rng), better)
    kept = AGENTS[agent](bench, arms)
    return Played(bench.called_better(), kept, len(bench.trials))


def null_lines(campaigns: int, arms: int, source: Callable[[np.random.Generator], Draw]) -> Iterator[str]:
    """False verdicts of each agent, and what it keeps by its own rule."""
    for agent in list(AGENTS)[:-1]:
        played = [play(agent, arms, 0.0, source, seed) for seed in range(campaigns)]
        called = sum(bool(p.called) for p in played) / campaigns
        kept = sum(bool(p.kept) for p in played) / campaigns
        each = sum(len(p.kept) for p in played) / campaigns
        yield (
            f"  {agent:<30} called better in {called:.1%} of campaigns; it keeps something in {kept:.1%}, "
            f"{each:.1f} arms a campaign"
        )


def power_lines(campaigns: int, arms: int, source: Callable[[np.random.Generator], Draw]) -> Iterator[str]:
    """How often the one better arm is found with 60% of the runs of three seeds each."""
    played = [play("looks after every run", arms, 2.0, source, seed) for seed in range(campaigns)]
    oracle = [play("knows which", arms, 2.0, source, seed) for seed in range(campaigns // 4)]
    better = [int(np.random.default_rng([seed, arms]).integers(1, arms + 1)) for seed in range(campaigns)]
    found = sum(b in p.called for p, b in zip(played, better, strict=True)) / campaigns
    wrong = sum(bool(p.called - {b}) for p, b in zip(played, better, strict=True)) / campaigns
    kept = sum(b in p.kept for p, b in zip(played, better, strict=True)) / campaigns
    runs = sum(p.runs for p in played) / campaigns
    bound = sum(b in p.called for p, b in zip(oracle, better, strict=False)) / max(1, len(oracle))
    yield (
        f"  {arms:>3} arms: found in {found:.1%} ({bound:.1%} by one who knows which), another one called better in "
        f"{wrong:.1%}; the best mean is it in {kept:.1%}; {runs:.0f} runs on average, {int(0.6 * 3 * (arms + 1))} at "
        f"most, {3 * (arms + 1)} for three each"
    )


@click.command()
@click.option("--campaigns", default=1000, show_default=True)
@click.option("--arms", default=100, show_default=True, help="of each null campaign")
@click.option("--part", type=click.Choice(["null", "power", "all"]), default="all", show_default=True)
def main(campaigns: int, arms: int, part: str) -> None:
    """Print false verdicts and power, on normal and on recorded runs."""
    for name, source in (("normal", normal_runs), ("recorded", recorded_runs)):
        if part != "power":
            click.echo(f"{name} runs, {campaigns} campaigns of {arms} arms that change nothing")
            for line in null_lines(campaigns, arms, source):
                click.echo(line)
        if part != "null":
            click.echo(f"{name} runs, {campaigns} campaigns in which one arm is 2 standard deviations better")
            for line in itertools.chain.from_iterable(power_lines(campaigns, n, source) for n in (100, 50, 20)):
                click.echo(line)


if __name__ == "__main__":
    main()
