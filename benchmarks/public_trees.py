"""Every public llama2_70b_lora folder of MLPerf Training as a user would meet it: doctor, dry run, and a small sweep.

``python -m benchmarks.public_trees FOLDER [--only TEXT]... [--base] [--whole] [--no-sweep]``
takes a folder with checkouts of the
public result repositories (``training_results_v4.1``, ...), finds the implementation folders in them that hold a launch
script, lays each out in a scratch folder with what its container would hold beside it, and runs on each ``doctor``,
``sweep --dry-run``, and a sweep of four trials, with a tiny training behind ``python`` and ``torchrun``: those that use
Slurm on the test cluster (root, and the packages of tests/packages.txt), those with ``run_with_docker.sh`` on this
machine, with a stand-in for ``docker`` that passes on what ``--env`` names and nothing else. With ``--base`` the
folder's smallest config of at most four nodes is trial 0 as it stands, on as many nodes. With ``--whole`` the best
trial is confirmed by two more seeds, exported and checked, and its printed line is run by hand. The table goes to
standard output, one row a folder; nothing of the repositories is kept. Variables and modes are set as doctor says.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tree_machine import IMAGE, prepare
from lora_tune.review.config_check import toml_text
from tests.cluster import Cluster, Shape

REPOSITORY = Path(__file__).resolve().parent.parent
ROUNDS = ("v4.1", "v5.0", "v5.1")
SHAPE = re.compile(r"config_(?P<system>.+?)_(?P<nodes>\d+)x(?P<gpus>\d+)x")
MISSING = re.compile(r"needs (\w+), which nothing sets")
MODE = re.compile(r"starts (?:\./)?(\S+), which may not be executed")
SECONDS = 240
"""For one sweep of four trials."""

SPACE = """
[space]
LR = { type = "float", low = 3e-4, high = 6e-4, log = true }
"""
LAYOUT = """MAX_STEPS = 800
layout = { type = "layout", tp = [1, 2, 4], cp = [1, 2], gbs = [8] }
"""
BUDGET = """
[objective]
target = 0.925
[search]
seed = 1
[pruning]
cap = false
[budget]
trials = 4
parallel = 4
trial_minutes = 5
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One implementation folder: whose, of which round, and what a study of it says."""

    round: str
    submitter: str
    folder: Path
    script: str
    config: Path | None
    begins_with_config: bool

    @property
    def name(self) -> str:
        parts = self.folder.parts
        return "/".join(parts[parts.index("implementations") + 1 :])

    @property
    def slurm(self) -> bool:
        return self.script.endswith(".sub")

    @property
    def shape(self) -> tuple[str, int, int]:
        """System, nodes and GPUs of a node, as the smallest config is named."""
        found = SHAPE.match(self.config.name) if self.config else None
        return (found["system"], int(found["nodes"]), int(found["gpus"])) if found else ("SYSTEM", 1, 8)

    def study(self, laid_out: Path, places: Path, environment: dict[str, str]) -> str:
        """A study of it: on its own config where it begins with that, else on one node of the same GPUs."""
        system, nodes, gpus = self.shape
        workload = {"kind": "mlperf" if self.slurm else "mlperf_docker", "implementation": str(laid_out)}
        workload["script"] = self.script
        based = self.config is not None and nodes <= Shape().nodes and (self.begins_with_config or not self.slurm)
        if self.config is not None and based:
            workload["base"] = str(self.config.relative_to(self.folder))
        site = {
            "launcher": "slurm" if self.slurm else "local",
            "system": system,
            "nodes": nodes if based else 1,
            "gpus_per_node": gpus,
            "container": str(places / "image.sqsh") if self.slurm else "localhost/image:1",
            "data": str(places / "data"),
            "model": str(places / "model"),
            "mpi": "none",
            "stall_minutes": 2,
            "kill_seconds": 5,
        }
        head = toml_text({"workload": workload, "site": site}) + "\n" + toml_text({"site.environment": environment})
        return head.replace('["site.environment"]', "[site.environment]") + SPACE + ("" if based else LAYOUT) + BUDGET


def trees(root: Path, *, base: bool) -> Iterator[Tree]:
    """The folders with a launch script, in order; a folder that Slurm can start counts as such."""
    for checkout in sorted(root.glob("*training_results_v*")):
        round_ = next((r for r in ROUNDS if r in checkout.name), None)
        for place in sorted(checkout.glob("*/bench*/llama2_70b*/implementations")) if round_ else ():
            scripts: dict[Path, list[str]] = {}
            for file in [*sorted(place.rglob("run*.sub")), *sorted(place.rglob("run_with_docker.sh"))]:
                scripts.setdefault(file.parent, []).append(file.name)
            for folder, names in sorted(scripts.items()):
                script = "run.sub" if "run.sub" in names else names[0]
                submitter = place.relative_to(checkout).parts[0]
                yield Tree(
                    round=str(round_),
                    submitter=submitter,
                    folder=folder,
                    script=script,
                    config=_smallest(folder),
                    begins_with_config=base,
                )


def _smallest(folder: Path) -> Path | None:
    """The config of the fewest nodes."""
    found = [(int(m["nodes"]), f) for f in folder.glob("**/config_*.sh") if (m := SHAPE.match(f.name))]
    return min(found)[1] if found else None


def lay_out(tree: Tree, place: Path) -> Path:
    """A copy of the tree, and beside its files those that the image would hold."""
    copy = Path(shutil.copytree(tree.folder, place, symlinks=True, ignore_dangling_symlinks=True))
    if tree.slurm:
        for name, text in IMAGE.items():
            if not (copy / name).exists():
                (copy / name).write_text(text)
            (copy / name).chmod(0o755)
        if "./bindpcie" in (copy / "run_and_time.sh").read_text(errors="replace"):
            shutil.copy(place.parent / "bin" / "bindpcie", copy)
    return copy


def command(words: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    """One of the commands that users type, to its end; exit code 124 where it takes too long."""
    argv = [sys.executable, "-m", *words]
    try:
        return subprocess.run(
            argv, env={**os.environ, **environment}, capture_output=True, text=True, timeout=seconds, cwd=REPOSITORY
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 124, "", f"not within {seconds:g} s")


def problems(output: str) -> list[str]:
    """What doctor calls a problem of the folder; the machine's own are not the tree's."""
    found = [line.removeprefix("PROBLEM").strip() for line in output.splitlines() if line.startswith("PROBLEM")]
    return [text for text in found if "srun" not in text.split()[:1] and "on PATH" not in text]


def judge(tree: Tree, scratch: Path, cluster: Cluster | None, jobs: dict[str, str], *, whole: bool) -> list[str]:
    """The row of one tree; whole: with what becomes of its best trial."""
    place = scratch / "tree"
    for old in (place, scratch / "image", scratch / "sweep"):
        shutil.rmtree(old, ignore_errors=True)
    copy, file, given = lay_out(tree, place), scratch / "tree.toml", dict(jobs)
    client = {**(cluster.environment if cluster else {}), "PATH": jobs["PATH"]}
    options = ["--study", str(file), "--output", str(scratch / "sweep")]
    file.write_text(tree.study(copy, scratch, given))
    told = command(["lora_tune.doctor", *options], client, 120)
    found = problems(told.stdout)
    needed = {match[1] for text in found if (match := MISSING.search(text))}
    given |= {name: str(copy) for name in needed}  # as doctor says
    modes = {match[1] for text in found if (match := MODE.search(text))}
    for name in modes:
        (copy / name).chmod(0o755)
    if not tree.slurm:
        given["STANDIN_IMAGE"] = str(shutil.copytree(copy, scratch / "image"))
    file.write_text(tree.study(copy, scratch, given))
    dry = command(["lora_tune.sweep", *options, "--dry-run"], client, 120)
    others = [text for text in found if not (MISSING.search(text) or MODE.search(text))]
    words = [f"needs {name}" for name in sorted(needed)] + [f"{name} needs its x bit" for name in sorted(modes)]
    words += [_short(text, place) for text in others]
    elsewhere = "container" if "training code is not in this folder" in told.stdout else "folder"
    crashed = "Traceback" in told.stdout + told.stderr + dry.stdout + dry.stderr
    swept = "not asked" if cluster is None else "no: see doctor" if others else ""
    if not swept:
        swept = sweep(options, client)
        if whole and " reached" in swept:
            swept = f"{swept}; {hand_over(options, client, scratch)}"
    return [
        tree.round, tree.submitter, tree.name, tree.script, elsewhere, "; ".join(words) or "ok",
        "TRACEBACK" if crashed else "ok" if dry.returncode == 0 else _short(dry.stderr, place), swept,
    ]  # fmt: skip


def sweep(options: list[str], client: dict[str, str]) -> str:
    """What became of four trials."""
    begun = time.monotonic()
    done = command(["lora_tune.sweep", *options, "--quiet"], client, SECONDS)
    counts = re.search(r"all 4 trials are proposed: (.*)", done.stdout + done.stderr)
    words = counts[1] if counts else _short((done.stderr or done.stdout).strip().splitlines()[-1:] or "nothing said")
    return f"{words}, {time.monotonic() - begun:.0f} s"


def hand_over(options: list[str], client: dict[str, str], scratch: Path) -> str:
    """What became of the best trial: confirmed by two more seeds, exported, checked, and run by the printed line."""
    raced = command(["lora_tune.confirm", *options, "--top", "1", "--seeds", "2", "--quiet"], client, SECONDS)
    exported = command(["lora_tune.export", *options, "--to", str(scratch / "best"), "--check"], client, 120)
    words = [
        f"{name} {'ok' if done.returncode == 0 else 'fails: ' + _short(done.stdout + done.stderr, scratch / 'tree')}"
        for name, done in (("confirm", raced), ("export --check", exported))
    ]
    line = next((text for text in exported.stdout.splitlines() if " && " in text), "")
    return "; ".join([*words, by_hand(line.removeprefix("run it: "), client, scratch)])


def by_hand(line: str, client: dict[str, str], scratch: Path) -> str:
    """What became of the exported config, run by the printed line as its user runs it."""
    results = scratch / "by_hand"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    shell = {"CONT": str(scratch / "image.sqsh"), "DATADIR": str(scratch / "data"), "MODEL": str(scratch / "model")}
    environment = {**os.environ, **client, **shell, "LOGDIR": str(results), "SBATCH_WAIT": "1", "NEXP": "1"}
    done = subprocess.run(
        ["bash", "-c", line], env=environment, cwd=scratch / "best", capture_output=True, text=True, timeout=SECONDS
    )
    logs = [*scratch.glob("tree/slurm-*.out"), *results.rglob("*.log"), *results.rglob("*.out")]
    texts = [done.stdout, *(file.read_text(errors="replace") for file in logs)]
    reached = any('"status": "success"' in text for text in texts)
    told = "reached the target" if reached else f"exit {done.returncode}: {_short(done.stderr, scratch / 'tree')}"
    return f"by hand: {told}"


def _short(text: str | list[str], place: Path | None = None) -> str:
    whole = text if isinstance(text, str) else " ".join(text)
    return " ".join(whole.replace(str(place), "FOLDER").split())[:140].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the checkouts of the public result repositories")
    parser.add_argument(
        "--only", action="append", help="trees whose round/submitter/folder holds this text; may be given several times"
    )
    parser.add_argument("--base", action="store_true", help="trial 0 is the folder's smallest config as it stands")
    parser.add_argument("--whole", action="store_true", help="confirm and export the best trial, and run it by hand")
    parser.add_argument("--no-sweep", action="store_true")
    arguments = parser.parse_args()
    found = [
        tree
        for tree in trees(arguments.folder, base=arguments.base)
        if any(text in f"{tree.round}/{tree.submitter}/{tree.name}" for text in arguments.only or [""])
    ]
    if not found:
        raise SystemExit(f"{arguments.folder}: no training_results_v* with llama2_70b_lora implementations below it")
    head = ["round", "submitter", "folder", "script", "training code in", "doctor", "dry run", "four trials"]
    print(f"{len(found)} folders, {datetime.date.today()}, {os.cpu_count()} cores\n")
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    with tempfile.TemporaryDirectory(prefix="trees") as folder:
        scratch = Path(folder)
        jobs = prepare(scratch)
        cluster = None if arguments.no_sweep else Cluster(scratch / "c")
        if cluster is not None:
            cluster.start()
        try:
            for tree in found:
                row = judge(tree, scratch, cluster, jobs, whole=arguments.whole)
                print("| " + " | ".join(row) + " |", flush=True)
                if cluster is not None:
                    cluster.clear()
        finally:
            if cluster is not None:
                cluster.stop()


if __name__ == "__main__":
    main()
