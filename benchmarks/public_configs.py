"""Base and export on every public llama2_70b_lora config: does the export of trial 0 set the same as the config?

``python -m benchmarks.public_configs FOLDER``: FOLDER contains checkouts of MLCommons' result repositories
(``training_results_v4.1`` and so on; only their ``llama2_70b_lora`` implementations are read). Each config that sources
a common file becomes the study's ``workload.base``; the export of trial 0 is sourced in its place, in a copy, and
compared with the sourced config, variable by variable.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import click

from lora_tune.base.errors import LoraTuneError
from lora_tune.config.study import Study
from lora_tune.workloads import load
from lora_tune.workloads.base import Proposal
from lora_tune.workloads.base_config import read_base
from lora_tune.workloads.mlperf import MlperfWorkload
from lora_tune.workloads.script_needs import source_files

SCRIPTS = ("run.sub", "*.sub", "run_with_docker.sh", "run_and_time.sh", "*.sh")
"""Patterns of a tree's launch scripts, most specific first."""

COMMON = re.compile(r"^\s*(?:source|\.)\s.*config\S*common\S*", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one config: "", the first variables that differ, or why it could not be read."""

    config: Path
    problem: str


def public_configs(folder: Path) -> Iterator[Path]:
    """The configs of systems that source a common file, by path; copies in result folders are skipped."""
    for file in sorted(folder.rglob("config_*.sh")):
        parts = file.relative_to(folder).parts
        if "llama2_70b_lora" not in parts or "results" in parts or "common" in file.name:
            continue
        if COMMON.search(file.read_text(encoding="utf-8", errors="replace")):
            yield file


def implementation_of(config: Path, top: Path) -> tuple[Path, str]:
    """The implementation's folder of a config, and its launch script relative to it."""
    for folder in (config.parent, *config.parent.parents):
        for pattern in SCRIPTS[:4]:
            if found := sorted(folder.glob(pattern)):
                return folder, found[0].name
        if folder == top or folder.name == "llama2_70b_lora":
            break
    return config.parent, sorted(config.parent.glob("*.sh"))[0].name


def study_of(folder: Path, script: str, config: str, values: Mapping[str, str]) -> Study:
    """A study whose trial 0 is that config."""
    site = {"launcher": "slurm", "nodes": _count(values, "DGXNNODES", 1), "gpus_per_node": _count(values, "DGXNGPU", 8)}
    workload = {"kind": "mlperf", "implementation": str(folder), "script": script, "base": config}
    space = {"LR": {"type": "float", "low": 1e-4, "high": 1e-3, "log": True}}
    return Study.model_validate(
        {"name": "public", "workload": workload, "site": site, "space": space, "budget": {"trials": 1}}
    )


def _count(values: Mapping[str, str], name: str, default: int) -> int:
    text = values.get(name, "")
    return int(text) if text.isdigit() and int(text) else default


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A temporary copy of a tree, for exports."""
    with tempfile.TemporaryDirectory() as scratch:
        ignored = shutil.ignore_patterns(".git", "results")
        yield Path(shutil.copytree(folder, Path(scratch) / "tree", ignore=ignored, symlinks=True))


def checked(config: Path, folder: Path, script: str, copy: Path) -> Outcome:
    """Export trial 0 of a config of ``folder`` in its copy, and compare."""
    file = str(config.relative_to(folder))
    try:
        base = read_base(copy, file)
        by_hand = base.values
        workload = load(study_of(copy, script, file, by_hand), "public")
        assert isinstance(workload, MlperfWorkload)
        start = workload.start()
        assert start is not None
        proposal = Proposal(number=0, attempt=0, seed=1, parameters=start.parameters)
        export = workload.export(proposal, ("a check",))
        ((name, text),) = export.files.items()
        exported = _values(text, (copy / file).with_name(name))
    except (LoraTuneError, OSError) as error:
        return Outcome(config, " ".join(str(error).replace(str(copy), "TREE").split()))
    again = read_base(copy, file).values  # values that change each second, such as $(date) in a path, do not count
    apart = sorted(
        n
        for n in by_hand.keys() | exported.keys()
        if exported.get(n) not in (by_hand.get(n), again.get(n)) and by_hand.get(n) == again.get(n)
    )
    words = ", ".join(f"{n}: {by_hand.get(n)} -> {exported.get(n)}" for n in apart[:4])
    return Outcome(config, words)


def _values(text: str, file: Path) -> dict[str, str]:
    """The variables that an export sets in its place; the copy is restored afterwards."""
    before = file.read_bytes() if file.exists() else None
    file.write_text(text, encoding="utf-8")
    try:
        return source_files([file]).values
    finally:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--show", is_flag=True, help="print every config, not only those that differ")
def main(folder: Path, show: bool) -> None:
    """Print how many public configs survive as base and export of trial 0, and what differs in the others."""
    counts: dict[str, Counter[str]] = {}
    for (tree, script), configs in groupby(public_configs(folder), lambda config: implementation_of(config, folder)):
        with copied(tree) as copy:
            for config in configs:
                found = checked(config, tree, script, copy)
                where = config.relative_to(folder)
                counts.setdefault(where.parts[0], Counter())["same" if not found.problem else "other"] += 1
                if show or found.problem:
                    click.echo(f"{where}: {found.problem or 'the same'}")
    same, everything = (sum(c[k] for c in counts.values()) for k in ("same", "other"))
    for name, count in sorted(counts.items()):
        click.echo(f"{name}: {count['same']} of {count['same'] + count['other']}")
    click.echo(f"all: {same} of {same + everything}")


if __name__ == "__main__":
    main()
