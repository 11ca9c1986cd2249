"""Who watches a sweep: one live screen, plain lines, JSON lines, or nobody."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from lora_tune import curve, raced
from lora_tune.fitted_table import CURVE_WIDTH, Cells, FittedTable
from lora_tune.mllog import Eval
from lora_tune.records import Sweep, Trial, TrialState, Verdict
from lora_tune.search import replicates
from lora_tune.study import Study

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    Verdict.REACHED: "green",
    Verdict.CENSORED: "yellow",
    Verdict.PRUNED: "dark_orange",
    Verdict.CAPPED: "dark_orange",
    Verdict.INFEASIBLE: "magenta",
    Verdict.FAILED: "red",
    Verdict.CANCELLED: "red",
}


def sparkline(values: list[float], width: int = CURVE_WIDTH) -> str:
    """The last ``width`` finite values as bars, lowest to highest."""
    shown = [v for v in values if v == v and abs(v) != float("inf")][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in shown)


def seconds_left(evals: tuple[Eval, ...], target: float) -> float | None:
    """Seconds until the fitted curve crosses the target, at the speed so far; None when it does not, or is unknown."""
    if len(evals) < 3 or not evals[-1].samples > 0:
        return None
    crossing = curve.estimate(evals, target)
    left = (crossing.samples - evals[-1].samples) * evals[-1].seconds / evals[-1].samples
    return left if 0 <= left < 1e7 else None


def duration(seconds: float | None) -> str:
    """Seconds as people read them; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d} h" if hours else f"{minutes}:{rest:02d} min"


def visible(text: object, keep: str = "") -> str:
    """Any text without what a terminal or a page would act on: control and direction characters become spaces.

    keep: characters to leave as they are, such as line ends.
    """
    return "".join(c if c.isprintable() or c in keep else " " for c in str(text))


def parameters_text(trial: Trial) -> str:
    """The tuned values, short: ``LR=0.0031 MAX_STEPS=200 tp4 minibs4``; degrees of 1 are left out of a layout."""
    parts = []
    for name, value in trial.tuned.items():
        if isinstance(value, str) and value.startswith("tp"):
            parts.append(short_layout(value))
        else:
            parts.append(f"{name}={value:.3g}" if isinstance(value, float) else f"{name}={value}")
    return visible(" ".join(parts))


def short_layout(text: str) -> str:
    """A layout without its degrees of 1: ``tp4 pp1 cp1 minibs4 mbs1 sp1`` is ``tp4 minibs4 sp1``; SP is a switch."""
    return " ".join(re.findall(r"sp1|[a-z]+(?!1\b)\d+", text)) or text


class Quiet:
    """Nobody watches."""

    def update(self, study: Study, sweep: Sweep, now: float) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def close(self) -> None:
        pass


class Plain(Quiet):
    """One line an event: logs and pipes."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout

    def line(self, text: str) -> None:
        print(visible(text), file=self._out, flush=True)


class JsonLines(Quiet):
    """One JSON object an event on standard output, for programs."""

    def __init__(self, out: IO[str] | None = None) -> None:
        self._out = out or sys.stdout
        self._known: dict[int, str] = {}

    def line(self, text: str) -> None:
        self._write({"event": "line", "text": text})

    def update(self, study: Study, sweep: Sweep, now: float) -> None:
        for trial in sweep.trials.values():
            state = trial.verdict or trial.state
            if self._known.get(trial.number) != state:
                self._known[trial.number] = state
                facts = {"trial": trial.number, "state": str(state), "tuned": dict(trial.tuned)}
                self._write({"event": "trial", **facts, "seconds": trial.seconds, "samples": trial.samples})

    def _write(self, content: dict[str, Any]) -> None:
        print(json.dumps(content), file=self._out, flush=True)


class Screen:
    """One rich screen that refreshes in place."""

    def __init__(self, console: Console | None = None) -> None:
        self._lines: deque[str] = deque(maxlen=5)
        self._console = console or Console()
        self._live = Live(console=self._console, refresh_per_second=4, transient=False, redirect_stderr=False)
        self._live.start()

    def update(self, study: Study, sweep: Sweep, now: float) -> None:
        self._live.update(screen(study, sweep, now, list(self._lines)))

    def line(self, text: str) -> None:
        self._lines.append(text)

    def close(self) -> None:
        """Leave the last picture and give the terminal back."""
        self._live.stop()


def screen(study: Study, sweep: Sweep, now: float, lines: list[str]) -> RenderableType:
    """The whole picture, a pure function of the records."""
    return Panel(
        Group(_headline(study, sweep), _budget(study, sweep, now), "", _trials(study, sweep, now), "", _log(lines)),
        title=f"[bold]lora_tune[/] · {study.name}",
        subtitle=Text(visible(study.description)) if study.description else None,
        border_style="cyan",
    )


def _headline(study: Study, sweep: Sweep) -> Text:
    if any(t.replicate_of is not None for t in sweep.trials.values()):
        return _race(study, sweep)
    best = sweep.best(maximise=study.maximise)
    if best is None:
        missing = f"target: eval loss {study.objective.target:g}    no trial has reached it yet"
        return Text("nothing measured yet" if study.maximise else missing, style="dim")
    unit = "samples/s" if study.maximise else "s to the target"
    text = Text("best: ", style="bold")
    text.append(f"{best.facts['objective']:.4g} {unit}", style="bold green")
    text.append(f"    trial {best.number}    {parameters_text(best)}")
    return text


def _race(study: Study, sweep: Sweep) -> Text:
    """Configurations that are run again: the mean of each over its runs. The luckiest run is nobody's result."""
    shown = race_words(raced.replicates(sweep), raced.seed_spread(study))
    text = Text("mean of runs: ", style="bold")
    return text.append("; ".join(shown) or "none is over yet", style="bold green")


