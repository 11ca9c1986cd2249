"""The report's page: template, style and script."""

from __future__ import annotations

import functools
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.base.text import visible

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
