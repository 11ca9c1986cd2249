"""``python -m lora_tune.replay --study NAME LOG...``: apply a sweep's decisions to existing logs."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lora_tune.base.errors import EXIT_NOTHING_REACHED
from lora_tune.base.text import counted
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.logs.log_files import log_files
from lora_tune.logs.run import LogReader
from lora_tune.review.log_replay import Replay, ReplayedLog
from lora_tune.search.objectives import objective_of
from lora_tune.store.records import Value
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Proposal

FAULT = "not played"


def run(study_name: str, as_json: bool, logs: tuple[Path, ...]) -> None:
    """Run ``replay``; options: cli/commands.py."""
    file = find_study(study_name)
    study = load_study(file)
    workload = load_workload(study, file)

    def reader_for(parameters: Mapping[str, Value]) -> LogReader:
        return workload.reader(Proposal(number=0, attempt=0, seed=0, parameters=parameters))

    replay = Replay(study, reader_for)
    ends: Counter[str] = Counter()
    for log in log_files(logs):
        text = b"".join(log.pieces())
        if log.problem:
            click.echo(log.problem, err=True)
            if not text:
                if as_json:
                    click.echo(json.dumps(unread(log.name, log.problem)))
                continue
        try:
            played = replay.play(text, log.name)
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # one bad log must not stop the others
            click.echo(f"{log.name}: not played: a fault in lora_tune ({error!r}); please report it", err=True)
            ends[FAULT] += 1
            continue
        click.echo(json.dumps(as_object(log.name, played)) if as_json else "\n".join(lines(log.name, played, study)))
        ends[_end(played)] += 1
    if not ends:
        raise SystemExit(EXIT_NOTHING_REACHED)
    if not as_json:
        click.echo("; ".join(f"{count} {end}" for end, count in ends.most_common()))
    if ends[FAULT]:
        raise SystemExit(1)


def as_object(name: str, played: ReplayedLog) -> dict[str, Any]:
    """A log's result as plain data; unknown, non-finite and unreached numbers are None."""
    return {
        "log": name,
        "reached": played.reached,
        "stop_seconds": _number(played.stop.seconds if played.stop else None),
        "objective_seconds": _number(played.objective),
        "low": _number(played.low),
        "high": _number(played.high),
        "evals": [
            [_number(e.samples), _number(_as_printed(e.loss, played)), _number(e.seconds)] for e in played.run.evals
        ],
        "verdicts": [
            {"kind": v.kind, "at_seconds": _number(v.at_seconds), "sentence": v.sentence} for v in played.verdicts
        ],
    }


def unread(name: str, problem: str) -> dict[str, Any]:
    """The object of an unreadable log. problem: why."""
    nothing = dict.fromkeys(("stop_seconds", "objective_seconds", "low", "high"))
    failed = {"kind": "failed", "at_seconds": 0.0, "sentence": problem}
    return {"log": name, "reached": False, **nothing, "evals": [], "verdicts": [failed]}


def lines(name: str, played: ReplayedLog, study: Study) -> list[str]:
    """A log's result as text: evals, objective, each verdict with its time, and what stopping would lose or save."""
    run = played.run
    facts = ", ".join(f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}"
                      for key, value in played.parameters.items())  # fmt: skip
    shown = [f"{name}: {played.ending}", f"  {counted(len(run.evals), 'evals')}; {facts or 'no parameters'}"]
    if played.objective is not None:
        unit = "s" if objective_of(study).timed else objective_of(study).unit
        between = f", 90% interval {played.low:.1f} to {played.high:.1f}" if played.low and played.high else ""
        shown.append(f"  objective ({study.objective.score}): {played.objective:.1f} {unit}{between}")
    shown += [f"  {v.kind} at {v.at_seconds:.0f} s: {v.sentence}" for v in played.verdicts]
    return [*shown, *_consequence(played)]


def _consequence(played: ReplayedLog) -> list[str]:
    """What stopping the run would have lost or saved, as a line; empty if nothing would have stopped it."""
    run = played.run
    early = next((v for v in played.verdicts if v.kind in ("pruned", "capped")), None)
    if early is None or run.last_ms is None or run.run_start_ms is None:
        return []
    whole = (run.last_ms - run.run_start_ms) / 1000
    if played.lost:
        return [f"  LOST: {played.ending}"]
    return [f"  saved: {max(0.0, whole - early.at_seconds):.0f} of its {whole:.0f} s"]


def _end(played: ReplayedLog) -> str:
    """The run's end in the sweep, in a word or two."""
    if not played.verdicts:
        return "reached" if played.reached else "ended before the target"
    return played.verdicts[0].kind + (" (a loss)" if played.lost else "")


def _as_printed(loss: float, played: ReplayedLog) -> float:
    """An eval as logged: a rising metric is stored as its distance to a ceiling."""
    return loss if played.ceiling is None else round(played.ceiling - loss, 12)


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
