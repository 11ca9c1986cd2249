"""``sweeps/NAME/report.html``: a sweep's report as one self-contained file."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import platform
import re
import time
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from lora_tune.base import VERSION
from lora_tune.base.host import installed
from lora_tune.base.text import duration, redact
from lora_tune.cli.options import (
    NO_FEEDBACK,
    Feedback,
    absolute_command_line,
    feedback_of,
    load_review,
    sweep_paths,
    watch_store,
)
from lora_tune.cli.verdict import shown
from lora_tune.config.spent import spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.controller.steering import describe
from lora_tune.review import chart, importance
from lora_tune.review.advice import advise
from lora_tune.review.importance import scaling
from lora_tune.review.page import (
    hours,
    page_figures,
    page_file,
    searched_names,
    template,
    trial_rows,
    value_text,
    write_figures,
    write_page,
)
from lora_tune.review.stopping import account_text
from lora_tune.review.summary import (
    Overview,
    best_run_text,
    objective_text,
    overview,
    prior_text,
    recommended_text,
    score_text,
    trial_name,
)
from lora_tune.search.campaign import ArmState, campaign
from lora_tune.search.noise import scale_of
from lora_tune.search.objectives import objective_of
from lora_tune.search.recommendation import chance_to_pass, nearest_text, recommend
from lora_tune.store.metrics import ConfirmedChoice
from lora_tune.store.records import StudyRecords, Trial

ARMS_SHOWN = 30
"""Maximum verdicts on the page; a search that repeats configurations may have hundreds."""

_TAG = re.compile(r"(?<!\S)#([^\W\d][\w-]*)")
"""A #tag in a remark, as the dashboard of an earlier release stored it."""

_PACKAGES = ("optuna", "submitit", "torch", "sqlalchemy", "mlperf-logging")


def write_report(
    study: Study,
    sweep: StudyRecords,
    path: Path,
    feedback: Feedback = NO_FEEDBACK,
    folder: Path | None = None,
    storage: str | None = None,
) -> None:
    """Write the report of ``sweep`` to ``path``, replacing an older one atomically.

    feedback, folder, storage: see report_html; default folder: that of ``path``.
    """
    write_page(path, report_html(study, sweep, time.time(), feedback, folder or path.parent, storage))


def report_html(
    study: Study,
    sweep: StudyRecords,
    now: float,
    feedback: Feedback = NO_FEEDBACK,
    folder: Path | None = None,
    storage: str | None = None,
) -> str:
    """The report as one HTML document that loads nothing. now: epoch seconds. feedback: of users.

    folder, storage: of the sweep, for the commands on the page. All text of the study is escaped, and the page's
    content security policy admits only its own script.
    """
    script = page_file("report.js")
    summary = overview(study, sweep, now)
    place = folder or sweep_paths(study.name).root
    line = partial(absolute_command_line, study=study.name, folder=place, storage=storage)
    return template("report.html.j2").render(
        study=study,
        objective=objective_of(study),
        study_toml=redact(sweep.study_toml),
        summary=summary,
        advice=advise(study, sweep),
        against=_against(study, sweep),
        cards=_cards(study, sweep, summary),
        best=_best(study, summary),
        confirmed=_confirmed(study, sweep),
        missed=scale_of(study).missed,
        ledger=_ledger(study, sweep),
        scales=scaling(study, sweep),
        figures=page_figures(study, sweep, now),
        table=(table := trial_rows(study, sweep, now)),
        verdicts=sorted(set(table.states)),
        **_feedback(feedback),
        clone=line("steer", "--enqueue", "--clone", "TRIAL", "--set", "NAME=VALUE"),
        export=line("export"),
        provenance=_provenance(study, sweep, now),
        style=page_file("report.css") + chart.page_style(),
        light=chart.LIGHT,
        dark=chart.DARK,
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        duration=duration,
        **_amounts(study),
    )


def _amounts(study: Study) -> dict[str, Any]:
    """Formatters of hours and spent amounts for the template, and the study's name of what is spent."""
    name = spent_name(study)
    return {
        "hours": hours,
        "spent_name": name.capitalize(),
        "amount": lambda value: spent_text(study, value, hours),
        "spent": lambda value: f"{spent_text(study, value, hours)} of {name}",
    }


def _feedback(feedback: Feedback) -> dict[str, list[tuple[object, ...]]]:
    return {
        "requests": [
            (_moment(r.asked_at), r.who, describe(r), r.answer or "not answered yet") for r in feedback.requests
        ],
        "remarks": [
            (r.trial, " ".join(dict.fromkeys(_TAG.findall(r.text))), r.text, r.who, _moment(r.written_at))
            for r in feedback.remarks
        ],
    }


def _ledger(study: Study, sweep: StudyRecords) -> list[str]:
    """Verdicts on configurations that were run again, after a summary; empty if none was tested."""
    judged = campaign(study, sweep)
    arms = [arm.sentence for arm in shown(judged) if arm.state is not ArmState.CHOSEN_BY]
    rest = [f"{len(arms) - ARMS_SHOWN} more: lora-tune verdict lists them"] if len(arms) > ARMS_SHOWN else []
    return [judged.summary, *arms[:ARMS_SHOWN], *rest] if judged.tested else []


def _against(study: Study, sweep: StudyRecords) -> list[str]:
    """Changes of the recommended configuration (if run, else of the best run) against the base config, as lines."""
    recommended = recommend(study, sweep)
    if recommended is None:
        return []
    return [line.strip() for line in importance.change_lines(study, sweep, recommended.shown)]


Card = tuple[str, str, str]
"""(label, value, explanation) of the summary."""


