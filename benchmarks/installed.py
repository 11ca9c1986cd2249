"""Fast tests against the installed wheel: ``python -m benchmarks.installed --python python3.13 --dependencies newest``.

Makes a virtual environment of that Python, installs the wheel with the newest or oldest dependencies that
pyproject.toml allows, copies everything except the package to a separate folder, and runs the tests there, so that
imports only find the installed package. The tests are those of ``make test``, and the one that lists private uses of
libraries. torch and the tests that import it are omitted, since only trials need it. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from tests.conftest import REPOSITORY
from tests.package.wheel import build_wheel

TOOLS = ("pytest", "pytest-timeout", "pytest-rerunfailures", "pytest-xdist", "hypothesis", "packaging", "setuptools")
LEFT_OUT = ("torch",)
TRAINING = ("tests/recipes", "tests/recipes_e2e", "tests/launchers/test_packed_sweep.py")
OF_THE_CHECKOUT = ("tests/docs", "tests/package/test_house.py", "tests/workloads/test_recipe.py")
"""Tests that read the package's files in the checkout, and run the documentation's commands."""
OF_TODAY = ("tests/cli/test_mistakes.py::test_the_list_is_long_and_each_answer_is_the_one_that_was_judged",)
"""Tests of messages by click, which older releases word differently."""
OF_TORCH = ("tests/launchers/test_simulated_sweep.py::test_a_sweep_that_goes_on_draws_no_point_again[gp]",)
PRIVATE_USES = "tests/package/test_private_uses.py"
EXTRAS = ("postgres", "metrics")
"""Extras whose libraries fast tests import."""


def requirements(oldest: bool) -> list[str]:
    """The package's requirements in pip's format: as declared, or each at its lower bound."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    further = [text for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    found = [Requirement(text) for text in (*project["dependencies"], *further)]
    needed = [requirement for requirement in found if requirement.name not in LEFT_OUT]
    return [_lowest(requirement) if oldest else str(requirement) for requirement in needed]


def _lowest(requirement: Requirement) -> str:
    (version,) = (bound.version for bound in requirement.specifier if bound.operator == ">=")
    extras = f"[{','.join(requirement.extras)}]" if requirement.extras else ""
    return f"{requirement.name}{extras}=={version}"


def environment(python: str, folder: Path, *, oldest: bool) -> Path:
    """Make a virtual environment with the wheel; return its interpreter."""
    subprocess.run([python, "-m", "venv", folder / "venv"], check=True)
    interpreter = folder / "venv" / "bin" / "python"
    pip = [interpreter, "-m", "pip", "install", "-q"]
    subprocess.run([*pip, *requirements(oldest), *TOOLS], check=True)
    subprocess.run([*pip, "--no-deps", build_wheel(folder / "wheel")], check=True)
    return interpreter


def copy_without_package(folder: Path) -> Path:
    """Copy everything that git tracks, except the package."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not name.startswith("lora_tune/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    return folder


def main() -> int:
    arguments = argparse.ArgumentParser(description="the tests against the installed wheel")
    arguments.add_argument("--python", default=sys.executable, help="the interpreter, e.g. python3.13")
    arguments.add_argument("--dependencies", choices=("newest", "oldest"), default="newest")
    arguments.add_argument("tests", nargs="*", default=["tests"], help="paths of tests, all by default")
    options = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="installed-"))
    interpreter = environment(options.python, folder, oldest=options.dependencies == "oldest")
    place = copy_without_package(folder / "tree")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    where = subprocess.run(
        [interpreter, "-c", "import lora_tune, sys; print(sys.version.split()[0], lora_tune.__file__)"],
        cwd=place, env=clean, capture_output=True, text=True, check=True,
    )  # fmt: skip
    print(f"{datetime.date.today()}, {os.cpu_count()} cores: Python {where.stdout.strip()}, {options.dependencies}")
    subprocess.run([interpreter, "-m", "pip", "freeze"], check=True)
    ignored = [f"--ignore={path}" for path in (*TRAINING, *OF_THE_CHECKOUT)]
    ignored += [f"--deselect={test}" for test in (*OF_TORCH, *(OF_TODAY if options.dependencies == "oldest" else ()))]
    pytest = [interpreter, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider"]
    commands = [[*pytest, "-m", "not long", *ignored, *options.tests], [*pytest, PRIVATE_USES]]
    threads = {**clean, "OMP_NUM_THREADS": "1"}
    return int(any(subprocess.run(command, cwd=place, env=threads).returncode for command in commands))


if __name__ == "__main__":
    sys.exit(main())
