"""The documentation as a site: what its list of pages and its checker of links say. ``make site`` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from docs.check_site import broken
from tests.conftest import REPOSITORY


def test_every_page_of_the_list_is_there() -> None:
    site = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    named = [page for section in site["nav"] for pages in section.values() for page in pages]
    assert [page for page in named if not (REPOSITORY / "docs" / page).is_file()] == []
    assert len(named) == len(set(named))


@pytest.mark.long
def test_the_site_builds_without_a_warning_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    command = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path / "site"))
    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert built.returncode == 0, built.stderr
    assert broken(tmp_path / "site") == []
    assert (tmp_path / "site" / "search" / "search_index.json").is_file()


def test_the_checker_finds_what_leads_nowhere_and_what_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "walk").mkdir()
    (tmp_path / "walk" / "index.html").write_text('<a href="../missing/">x</a><a href="#here">y</a>')
    (tmp_path / "index.html").write_text('<a href="walk/">x</a><img src="https://elsewhere/x.png">')
    assert broken(tmp_path) == ["index.html: loads https://elsewhere/x.png", "walk/index.html: ../missing/"]
