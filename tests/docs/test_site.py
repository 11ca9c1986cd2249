"""The documentation as a site: what its list of pages and its checker of links say. ``make site`` builds it."""

from __future__ import annotations

from pathlib import Path

import yaml

from docs.check_site import broken
from tests.conftest import REPOSITORY


def test_every_page_of_the_list_is_there() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [page for section in site["nav"] for pages in section.values() for page in pages]
    assert [page for page in named if not (REPOSITORY / "docs" / page).is_file()] == []
    assert len(named) == len(set(named))


def test_the_checker_finds_what_leads_nowhere_and_what_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "walk").mkdir()
    (tmp_path / "walk" / "index.html").write_text('<a href="../missing/">x</a><a href="#here">y</a>')
    (tmp_path / "index.html").write_text('<a href="walk/">x</a><img src="https://elsewhere/x.png">')
    assert broken(tmp_path) == ["index.html: loads https://elsewhere/x.png", "walk/index.html: ../missing/"]
