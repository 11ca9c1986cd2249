"""Views of a running sweep: live screen, plain lines, JSON lines, or none."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, Literal

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lora_tune import curves
from lora_tune.base.text import duration, number, sparkline, visible
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.controller.evidence import max_samples
from lora_tune.logs.run import Eval
from lora_tune.review import stopping as replicates
from lora_tune.review.summary import ending_label, parameters_text, price, race_text
from lora_tune.search.objectives import Objective, objective_of
from lora_tune.search.recommendation import best_run
from lora_tune.store.records import Attempt, StudyRecords, Trial, TrialState, Verdict

# A table that drops columns on a narrow terminal, so that no number is truncated.


Cells = dict[str, str | Text]
"""Column -> cell; all rows of a table have the same columns."""

CURVE_WIDTH = 16
"""Evals in the column "curve" if there is room."""

_SHORT_CURVE, _SHORTEST_CURVE, _SHORT_PARAMETERS = 8, 5, 12
_LEFT = ("state", "curve", "parameters")
_FIRST_TO_GO, _KEPT = ("parameters", "ETA", "curve", "to target"), ("trial", "state")
"""Columns that are dropped first, and those that are never dropped; the others follow from the last on."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    """Rows as a rich renderable; the column "parameters" takes the remaining width."""

    rows: Sequence[Cells]
    title: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self.at(options.max_width)

    def at(self, room: int) -> Table:
        """The table at a width of ``room`` characters."""
        columns, gap, curve_width = _layout(self.rows, room)
        table = Table(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=None,
            padding=(0, gap, 0, 0),
            header_style="bold",
            expand="parameters" in columns,
        )
        for name in columns:
            width = curve_width if name == "curve" else None
            ratio = 1 if name == "parameters" else None
            justify: Literal["left", "right"] = "left" if name in _LEFT else "right"
            table.add_column(
                name, justify=justify, width=width, ratio=ratio, no_wrap=name != "parameters", overflow="fold"
            )
        for row in self.rows:
            shown = {**row, "curve": str(row.get("curve", ""))[-curve_width:]}
            table.add_row(*(shown[name] for name in columns))
        return table


def _layout(rows: Sequence[Cells], room: int) -> tuple[list[str], int, int]:
    """Columns that fit into ``room`` characters, the gap between them, and the width of the curve.

    First gaps and curve shrink, then columns are dropped.
    """
    columns = list(rows[0]) if rows else []
    widths = {name: max(len(name), *(cell_len(str(row[name])) for row in rows)) for name in columns}
    word = max((cell_len(word) for row in rows for word in str(row.get("parameters", "")).split()), default=0)
    least = max(_SHORT_PARAMETERS, word)  # a narrower column would break a value
    for gap, curve_width, shown in ((2, CURVE_WIDTH, 3 * least), (1, _SHORT_CURVE, least), (1, _SHORTEST_CURVE, least)):
        widths |= {"curve": curve_width, "parameters": min(widths.get("parameters", 0), shown)}
        if sum(widths[name] + gap for name in columns) <= room:
            return columns, gap, curve_width
    for name in (*_FIRST_TO_GO, *(n for n in reversed(columns) if n not in (*_FIRST_TO_GO, *_KEPT))):
        if sum(widths[kept] + gap for kept in columns) > room and name in columns:
            columns.remove(name)
    return columns, gap, curve_width


_COLOURS = {
    Verdict.REACHED: "green",
    Verdict.CENSORED: "yellow",
    Verdict.PRUNED: "dark_orange",
    Verdict.CAPPED: "dark_orange",
    Verdict.INFEASIBLE: "magenta",
    Verdict.FAILED: "red",
    Verdict.CANCELLED: "red",
}


_WORDS = {**{str(verdict): colour for verdict, colour in _COLOURS.items()}, "measured": "green", "again": "yellow"}
"""Colours of the verdict in an event line."""

_RACED = {"confirmed": "bold green", "passed over": "yellow"}
"""Colours of confirmation outcomes."""

_VERDICT = re.compile(rf"(?:trial|run) \d+ +({'|'.join(_WORDS)}) +")


def seconds_left(evals: tuple[Eval, ...], target: float) -> float | None:
    """Seconds until the fitted curve crosses the target, at the pace so far; None if it does not, or if unknown."""
    if len(evals) < 3 or not evals[-1].samples > 0:
        return None
    crossing = curves.estimate(evals, target)
    left = (crossing.samples - evals[-1].samples) * evals[-1].seconds / evals[-1].samples
    return left if 0 <= left < 1e7 else None


class Quiet:
    """Prints nothing."""

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Plain(Quiet):
    """Prints one line per event, for logs and pipes."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout

    def line(self, text: str) -> None:
        print(visible(text), file=self._out, flush=True)


