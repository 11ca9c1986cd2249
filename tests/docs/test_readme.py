"""What the README says of the product is what the product says of itself."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from lora_tune.__main__ import COMMANDS, _module
from lora_tune.base import errors
from lora_tune.config.study import load_study, parse_study
from lora_tune.workloads import load as load_workload
from tests.conftest import REPOSITORY
from tests.docs.study_reference import markdown

README = REPOSITORY / "README.md"
STUDY_FILE = REPOSITORY / "docs" / "study-file.md"


def between(name: str, page: Path = README) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page.read_text(encoding="utf-8"), re.S)
    assert found, name
    return found[1]


def studies() -> str:
    rows = []
    for path in sorted((REPOSITORY / "studies").glob("*.toml")):
        rows.append(f"| `{path.stem}` | {load_study(path).description} |\n")
    return "".join(rows)


def test_the_study_reference_is_generated_from_the_models() -> None:
    assert between("reference", STUDY_FILE).strip() == markdown().strip(), "run: python -m tests.docs.test_readme"


def test_the_keys_of_a_table_within_a_section_stand_below_it() -> None:
    rows = markdown().splitlines()
    at = rows.index("| `prepare` | table |  | what runs once, before the first trial |")
    below = [row for row in rows[at + 1 :] if row.startswith("| `prepare.")]
    assert any(row.startswith("| `prepare.argv` | list of text | needed |") for row in below)
    assert rows[at + 1 : at + 1 + len(below)] == below
    assert "<class" not in markdown()


def test_every_shipped_study_is_listed() -> None:
    assert between("studies") == studies(), "run: python -m tests.docs.test_readme"


def commands() -> list[str]:
    text = README.read_text(encoding="utf-8")
    return sorted(set(re.findall(r"python -m lora_tune\.\w+[^\n#`]*", text)))


@pytest.mark.parametrize("line", commands())
def test_every_command_in_it_exists_with_its_options(line: str) -> None:
    import importlib

    words = shlex.split(line)
    module = words[2].removeprefix("lora_tune.")
    main = importlib.import_module(_module(module)).main
    known = {o for p in main.params for o in p.opts}
    assert {w for w in words[3:] if w.startswith("--")} <= known
    assert module in COMMANDS


def test_the_exit_codes_are_those_of_the_code() -> None:
    text = README.read_text(encoding="utf-8")
    codes = re.search(r"## Exit codes\n\n(.*?)(?:\n\n|\Z)", text, re.S)
    assert codes
    named = {int(n) for n in re.findall(r"(?:^|; |;\n)(\d+) ", codes[1])}
    assert named == {
        getattr(errors, n) for n in dir(errors) if n.startswith("EXIT_")
    }  # fmt: skip


def test_every_image_and_page_it_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (REPOSITORY / target).exists(), target


def test_it_is_short_and_its_own_script_study_loads() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 200
    (study,) = re.findall(r"```toml\n(.*?)```", text, re.S)
    load_workload(parse_study(study, Path("mine.toml")), "mine.toml")


def fill(name: str, text: str, page: Path = README) -> None:
    whole = page.read_text(encoding="utf-8")
    page.write_text(
        re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", lambda m: m[1] + text + m[2], whole, flags=re.S),
        encoding="utf-8",
    )


if __name__ == "__main__":
    fill("reference", "\n" + markdown() + "\n", STUDY_FILE)
    fill("studies", studies())
    print(f"{Path(sys.argv[0]).name}: README.md and docs/study-file.md are up to date")