def race_words(runs: Mapping[int, Sequence[raced.Replicate]], prior_sd: float) -> list[str]:
    """Where the configurations of a race stand, the fastest first: mean, 90% interval, runs, and those that missed.

    runs: by the trial that they repeat. prior_sd: as in :func:`search.replicates.means`.
    """
    means = replicates.means(raced.results(runs, runs), prior_sd)
    found = []
    for number, own in runs.items():
        name, count = raced.name_of(number), raced.runs_words(len(own), raced.missed(own))
        mean, low, high = means.get(name, (math.inf, math.inf, math.inf))
        time = f"{duration(mean)} ({duration(low)} to {duration(high)}, {count})" if name in means else f"({count})"
        found.append((mean, f"{name} {time}"))
    return [words for _, words in sorted(found)]


def _budget(study: Study, sweep: Sweep, now: float) -> Table:
    grid = Table.grid(padding=(0, 2))
    budget = study.budget
    done = sum(t.state is TrialState.FINISHED for t in sweep.trials.values())
    if budget.trials:
        grid.add_row("trials", _bar(budget.trials, done), f"{done} of {budget.trials}")
    spent = sweep.node_hours(now)
    if budget.node_hours:
        words = f"{spent:.3g} of {budget.node_hours:g}{price(study, spent)}"
        grid.add_row("node-hours", _bar(budget.node_hours, spent), words)
    else:
        grid.add_row("node-hours", f"{spent:.3g}{price(study, spent)}")
    return grid


def _bar(total: float, done: float) -> ProgressBar:
    return ProgressBar(total, done, width=30, complete_style="cyan", finished_style="green")


def money(study: Study, node_hours: float) -> float | None:
    """What the node-hours cost, None where the study states no price."""
    rate = study.budget.price_per_node_hour
    return None if rate is None else rate * node_hours


def price(study: Study, node_hours: float) -> str:
    """The same in words behind the node-hours, "" without a price."""
    cost = money(study, node_hours)
    return f" = {cost:,.2f} in money" if cost is not None else ""


def _trials(study: Study, sweep: Sweep, now: float) -> FittedTable:
    open_trials = [t for t in sweep.trials.values() if t.state is not TrialState.FINISHED]
    ended = sorted((t for t in sweep.trials.values() if t.verdict), key=lambda t: t.finished_at or 0.0)
    return trials_table(study, sweep, [*ended[-6:], *open_trials[:12]], now)


def trials_table(study: Study, sweep: Sweep, trials: Sequence[Trial], now: float, title: str = "") -> FittedTable:
    """One row a trial: state, time, latest eval, curve, distance to the target, ETA, parameters.

    A throughput study has no target, and its losses say nothing: samples/s stand in the place of all that.
    """
    return FittedTable([_row(study, sweep, trial, now) for trial in trials], title)


def _row(study: Study, sweep: Sweep, trial: Trial, now: float) -> Cells:
    attempts = sweep.attempts_of(trial.number)
    evals = sweep.last_evals(trial.number)
    started = attempts[-1].started_at if attempts else None
    state: Text
    if trial.verdict is not None:
        state = Text(str(trial.verdict), style=_COLOURS[trial.verdict])
        elapsed = trial.facts.get("objective") if not study.maximise else None
    else:
        stopping = bool(attempts and attempts[-1].stop)
        state = Text("stopping" if stopping else (attempts[-1].state if attempts else "waiting"), style="cyan")
        elapsed = now - started if started else None
    target, speed = study.objective.target, trial.facts.get("objective")
    progress: Cells = {
        "eval loss": f"{evals[-1].loss:.4f}" if evals else "-",
        "curve": sparkline([e.loss for e in evals], CURVE_WIDTH),
        "to target": f"{evals[-1].loss - target:+.4f}" if evals else "-",
        "ETA": duration(None if trial.verdict else seconds_left(evals, target)),
    }
    if study.maximise:
        progress = {"samples/s": f"{speed:.4g}" if speed is not None else "-"}
    return {
        "trial": str(trial.number),
        "state": state,
        "time": duration(elapsed),
        **progress,
        "parameters": parameters_text(trial),
    }


def _log(lines: list[str]) -> Text:
    return Text("\n".join(visible(line) for line in lines), style="dim", overflow="ellipsis", no_wrap=True)