def _cards(study: Study, sweep: StudyRecords, summary: Overview) -> list[Card]:
    cards = [*_recommended_card(study, summary), _result_card(study, summary)]
    if expected := chance_to_pass(study, sweep, summary.recommended):
        cards.append(("Passing with ten runs", f"{expected.passes:.0%}", expected.sentence))
    ended = ", ".join(f"{n} {objective_of(study).verdict_name(v)}" for v, n in summary.verdicts.items())
    cards.append(("Trials", str(summary.trials), ended + (f", {summary.open} open" if summary.open else "")))
    money = f"= {summary.node_hours * price:,.0f} in money, " if (price := study.budget.price_per_node_hour) else ""
    budget = f"of {study.budget.node_hours:g} allowed, " if study.budget.node_hours else ""
    idle, spent, saved = summary.overhead_hours, summary.node_hours, summary.saved
    overhead = f", {hours(idle)} of them in packs that trained nobody" if idle else ""
    name = spent_name(study).capitalize()
    cards.append(
        (f"{name} spent", spent_text(study, spent, hours), f"{budget}{money}in {duration(summary.seconds)}{overhead}")
    )
    share = f"about {saved / (saved + spent):.0%} of what it would have cost" if saved else "no trial was stopped early"
    cards.append((f"{name} saved by stopping early", spent_text(study, saved, hours), share))
    if summary.stopping:
        kept = "no run yet" if summary.stopping.kept is None else f"{100 * summary.stopping.kept:.3g}%"
        cards.append(("Good runs stopped by error, at most", kept, account_text(summary.stopping)))
    return cards


def _recommended_card(study: Study, summary: Overview) -> list[Card]:
    """The recommendation; empty before any trial reached the target."""
    if (recommended := summary.recommended) is None:
        return []
    sentence = f"{recommended_text(study, recommended)}; {trial_name(recommended.trial)}"
    return [(f"Recommended: {objective_text(study)}", objective_of(study).text(recommended.objective), sentence)]


def _result_card(study: Study, summary: Overview) -> Card:
    label, objective = f"Best single run: {objective_text(study)}", objective_of(study)
    if summary.best is None:
        return (label, "none yet", nearest_text(summary.nearest) if summary.nearest else objective.nothing)
    value, number = summary.best.objective, summary.best.number
    if not objective.timed:
        return (label, objective.text(value), f"trial {number}")
    other = f"{score}; " if (score := score_text(study, summary.best)) else ""
    return (label, duration(value), f"trial {number}; {other}one run, picked for being the best: luck is part of it")


def _best(study: Study, summary: Overview) -> dict[str, Any] | None:
    """The recommended parameters, the tuned ones marked, and the best single run as text."""
    if (recommended := summary.recommended) is None:
        return None
    searched = searched_names(study)
    rows = [(name, value_text(value), name in searched) for name, value in recommended.trial.parameters.items()]
    return {
        "name": trial_name(recommended.trial),
        "words": recommended_text(study, recommended),
        "luckiest": best_run_text(study, recommended),
        "parameters": rows,
    }


def _confirmed(study: Study, sweep: StudyRecords) -> list[Trial]:
    """Trials whose configurations were confirmed with more seeds, the chosen one first."""
    confirmed = [(race, t) for t in sweep.trials.values() if (race := t.metrics.confirmed) is not None]
    scale = scale_of(study)
    confirmed.sort(key=lambda pair: (pair[0].choice is not ConfirmedChoice.CHOSEN, scale.order(pair[0].seconds)))
    return [trial for _, trial in confirmed]


def _provenance(study: Study, sweep: StudyRecords, now: float) -> Mapping[str, str]:
    seeds = [t.seed for t in sweep.trials.values()]
    return {
        "Study": f"{study.name}, hash {sweep.digest}",
        "Began": _moment(sweep.began_at),
        "Report written": _moment(now),
        "lora_tune": VERSION,
        "Packages here": ", ".join(f"{name} {version}" for name in _PACKAGES if (version := installed(name))),
        "Python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "Sampler": f"{study.search.sampler}, seed {study.search.seed}",
        **({"Starts from": starts} if (starts := prior_text(study, sweep)) else {}),
        "Trial seeds": f"{min(seeds)} to {max(seeds)}" if seeds else "none yet",
        "Trials run on": _where(study),
    }


def _where(study: Study) -> str:
    site = study.site
    nodes = f"{site.nodes} node{'s' if site.nodes > 1 else ''}"
    gpus = f" x {site.gpus_per_node} GPU{'s' if site.gpus_per_node > 1 else ''}" if site.gpus_per_node else ", CPU only"
    return f"{site.system}: {nodes}{gpus}, launcher {site.launcher}"


def _moment(seconds: float) -> str:
    return f"{datetime.datetime.fromtimestamp(seconds, datetime.UTC):%Y-%m-%d %H:%M} UTC"


def run(
    study_name: str,
    storage: str | None,
    output: Path | None,
    path: Path | None,
    svg_folder: Path | None,
    png: Path | None,
    pdf: Path | None,
    json_: bool,
) -> None:
    """Run ``report``; options: cli/commands.py."""
    review = load_review(study_name, output, storage)
    if svg_folder or png or pdf:
        files = write_figures(review.study, review.sweep, {"svg": svg_folder, "png": png, "pdf": pdf})
        names = [str(file) for file in files]
        click.echo(json.dumps({"report": None, "figures": names}) if json_ else "\n".join(names))
        return
    path = path or review.paths.report
    with closing(watch_store(review.paths, storage)) as store:
        feedback = feedback_of(store, review.study.name)
    write_report(review.study, review.sweep, path, feedback, review.paths.root)
    click.echo(json.dumps({"report": str(path), "figures": []}) if json_ else path)