class JsonLines(Quiet):
    """Prints one JSON object per event, for programs."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout
        self._known: dict[int, str] = {}

    def line(self, text: str) -> None:
        self._write({"event": "line", "text": text})

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        for trial in sweep.trials.values():
            state = trial.verdict or trial.state
            if self._known.get(trial.number) != state:
                self._known[trial.number] = state
                facts = {"trial": trial.number, "state": str(state), "tuned": dict(trial.tuned)}
                self._write({"event": "trial", **facts, "seconds": trial.seconds, "samples": trial.samples})

    def _write(self, content: dict[str, Any]) -> None:
        print(json.dumps(content), file=self._out, flush=True)


class Screen:
    """A rich screen that refreshes in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=5)
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False, redirect_stderr=False)
        self._live.start()

    def update(self, study: Study, sweep: StudyRecords, now: float) -> None:
        self._live.update(screen(study, sweep, now, list(self._lines)))

    def line(self, text: str) -> None:
        self._lines.append(text)

    def close(self) -> None:
        """Keep the last screen and release the terminal."""
        self._live.stop()


def screen(study: Study, sweep: StudyRecords, now: float, lines: list[str]) -> RenderableType:
    """The whole screen, a pure function of the records."""
    return Panel(
        Group(_headline(study, sweep), _budget(study, sweep, now), "", _trials(study, sweep, now), "", _log(lines)),
        title=f"[bold]lora_tune[/] · {study.name}",
        subtitle=Text(visible(study.description)) if study.description else None,
        border_style="cyan",
    )


def _headline(study: Study, sweep: StudyRecords) -> Text:
    if any(t.replicate_of is not None for t in sweep.trials.values()):
        return _race(study, sweep)
    objective = objective_of(study)
    best = best_run(study, sweep)
    if best is None:
        return Text(f"{objective.nothing} yet", style="dim")
    text = Text("best: ", style="bold")
    text.append(objective.scalar(best.objective), style="bold green")
    text.append(f"    trial {best.number}    {parameters_text(best)}")
    return text


def _race(study: Study, sweep: StudyRecords) -> Text:
    """Mean of each configuration over its runs; the luckiest run is not a result."""
    shown = race_text(study, replicates.replicates(sweep))
    text = Text("mean of runs: ", style="bold")
    return text.append("; ".join(shown) or "none is over yet", style="bold green")


def _budget(study: Study, sweep: StudyRecords, now: float) -> Table:
    grid = Table.grid(padding=(0, 2))
    budget = study.budget
    done = sum(t.state is TrialState.FINISHED for t in sweep.trials.values())
    if budget.trials:
        grid.add_row("trials", _bar(budget.trials, done), f"{done} of {budget.trials}")
    spent = sweep.node_hours(now)
    if budget.node_hours:
        usage = f"{spent:.3g} of {budget.node_hours:g}{price(study, spent)}"
        grid.add_row("node-hours", _bar(budget.node_hours, spent), usage)
    else:
        grid.add_row(spent_name(study), f"{spent_text(study, spent)}{price(study, spent)}")
    return grid


