"""``python docs/draw_screen.py STUDY [SWEEP_FOLDER]``: the live screen of a real sweep, at three quarters of its time.

Writes docs/images/sweep.svg from the records of a finished sweep; what is drawn is what the terminal showed.
"""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lora_tune.config.study import find_study, load_study
from lora_tune.review.screen import screen
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StopKind, Sweep, TrialState

IMAGES = Path(__file__).parent / "images"
START_UP = 2.0
"""Seconds from the job's start to ``run_start``, from which evals are timed: imports and the checkpoint."""


def at(sweep: Sweep, moment: float) -> Sweep:
    """The sweep as it was at ``moment`` (epoch seconds)."""
    trials, attempts, evals = {}, {}, {}
    for trial in sweep.trials.values():
        if trial.proposed_at > moment:
            continue
        over = trial.finished_at is not None and trial.finished_at <= moment
        trials[trial.number] = (
            trial if over else replace(trial, state=TrialState.RUNNING, verdict=None, finished_at=None)
        )
    for key, attempt in sweep.attempts.items():
        if attempt.trial in trials and (attempt.started_at or 0) <= moment:
            open_ = attempt.ended_at is None or attempt.ended_at > moment
            if attempt.stop_at is not None and attempt.stop_at > moment:
                attempt = replace(attempt, stop=StopKind.NONE, stop_sentence="", stop_at=None)
            attempts[key] = replace(attempt, ended_at=None, state="running") if open_ else attempt
            begun = (attempt.started_at or 0.0) + START_UP
            seen = [e for e in sweep.evals.get(key, ()) if begun + e.seconds <= moment or not open_]
            evals[key] = tuple(seen)
    return replace(sweep, trials=trials, attempts=attempts, evals=evals)


def main(name: str, folder: Path) -> None:
    study = load_study(find_study(name))
    sweep = Store(sqlite_url(folder / "sweep.db"), read_only=True).load(study.name)
    assert sweep is not None, f"no sweep in {folder}"
    end = max(t.finished_at or 0.0 for t in sweep.trials.values())
    moment = sweep.began_at + 0.75 * (end - sweep.began_at)
    said = [json.loads(line) for line in (folder / "driver.log").read_text(encoding="utf-8").splitlines()]
    lines = [event["text"] for event in said if event["at"] <= moment and "text" in event][-5:]
    console = Console(record=True, width=132, file=io.StringIO())
    console.print(screen(study, at(sweep, moment), moment, lines))
    IMAGES.mkdir(exist_ok=True)
    console.save_svg(str(IMAGES / "sweep.svg"), title=f"python -m lora_tune.sweep --study {name}")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path("sweeps") / sys.argv[1])
