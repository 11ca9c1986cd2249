"""Racing two configurations with a known true difference: errors and runs used, against ten runs each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.public_runs import TARGET, by_submission, folder, is_test, load
from lora_tune import curves
from lora_tune.mlperf import published_curves
from lora_tune.search.contenders import RunSummary
from lora_tune.search.race_scale import RAW_SD, RaceScale
from lora_tune.search.race_verdicts import CannotSeparate, Decided
from lora_tune.search.racing import RaceSettings, RunMore, next_action, plan

DIFFERENCES = (0.0, 0.01, 0.02, 0.03, 0.05)
PAIRS = 600
SD = 0.047
SPREADS = (0.01, 0.05, 0.1, 0.2)
NOISE = 0.05
RACES = 400
SETTINGS = (
    RaceSettings(confidence=0.9),
    RaceSettings(confidence=0.9, most=40),
    RaceSettings(confidence=0.9, batch=3),
)
RAW = RaceScale(prior_sd=RAW_SD)
RAW_SETTINGS = (RaceSettings(confidence=0.9, scale=RAW), RaceSettings(confidence=0.9, batch=3, scale=RAW))
Draw = Callable[[np.random.Generator], float]


def main() -> None:
    draws: dict[str, Draw] = {"normal, sd 4.7%": lambda rng: rng.normal(0, SD)}
    spreads = {f"normal, sd {sd:.0%}": functools.partial(_normal, sd) for sd in SPREADS}
    draws |= spreads
    if (folder() / "runs.jsonl.gz").exists():
        pool = public_residuals()
        draws[f"public test runs, sd {np.std(pool):.1%}"] = lambda rng: rng.choice(pool)
        stops = public_residuals(raw=True)
        draws[f"raw stops of these, sd {np.std(stops):.1%}"] = lambda rng: rng.choice(stops)
    print(
        f"{PAIRS} pairs each; confidence 90%: at most 10% of equal pairs separated, at most 5% of others the wrong way."
    )
    print(
        "'ten each' is a t-test at the same level after ten runs of both. With 3 seeds a job both configurations run at"
    )
    print("one time, as lora_tune.confirm does on a cluster, and are looked at when both jobs have ended.")
    header = f"{'noise of ln(seconds)':32} {'most':>4} {'job':>3} {'true':>5} |"
    header += f" {'right':>6} {'wrong':>6} {'cannot':>6} {'runs':>5}"
    print(header + f" | ten each: {'right':>6} {'wrong':>6} {'cannot':>6} {'runs':>5}")
    for name, draw in draws.items():
        for settings in RAW_SETTINGS if name.startswith("raw") else SETTINGS[: 1 if name in spreads else None]:
            for difference in DIFFERENCES:
                print(_row(name, draw, settings, difference))
    many()


def _normal(sd: float, rng: np.random.Generator) -> float:
    return float(rng.normal(0, sd))


def public_residuals(*, raw: bool = False) -> np.ndarray:
    """ln(estimated crossing), or of the raw time, of test submissions at GBS 8 about their submission's mean."""
    family = published_curves.published(8).family
    residuals: list[float] = []
    for submission, group in by_submission(load()).items():
        if is_test(submission) and group[0].gbs == 8:
            crossings = [curves.estimate(r.run, TARGET, family=family).samples for r in group]
            logs = np.log([r.minutes for r in group] if raw else crossings)
            residuals.extend((logs - logs.mean()) * np.sqrt(len(logs) / (len(logs) - 1)))
    return np.array(residuals)


def many() -> None:
    """Three and five configurations: a wrong winner where two are equally good, the best one where there is one."""
    fields = {
        "two equal, one 30% worse": (0.0, 0.0, 0.3),
        "two equal, three 5% worse": (0.0, 0.0, 0.05, 0.05, 0.05),
        "five equal": (0.0,) * 5,
        "five, one 5% better": (0.0, 0.05, 0.05, 0.05, 0.05),
    }
    print(
        f"\nOf many, noise {NOISE:.0%}, {RACES} races: decided for the first, for another, recommended the first, runs"
    )
    for name, offsets in fields.items():
        rng = np.random.default_rng(7)
        ends = [_race_of_many(offsets, rng) for _ in range(RACES)]
        won, taken = np.array([w for w, _, _ in ends]), np.array([t for _, t, _ in ends])
        runs = [r for _, _, r in ends]
        shares = f"{np.mean(won == 0):6.1%} {np.mean(won > 0):6.1%} {np.mean(taken == 0):6.1%}"
        print(f"{name:28} {shares} {np.mean(runs):6.1f}, at most {max(runs)}")