def _bar(total: float, done: float) -> ProgressBar:
    return ProgressBar(total, done, width=30, complete_style="cyan", finished_style="green")


def _trials(study: Study, sweep: StudyRecords, now: float) -> FittedTable:
    open_trials = [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
    ended = sorted((t for t in sweep.trials.values() if t.verdict), key=lambda t: t.finished_at or 0.0)
    return trials_table(study, sweep, [*ended[-6:], *open_trials[:12]], now)


def trials_table(
    study: Study, sweep: StudyRecords, trials: Sequence[Trial], now: float, title: str = ""
) -> FittedTable:
    """One row per trial: state, time, latest eval, curve, distance to the target, ETA, parameters.

    A throughput study, which has no target, shows samples/s instead.
    """
    return FittedTable([_row(study, sweep, trial, now) for trial in trials], title)


def _row(study: Study, sweep: StudyRecords, trial: Trial, now: float) -> Cells:
    objective, attempts = objective_of(study), sweep.attempts_of(trial.number)
    evals = sweep.last_evals(trial.number)
    started = attempts[-1].started_at if attempts else None
    state: Text
    if trial.verdict is not None:
        state = Text(word := ending_label(study, trial), style=_RACED.get(word, _COLOURS[trial.verdict]))
        elapsed = trial.metrics.objective if objective.timed else _took(attempts)
    else:
        stopping = bool(attempts and attempts[-1].stop)
        state = Text("stopping" if stopping else (attempts[-1].state if attempts else "waiting"), style="cyan")
        elapsed = now - started if started else None
    return {
        "trial": str(trial.number),
        "state": state,
        "time": duration(elapsed),
        **_progress(study, objective, trial, evals),
        "parameters": parameters_text(trial),
    }


def _took(attempts: Sequence[Attempt]) -> float | None:
    """Seconds from start to end of a trial's last job."""
    last = attempts[-1] if attempts else None
    if last is None or last.started_at is None or last.ended_at is None:
        return None
    return last.ended_at - last.started_at


def _progress(study: Study, objective: Objective, trial: Trial, evals: Sequence[Eval]) -> Cells:
    """The columns that show a trial's progress, which depend on the objective."""
    value, target = trial.metrics.objective, study.objective.target
    if not objective.judges_evals:
        return {objective.heading.lower(): objective.scalar(value).split()[0] if value is not None else "-"}
    cells: Cells = {
        study.measure: number(study.shown(evals[-1].loss)) if evals else "-",
        "curve": sparkline([study.shown(e.loss) for e in evals], CURVE_WIDTH),
    }
    if not objective.has_target or target is None:
        return {**cells, "best": objective.text(value) if value is not None else "-"}
    away = f"{study.shown(evals[-1].loss) - target:+.4f}" if evals else "-"
    return {**cells, "to target": away, "ETA": "-" if trial.verdict else _eta(study, trial, tuple(evals))}


LATE = "too late"
"""Replaces an ETA beyond the trial's end."""


def _eta(study: Study, trial: Trial, evals: tuple[Eval, ...]) -> str:
    """Time left until the target, or ``LATE`` if the trial's steps or its time limit end before."""
    left, end = seconds_left(evals, study.target), max_samples(trial)
    if left is None:
        return "-"
    last = evals[-1]
    by_steps = math.inf if end is None else (end - last.samples) * last.seconds / last.samples
    by_clock = study.budget.trial_minutes * 60 - last.seconds
    return duration(left) if left <= min(by_steps, by_clock) else LATE


def _log(lines: list[str]) -> RenderableType:
    return Group(*(_said(visible(line)) for line in lines))


def _said(line: str) -> RenderableType:
    """One line; text after a verdict wraps within its column."""
    match = _VERDICT.match(line)
    if match is None:
        return Text(line, style="dim", overflow="fold")
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    head = Text(match[0], style="dim")
    head.stylize(_WORDS[match[1]], *match.span(1))
    grid.add_row(head, Text(line[match.end() :], style="dim"))
    return grid
