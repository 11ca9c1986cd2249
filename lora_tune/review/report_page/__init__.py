"""The report's page: template, style and script, and the page of a campaign that leads to its sweeps' reports."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.format import visible
from lora_tune.review.plots import svg

if TYPE_CHECKING:
    from jinja2 import Template


def page_file(name: str) -> str:
    """The text of a file of this folder."""
    return resources.files("lora_tune.review.report_page").joinpath(name).read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> Template:
    """The Jinja template ``name`` of this folder; every text that it prints is escaped."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("lora_tune.review", "report_page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    return environment.get_template(name)


def _printable(value: Any) -> Any:
    """What a template prints: texts without control characters, our own markup as it is."""
    return visible(value, keep="\n\t") if type(value) is str else value


def write_page(path: Path, text: str) -> None:
    """Write a page to ``path``, replacing an older one in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def campaign_html(
    name: str, description: str, spent: str, heads: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]
) -> str:
    """A campaign as one HTML document that loads nothing.

    Parameters
    ----------
    name, description, spent : str
        Of the campaign; spent: its node-hours and condition in words.
    heads : sequence of str
        The table's columns.
    rows : sequence of (cells, link)
        A sweep each; link: where its report lies, relative to the page, "" where there is none.
    """
    page: str = template("campaign.html.j2").render(
        name=name, description=description, spent=spent, heads=heads, rows=rows,
        style=page_file("report.css") + svg.page_style(), light=svg.LIGHT, dark=svg.DARK,
    )  # fmt: skip
    return page
