"""Sweeps made from records, for tests that need one to look at: no jobs, no driver, no waiting.

``sweep_of`` gives the records; ``stored`` writes them through the store, as a driver would have.
"""

from __future__ import annotations

import json
import math
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from lora_tune.config.study import Study, parse_study
from lora_tune.controller import conclusion
from lora_tune.logs.run import Eval, RunLog
from lora_tune.search.recorded import directions, recorded_trials
from lora_tune.store import Changes, Store, sqlite_url
from lora_tune.store.metrics import TrialMetrics
from lora_tune.store.records import Attempt, StopKind, StudyRecords, Trial, TrialState, Verdict

ACTIVE_ENVIRONMENT = {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
"""Variables of a shell in which this interpreter's environment is active: commands are printed with ``python``."""

BEGAN = 1_760_000_000.0
"""Epoch seconds at which built sweeps began."""

STUDY = """
description = "a study for tests"
[workload]
kind = "command"
argv = ["bash", "train.sh"]
[site]
system = "H100"
launcher = "slurm"
nodes = 1
gpus_per_node = 8
[space]
LR = { type = "float", low = 1e-4, high = 2e-3, log = true }
MAX_STEPS = { type = "int", low = 400, high = 1200, step = 100 }
layout = { type = "layout", tp = [1, 2, 4, 8], minibs = [1, 2, 4] }
[objective]
target = 0.925
[budget]
trials = 40
parallel = 2
node_hours = 60
price_per_node_hour = 25
"""


def study_of(text: str = STUDY, name: str = "built") -> Study:
    """A validated study; ``text`` is its TOML."""
    return parse_study(text, Path(f"{name}.toml"))


def sweep_of(
    study: Study,
    *,
    trials: int = 24,
    evals: int = 9,
    seed: int = 0,
    text: str = STUDY,
    running: int = 0,
    began: float = BEGAN,
) -> StudyRecords:
    """A sweep of ``trials`` trials with every kind of end among them, the last ``running`` still open.

    Curves fall like those of the public runs (log-linear, crossing near 3,000 samples at the best LR) with noise.
    The same arguments give the same sweep.
    """
    rng = random.Random(seed)
    sweep = StudyRecords(name=study.name, digest=study.digest, study_toml=text, began_at=began)
    records: dict[int, Trial] = {}
    attempts: dict[tuple[int, int], Attempt] = {}
    curves: dict[tuple[int, int], tuple[Eval, ...]] = {}
    clock = [began, began]
    for number in range(trials):
        slot = clock.index(min(clock))
        trial = _proposed(study, number, clock[slot], rng)
        if number >= trials - running:
            made, curve = _running(trial, clock[slot], slot, rng, evals)
            records[number], attempts[number, 0], curves[number, 0] = trial, made, curve
            continue
        last = _finish(study, trial, clock[slot], slot, rng, evals)
        trial, made_attempts, curve = last
        records[number] = trial
        for attempt in made_attempts:
            attempts[number, attempt.number] = attempt
        curves[number, made_attempts[-1].number] = curve
        clock[slot] = (trial.finished_at or clock[slot]) + 5
    return replace(sweep, trials=records, attempts=attempts, evals={k: v for k, v in curves.items() if v})


def stored(folder: Path, sweep: StudyRecords, study: Study | None = None) -> Path:
    """The sweep in ``folder/sweep.db``, with a ``study`` in Optuna's tables too; returns the database file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "sweep.db"
    store = Store(sqlite_url(path))
    store.begin(sweep.name, sweep.digest, sweep.study_toml, sweep.began_at)
    lease = store.take_lease(sweep.name, "tests", sweep.began_at)
    points = [(t, a, i, e) for (t, a), found in sweep.evals.items() for i, e in enumerate(found)]
    changes = Changes(tuple(sweep.trials.values()), tuple(sweep.attempts.values()), tuple(points))
    store.save(lease, changes, sweep.began_at)
    store.release(lease)
    store.close()
    if study is not None:
        _into_optuna(study, sweep, sqlite_url(path))
    return path


def _into_optuna(study: Study, sweep: StudyRecords, url: str) -> None:
    """The sweep's trials as the session would have told them to Optuna."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = optuna.storages.RDBStorage(url)
    made = optuna.create_study(study_name=study.name, storage=storage, directions=directions(study))
    made.add_trials(recorded_trials(study, sweep))
    storage.remove_session()
    storage.engine.dispose()  # else SQLite writes its log into the file whenever the garbage is collected


def with_trial(sweep: StudyRecords, trial: Trial, *attempts: Attempt) -> StudyRecords:
    """The sweep with one trial, and its attempts, put in the place of what it had."""
    others: Mapping[tuple[int, int], Attempt] = {k: a for k, a in sweep.attempts.items() if k[0] != trial.number}
    made = {(a.trial, a.number): a for a in attempts} or {
        k: a for k, a in sweep.attempts.items() if k[0] == trial.number
    }
    return replace(sweep, trials={**sweep.trials, trial.number: trial}, attempts={**others, **made})


def _proposed(study: Study, number: int, now: float, rng: random.Random) -> Trial:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    tuned: dict[str, str | int | float | bool] = {}
    for name, d in study.search_space.distributions().items():
        if isinstance(d, FloatDistribution):
            low, high = (math.log(d.low), math.log(d.high)) if d.log else (d.low, d.high)
            drawn = rng.uniform(low, high)
            tuned[name] = math.exp(drawn) if d.log else drawn
        elif isinstance(d, IntDistribution):
            tuned[name] = rng.randrange(d.low, d.high + 1, d.step)
        elif isinstance(d, CategoricalDistribution):
            choice = rng.choice(d.choices)
            assert choice is not None
            tuned[name] = choice
    return Trial(
        number=number,
        seed=study.trial_seed(number),
        tuned=tuned,
        parameters=study.search_space.resolve(tuned),
        why="random start" if number < 5 else "expected gain 1.2 min",
        state=TrialState.RUNNING,
        proposed_at=now,
    )


def _crossing(trial: Trial, rng: random.Random) -> float:
    """Samples to the target: a parabola in ln LR about 5e-4, growing with the batch, with 4.6% seed luck."""
    rate, batch = float(trial.parameters.get("LR", 5e-4)), float(trial.parameters.get("GBS", 8))
    away = math.log(rate / 5e-4)
    return 2900 * (batch / 8) ** 0.35 * math.exp(0.35 * away**2 + rng.gauss(0, 0.046))


def _curve(trial: Trial, target: float, count: int, rng: random.Random, speed: float) -> tuple[Eval, ...]:
    crossing, step = _crossing(trial, rng), 384.0 if count <= 12 else 96.0
    first = max(384.0, math.ceil((crossing / step) - count + 1) * step)
    found: list[Eval] = []
    for i in range(count):
        samples = first + i * step
        loss = target - 0.0225 * math.log(samples / crossing) + rng.gauss(0, 0.0004)
        found.append(Eval(samples, loss, samples / speed + 34.5 * (i + 1)))
        if loss <= target:
            break
    return tuple(found)


def _speed(trial: Trial, rng: random.Random) -> float:
    tp = float(trial.parameters.get("TP", 1))
    return (2.4 - 0.15 * abs(math.log2(tp) - 1)) * math.exp(rng.gauss(0, 0.0014))


def _attempt(trial: Trial, number: int, start: float, seconds: float, slot: int) -> Attempt:
    return Attempt(
        trial=trial.number,
        number=number,
        job_name=f"built-{trial.number:04d}-{number}",
        folder=f"trials/{trial.number:04d}/attempt-{number}",
        job_id=str(1000 + 10 * trial.number + number),
        state="ended",
        intended_at=start,
        submitted_at=start + 1,
        started_at=start + 4,
        ended_at=start + 4 + seconds,
        nodes=(f"node{slot + 1}",),
        exit_code=0,
    )


def _running(trial: Trial, now: float, slot: int, rng: random.Random, evals: int) -> tuple[Attempt, tuple[Eval, ...]]:
    curve = _curve(trial, 0.925, evals, rng, _speed(trial, rng))[: max(2, evals // 2)]
    attempt = replace(_attempt(trial, 0, now, curve[-1].seconds, slot), state="running", ended_at=None, exit_code=None)
    return attempt, curve


def _finish(
    study: Study, trial: Trial, now: float, slot: int, rng: random.Random, evals: int
) -> tuple[Trial, list[Attempt], tuple[Eval, ...]]:
    speed, target = _speed(trial, rng), study.objective.target or 0.925  # curves fall to it where none is stated too
    fate = rng.random()
    if fate < 0.1:
        return _out_of_memory(trial, now, slot)
    attempts: list[Attempt] = []
    if fate < 0.2:
        failed = _attempt(trial, 0, now, 400, slot)
        attempts.append(
            replace(
                failed,
                state="node failed",
                failure="infrastructure",
                line="NCCL WARN NET/IB : Got completion with error 12",
                remedy="another node; run the NCCL test on this one",
            )
        )
        now += 410
    curve = _curve(trial, target, evals, rng, speed)
    verdict, sentence, stop = Verdict.REACHED, "", StopKind.NONE
    if curve[-1].loss > target:
        verdict, sentence = Verdict.CENSORED, f"eval loss {curve[-1].loss:.4f}"
    if _crossing(trial, random.Random(trial.number)) > 4500:
        curve = curve[: max(2, len(curve) // 2)]
        verdict, stop = Verdict.PRUNED, StopKind.PRUNED
        sentence = "stalled: two evals in a row 0.0081 above the median curve; 0.3% of good runs look like this"
    run = RunLog(
        init_start_ms=0,
        init_stop_ms=120_000,
        run_start_ms=120_000,
        evals=curve,
        throughput=(speed * 0.985, speed, speed),
        eval_seconds=(34.5, 34.5),
    )
    reached = run.reached(target)
    if verdict is Verdict.REACHED and reached is not None:
        sentence = f"eval loss {reached.loss:.4f} at {study.counted(reached.samples)}, {reached.seconds:.1f} s"
    attempt = _attempt(trial, len(attempts), now, 120 + curve[-1].seconds + 10, slot)
    attempts.append(replace(attempt, stop=stop, stop_sentence=sentence if stop else ""))
    done = replace(
        trial,
        seconds=reached.seconds if reached and verdict is Verdict.REACHED else None,
        samples=reached.samples if reached and verdict is Verdict.REACHED else None,
        metrics=conclusion.measured(study, trial, attempts, run, now),
    )
    end = attempt.ended_at
    assert end is not None
    return done.finished(verdict, sentence, end), attempts, curve


def _out_of_memory(trial: Trial, now: float, slot: int) -> tuple[Trial, list[Attempt], tuple[Eval, ...]]:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB."
    remedy = "more TP or CP, or smaller micro batches"
    attempts = [
        replace(
            _attempt(trial, n, now + 300 * n, 250, slot), exit_code=1, failure="infeasible", line=line, remedy=remedy
        )
        for n in range(2)
    ]
    metrics = TrialMetrics(node_hours=sum(a.node_hours(now) for a in attempts), evals=0.0)
    done = replace(trial, metrics=metrics).finished(Verdict.INFEASIBLE, line, attempts[-1].ended_at or now)
    return done, attempts, ()


HOSTILE = (
    "'\"<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">\n"
    "$(touch owned) `touch owned` \x1b[31m\x07 | [x](javascript:alert(1)) {{ 7*7 }} \\ %s ${HOME} \u202e"
)
"""A text that would run, draw, break or link wherever it is not treated as a text."""


def hostile() -> tuple[Study, StudyRecords]:
    """A study and a sweep with :data:`HOSTILE` in every text that a user, a log or a cluster can write."""
    choice = f'OPTIMIZER = {{ type = "categorical", choices = ["adamw", {json.dumps(HOSTILE)}] }}'
    text = STUDY.replace("[objective]", f"{choice}\n[objective]")
    text = text.replace('"a study for tests"', json.dumps(HOSTILE))
    study = study_of(text, "hostile")
    sweep = sweep_of(study, trials=12, text=text, running=1)
    trials = {n: replace(t, sentence=HOSTILE, why=HOSTILE) for n, t in sweep.trials.items()}
    attempts = {
        key: replace(a, nodes=(HOSTILE,), job_id=HOSTILE, line=HOSTILE if a.failure else "", remedy=HOSTILE)
        for key, a in sweep.attempts.items()
    }
    return study, replace(sweep, trials=trials, attempts=attempts)