def _race_of_many(offsets: Sequence[float], rng: np.random.Generator) -> tuple[int, int, int]:
    """The winner's place (-1: none), that of the recommended one, runs used."""
    results: dict[str, list[RunSummary]] = {str(i): [] for i in range(len(offsets))}
    while isinstance(action := next_action(results), RunMore):
        (config,) = action.runs
        at = offsets[int(config)] + rng.normal(0, NOISE)
        results[config].append(RunSummary(float(np.exp(7.4 + at))))
    used = sum(map(len, results.values()))
    if isinstance(action, Decided):
        return int(action.winner), int(action.winner), used
    return -1, int(action.recommended), used


def _row(name: str, draw: Draw, settings: RaceSettings, difference: float) -> str:
    rng = np.random.default_rng(7)
    run = _race if settings.batch == 1 else _race_of_jobs
    race = np.array([run(draw, settings, difference, rng) for _ in range(PAIRS)])
    ten = np.array([_ten_each(draw, difference, rng) for _ in range(PAIRS)])
    cells = [f"{share:6.1%}" for table in (race, ten) for share in (np.mean(table[:, 0] == o) for o in (1, -1, 0))]
    return (
        f"{name:32} {settings.most:>4} {settings.batch:>3} {difference:5.0%} |"
        f" {cells[0]} {cells[1]} {cells[2]} {race[:, 1].mean():5.1f}"
        f" |           {cells[3]} {cells[4]} {cells[5]} {20:5.1f}"
    )


def _race(draw: Draw, settings: RaceSettings, difference: float, rng: np.random.Generator) -> tuple[int, int]:
    """(1 right, -1 wrong, 0 cannot separate; runs used). With no difference every separation is wrong."""
    offsets = {"a": 0.0, "b": float(np.log1p(difference))}
    results: dict[str, list[RunSummary]] = {"a": [], "b": []}
    while True:
        action = next_action(results, settings)
        used = sum(map(len, results.values()))
        if isinstance(action, Decided):
            return (1 if action.winner == "a" and difference > 0 else -1), used
        if isinstance(action, CannotSeparate):
            return 0, used
        (config,) = action.runs
        results[config].append(RunSummary(float(np.exp(7.4 + offsets[config] + draw(rng)))))


def _race_of_jobs(draw: Draw, settings: RaceSettings, difference: float, rng: np.random.Generator) -> tuple[int, int]:
    """The same with several seeds a job and a job of each configuration at one time."""
    offsets = {"a": 0.0, "b": float(np.log1p(difference))}
    results: dict[str, list[RunSummary]] = {"a": [], "b": []}
    while True:
        stands = plan(results, settings, together=True)
        if stands.verdict is not None:
            right = isinstance(stands.verdict, Decided) and stands.verdict.winner == "a" and difference > 0
            undecided = isinstance(stands.verdict, CannotSeparate)
            return (0 if undecided else 1 if right else -1), sum(map(len, results.values()))
        for name, wanted in stands.wanted.items():
            while len(results[name]) < wanted:
                results[name].append(RunSummary(float(np.exp(7.4 + offsets[name] + draw(rng)))))


def _ten_each(draw: Draw, difference: float, rng: np.random.Generator) -> tuple[int, int]:
    from scipy.stats import ttest_ind

    a = np.array([draw(rng) for _ in range(10)])
    b = np.array([draw(rng) for _ in range(10)]) + np.log1p(difference)
    if ttest_ind(a, b).pvalue > 0.1:
        return 0, 20
    return (1 if a.mean() < b.mean() and difference > 0 else -1), 20
