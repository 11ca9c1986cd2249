"""``python docs/draw_screen.py STUDY [SWEEP_FOLDER]``: the live screen of a real sweep, as a picture that moves.

Writes docs/images/sweep.svg from the records of a finished sweep; each frame is what the terminal showed at that time.
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from lora_tune.config.study import Study, find_study, load_study
from lora_tune.controller.monitor import first_clause, verdict_line
from lora_tune.review.screen import screen
from lora_tune.store import Store, sqlite_url
from lora_tune.store.records import StopKind, StudyRecords, TrialState

IMAGES = Path(__file__).parent / "images"
SHARES = (0.06, 0.2, 0.35, 0.5, 0.65, 0.8, 0.97)
"""When the frames are taken, as shares of the sweep's time."""
SHOWN, LAST = 1.5, 2
"""Seconds that a frame is shown, and how many times longer the last one stays."""
START_UP = 2.0
"""Seconds from the job's start to ``run_start``, from which evals are timed: imports and the checkpoint."""


def at(sweep: StudyRecords, moment: float) -> StudyRecords:
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


def line(event: dict[str, Any]) -> str:
    """What the screen says where the log holds a whole sentence, "trial 9: reached: eval loss 1.66 ..."."""
    verdict = re.fullmatch(r"trial (\d+): (\w+): (.*)", event["text"])
    return verdict_line(int(verdict[1]), verdict[2], first_clause(verdict[3])) if verdict else str(event["text"])


def frame(study: Study, sweep: StudyRecords, moment: float, said: Sequence[dict[str, Any]], number: int) -> str:
    """One picture of the screen, as SVG whose ids are its own."""
    lines = [line(event) for event in said if event["at"] <= moment and "text" in event][-5:]
    console = Console(record=True, width=132, file=io.StringIO())
    console.print(screen(study, at(sweep, moment), moment, lines))
    return console.export_svg(title=f"lora-tune sweep --study {study.name}", unique_id=f"f{number}")


def film(frames: Sequence[str]) -> str:
    """The frames as one SVG that shows each for SHOWN seconds, the last one for longer, and begins anew.

    Who wants no motion, or whose viewer knows no animation, sees the last frame.
    """
    sizes = [tuple(float(n) for n in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)[0]) for text in frames]
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    total = SHOWN * (len(frames) + LAST)
    parts, rules = [], []
    for number, (text, (w, h)) in enumerate(zip(frames, sizes, strict=True)):
        inner = re.sub(r"@font-face\s*\{.*?\}", "", text, flags=re.S).replace(
            "<!-- Generated with Rich https://www.textualize.io -->", ""
        )
        inner = re.sub(r"<svg ", f'<svg width="{w:g}" height="{h:g}" ', inner, count=1)
        begin, end = 100 * SHOWN * number / total, 100 * SHOWN * (number + 1) / total
        last = number == len(frames) - 1
        hidden = f"0%,{begin - 0.01:.2f}%{{opacity:0}}" if number else ""
        after = "" if last else f"{end:.2f}%,100%{{opacity:0}}"
        rules.append(
            f"@keyframes k{number}{{{hidden}{begin:.2f}%,{(100 if last else end - 0.01):.2f}%{{opacity:1}}{after}}}"
        )
        rules.append(f"#k{number}{{opacity:{int(last)};animation:k{number} {total:g}s infinite}}")
        parts.append(f'<g id="k{number}">{inner}</g>')
    still = "@media (prefers-reduced-motion:reduce){g{animation:none!important}}"
    style = f"<style>{''.join(rules)}{still}</style>"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">'
    return f"{head}{style}{''.join(parts)}</svg>"


def main(name: str, folder: Path) -> None:
    study = load_study(find_study(name))
    sweep = Store(sqlite_url(folder / "sweep.db"), read_only=True).load(study.name)
    assert sweep is not None, f"no sweep in {folder}"
    end = max(t.finished_at or 0.0 for t in sweep.trials.values())
    said = [json.loads(line) for line in (folder / "driver.log").read_text(encoding="utf-8").splitlines()]
    moments = [sweep.began_at + share * (end - sweep.began_at) for share in SHARES]
    frames = [frame(study, sweep, moment, said, number) for number, moment in enumerate(moments)]
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "sweep.svg").write_text(film(frames), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]) if len(sys.argv) > 2 else Path("sweeps") / sys.argv[1])
