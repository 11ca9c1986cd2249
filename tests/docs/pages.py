"""Parts of the documentation's pages: sections by their headings, code blocks by their languages."""

from __future__ import annotations

import re

from tests.conftest import REPOSITORY

DOCS = REPOSITORY / "docs"


def section(page: str, title: str) -> str:
    """What stands below a heading, up to the next one of its level or above."""
    text = (DOCS / page).read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.M | re.S)
    assert found, f"{page} has no section {title}"
    return found[2]


def block(text: str, language: str) -> str:
    """The only code block of a language."""
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.S)
    return str(found)
