"""The page that steers a sweep, as data and as HTML: forms without a script, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lora_tune.base.text import duration
from lora_tune.config.checks import range_words
from lora_tune.config.study import Study
from lora_tune.controller.steering import SETTINGS, course, words
from lora_tune.review.describe import parameters_text
from lora_tune.review.plots import chart
from lora_tune.review.report_page import page_file, template
from lora_tune.review.trial_rows import state_of, value_text
from lora_tune.store.port import Request
from lora_tune.store.records import StudyRecords, TrialState

SET = "set."
"""Begins the names of the fields that hold tuned values."""

EMPTY = "(empty)"
"""Stands for a choice without a character."""

DRIVEN = "A driver is at work: it answers within seconds."
UNDRIVEN = "Nobody drives the sweep now; its next driver does first what is asked here."


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field. range: what it may hold. now: what holds while it is empty. typed: what stands in it.

    choices: for people; of these the field holds the place of one, from 0.
    """

    name: str
    range: str
    now: str = ""
    typed: str = ""
    choices: Sequence[str] = ()

    @property
    def long(self) -> bool:
        """Whether its choices need a line of their own."""
        return max(map(len, self.choices), default=0) > 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What a person has typed so far. clone: the trial that they start from. said: what came of it, wrong or not."""

    clone: int | None = None
    typed: Mapping[str, str] = field(default_factory=dict)
    said: str = ""
    wrong: bool = False


def steer_html(
    study: Study, sweep: StudyRecords, requests: Sequence[Request], now: float, *, token: str, driven: bool, form: Form
) -> str:
    """The page as one HTML document that loads nothing.

    Parameters
    ----------
    study, sweep, requests : Study, Sweep, sequence of Request
        The study as its file says, its records, and what was asked since, oldest first.
    now : float
        Epoch seconds.
    token : str
        What every form sends back; no page elsewhere can know it.
    driven : bool
        A driver is at work.
    form : Form
        What was typed.
    """
    stands = course(study, requests)
    page: str = template("steer.html.j2").render(
        name=study.name,
        condition=DRIVEN if driven else UNDRIVEN,
        said=form.said,
        wrong=form.wrong,
        open=[
            {"number": t.number, "state": state_of(study, sweep, t), "parameters": parameters_text(t)}
            for t in sweep.trials.values()
            if t.state is not TrialState.FINISHED
        ],
        clone="" if form.clone is None else str(form.clone),
        fields=value_fields(study, sweep, form),
        paused=stands.paused,
        budget=budget_fields(stands.study, form),
        asked=[
            (r.who, duration(max(0.0, now - r.asked_at)), words(r), r.answer or "not answered yet")
            for r in reversed(requests)
        ],
        token=token,
        style=page_file("report.css") + page_file("steer.css") + chart.page_style(),
        light=chart.LIGHT,
        dark=chart.DARK,
    )
    return page


def value_fields(study: Study, sweep: StudyRecords, form: Form) -> list[Field]:
    """A field for each tuned name, in the order of the space."""
    start = None if form.clone is None else sweep.trials.get(form.clone)
    fields = []
    for name, distribution in study.search_space.distributions().items():
        choices = [str(choice) or EMPTY for choice in getattr(distribution, "choices", ())]
        fields.append(
            Field(
                name=name,
                range="" if choices else range_words(distribution),
                now=""
                if start is None
                else EMPTY
                if start.tuned.get(name) == ""
                else value_text(start.tuned.get(name)),
                typed=form.typed.get(SET + name, ""),
                choices=choices,
            )
        )
    return fields


def budget_fields(study: Study, form: Form) -> list[Field]:
    """A field for each key of the budget that may change, with its value of now."""
    now = {name: getattr(study.budget, name) for name in SETTINGS}
    return [
        Field(
            name=name,
            range="no limit" if now[name] is None else "",
            now=value_text(now[name]),
            typed=form.typed.get(name, ""),
        )
        for name in SETTINGS
    ]
