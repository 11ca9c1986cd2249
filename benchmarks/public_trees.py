"""Public submission trees of MLPerf Training, used as a user would: ``python -m benchmarks.public_trees FOLDER...``

FOLDER contains checkouts of the public result repositories (``training_results_v4.1``, ...; code and configs suffice).
Each launch folder whose smallest config takes at most four nodes, and with a shipped study for its benchmark and GPU,
is copied to a scratch folder with the files of its container, and tested on the test cluster (real Slurm; root, and the
packages of tests/packages.txt) with a formula in place of the training (:mod:`benchmarks.tree_machine`). The shipped
study is unchanged except for the place, the budget, and the machine's config as its base. Steps: doctor, dry run,
sweep, ``kill -9`` of it after some trials, the same command again, confirm, export, export --check, and the exported
command run by hand with the seed of the trial.

Prints one row per tree: the result of each command, probes that counted, trials lost and jobs submitted twice, whether
the run by hand has the trial's evals (the formula's noise depends on every variable that the folder reads, so another
variable gives another eval), and whether a file of the folder changed. Nothing of the repositories is kept. Variables
and file modes are set as doctor asks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tree_machine import IMAGE, prepare
from lora_tune import Sweep
from lora_tune.base.errors import LoraTuneError
from lora_tune.review.config_check import toml_text
from lora_tune.store.records import StudyRecords, TrialState
from tests.cluster import Cluster, Shape

REPOSITORY = Path(__file__).resolve().parent.parent
SHAPE = re.compile(r"config_(?P<system>.+?)_(?P<nodes>\d+)x(?P<gpus>\d+)x")
MISSING = re.compile(r"needs (\w+), which nothing sets|^([A-Z_]+) is not set$")
MODE = re.compile(r"starts (?:\./)?(\S+), which may not be executed")
SECONDS = 300
"""Timeout of one command."""

STUDIES = {
    ("llama2_70b", r"H100|XD670_\dx|1cc_|AS-(4125|8125)|SYS-821"): "h100",
    ("llama2_70b", "H200|C885A"): "h200",
    ("llama2_70b", "(?<!G)B200|NBRT|TNBR|G893"): "mlperf/b200_lora_fp8",
    ("llama2_70b", "(?<!G)B300|NB3RT"): "mlperf/b300_lora_fp8",
    ("llama2_70b", "MI3[02]"): "mlperf/mi325x_lora_fp8",
    ("llama31_8b", "GB300.*fp4"): "mlperf/gb300_llama31_8b_fp4",
    ("llama31_8b", "(?<!G)B200_1x"): "mlperf/b200_llama31_8b",
    ("llama31_8b", "(?<!G)B300_1x"): "mlperf/b300_llama31_8b",
}
"""Pattern of a benchmark's folder and of a system's name -> shipped study; the last match is used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """One launch folder: its round and submitter, its script, its smallest config, and the shipped study for it."""

    round: str
    submitter: str
    folder: Path
    script: str
    config: Path
    study: str

    @property
    def name(self) -> str:
        parts = self.folder.parts
        return "/".join(parts[parts.index("implementations") + 1 :])

    @property
    def slurm(self) -> bool:
        return self.script.endswith(".sub")

    def study_text(self, laid_out: Path, places: Path, environment: Mapping[str, str], trials: int) -> str:
        """The shipped study with its config as trial 0, for ``trials`` trials."""
        shipped = (REPOSITORY / "studies" / f"{self.study}.toml").read_text(encoding="utf-8")
        shape = SHAPE.match(self.config.name)
        assert shape is not None, "configs without a shape in their name are not walked"
        kind = {"kind": "mlperf" if self.slurm else "mlperf_docker", "implementation": str(laid_out)}
        base = str(self.config.relative_to(self.folder))
        workload = {**tomllib.loads(shipped)["workload"], **kind, "script": self.script, "base": base}
        workload.pop("common", None)  # the base sources what it needs itself
        site = {
            "launcher": "slurm" if self.slurm else "local",
            "system": shape["system"],
            "nodes": int(shape["nodes"]),
            "gpus_per_node": int(shape["gpus"]),
            "container": str(places / "image.sqsh") if self.slurm else "localhost/image:1",
            "data": str(places / "data"),
            "model": str(places / "model"),
            "mpi": "none",
            "stall_minutes": 2,
            "kill_seconds": 5,
        }
        budget = {"trials": trials, "parallel": 4 if int(shape["nodes"]) == 1 else 2, "trial_minutes": 5}
        text = shipped
        for name, table in (("workload", workload), ("site", site), ("budget", budget)):
            stated = toml_text({name: table}).lstrip()
            text = re.sub(rf"(?ms)^\[{name}\]\n.*?(?=^\[|\Z)", lambda _, new=stated: f"{new}\n", text)
        return text + toml_text({"site.environment": environment}).replace('["site.environment"]', "[site.environment]")


def trees(roots: list[Path]) -> Iterator[Tree]:
    """The folders that can be tested, in order."""
    checkouts = {c.resolve() for root in roots for c in (root, *root.glob("*training_results_v*"))}
    for checkout in sorted(c for c in checkouts if "training_results_v" in c.name):
        round_ = checkout.name.rpartition("_")[2]
        for place in sorted(checkout.glob("*/benchmarks/*/implementations")):
            submitter, _, benchmark, *_ = place.relative_to(checkout).parts
            scripts: dict[Path, list[str]] = {}
            for file in [*sorted(place.rglob("run*.sub")), *sorted(place.rglob("run_with_docker.sh"))]:
                scripts.setdefault(file.parent, []).append(file.name)
            for folder, names in sorted(scripts.items()):
                for config, study in _shipped(folder, benchmark):
                    script = "run.sub" if "run.sub" in names else names[0]
                    yield Tree(
                        round=round_, submitter=submitter, folder=folder, script=script, config=config, study=study
                    )


def _shipped(folder: Path, benchmark: str) -> Iterator[tuple[Path, str]]:
    """For each study shipped for one of the folder's machines: the smallest matching config, and the study."""
    smallest: dict[str, tuple[int, str, Path]] = {}
    for file in folder.glob("**/config_*.sh"):
        shape = SHAPE.match(file.name)
        if shape is None or int(shape["nodes"]) > Shape().nodes or int(shape["gpus"]) > Shape().gpus:
            continue
        fits = [
            study for (of, system), study in STUDIES.items()
            if benchmark.startswith(of) and re.search(system, file.name)
        ]  # fmt: skip
        # The folder's machine before NVIDIA's, whose configs most submitters keep too.
        key = (int(shape["nodes"]), "1" if "DGX" in file.name else "0", file)
        if fits and key < smallest.get(fits[-1], (99, "", file)):
            smallest[fits[-1]] = key
    for study, (_, _, file) in sorted(smallest.items()):
        yield file, study


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Environment of one tree's test: its copy, the study, the sweep's folder, and the client's environment."""

    tree: Tree
    place: Path
    scratch: Path
    file: Path
    client: Mapping[str, str]
    cluster: Cluster
    trials: int

    @property
    def options(self) -> tuple[str, ...]:
        return ("--study", str(self.file), "--output", str(self.scratch / "sweep"))

    def command(self, name: str, *words: str, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
        """Run one of the user's commands to its end; exit code 124 after a timeout."""
        argv = [sys.executable, "-m", f"lora_tune.{name}", *self.options, *words]
        environment = {**os.environ, **self.client}
        try:
            return subprocess.run(
                argv, env=environment, capture_output=True, text=True, timeout=seconds, cwd=REPOSITORY
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 124, "", f"not within {seconds:g} s")

    def short(self, text: str) -> str:
        """The end of an output, for one table cell."""
        lines = [line for line in text.replace(str(self.place), "FOLDER").splitlines() if line.strip()]
        return " ".join(" ".join(lines[-2:]).split())[-220:].replace("|", "/")

    def outcome(self, done: subprocess.CompletedProcess[str]) -> str:
        """ "ok", or the end of its output."""
        if "Traceback" in done.stdout + done.stderr:
            return f"TRACEBACK {self.short(done.stderr)}"
        return "ok" if done.returncode == 0 else f"{done.returncode}: {self.short(done.stdout + done.stderr)}"

    def records(self) -> StudyRecords:
        """The records in the sweep's database now."""
        return Sweep(self.file, output=self.scratch / "sweep").records

    def ended(self) -> int:
        """Number of ended trials so far; 0 without a database."""
        with contextlib.suppress(LoraTuneError):  # the database does not exist yet, or is incomplete
            return sum(t.state is TrialState.FINISHED for t in self.records().trials.values())
        return 0


def lay_out(tree: Tree, place: Path) -> Path:
    """Copy the tree, and add the files that the image would contain."""
    copy = Path(shutil.copytree(tree.folder, place, symlinks=True, ignore_dangling_symlinks=True))
    if tree.slurm:
        for name, text in IMAGE.items():
            if not (copy / name).exists():
                (copy / name).write_text(text)
            (copy / name).chmod(0o755)
        if "./bindpcie" in (copy / "run_and_time.sh").read_text(errors="replace"):
            shutil.copy(place.parent / "bin" / "bindpcie", copy)
    return copy


def problems(output: str) -> list[str]:
    """The folder's problems according to doctor, without those of this machine."""
    found = [line.removeprefix("PROBLEM").strip() for line in output.splitlines() if line.startswith("PROBLEM")]
    return [text for text in found if "srun" not in text.split()[:1] and "on PATH" not in text]


def digests(folder: Path) -> dict[Path, str]:
    """Digests of the files of a folder."""
    files = (f for f in folder.rglob("*") if f.is_file() and not f.name.startswith("slurm-"))
    return {f.relative_to(folder): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def _word(tree: Tree) -> str:
    return re.sub(r"\W+", "_", f"{tree.round}_{tree.submitter}_{tree.config.stem.removeprefix('config_')}".lower())[:40]


def prepared(tree: Tree, scratch: Path, cluster: Cluster, jobs: Mapping[str, str], trials: int) -> tuple[Walk, str]:
    """Copy the tree and apply doctor's advice; return the test, and the settings with remaining problems."""
    place, variables = scratch / "tree", dict(jobs)
    for old in (place, scratch / "image", scratch / "sweep", scratch / "by_hand"):
        shutil.rmtree(old, ignore_errors=True)
    copy = lay_out(tree, place)
    file = scratch / f"{_word(tree)}.toml"  # jobs are named after it, and Slurm remembers those of other trees
    walk = Walk(
        tree=tree, place=place, scratch=scratch, cluster=cluster, trials=trials,
        file=file,
        client={**cluster.environment, "PATH": jobs["PATH"]},
    )  # fmt: skip
    file.write_text(tree.study_text(copy, scratch, variables, trials))
    printed = walk.command("doctor").stdout
    found = problems(printed)
    needed = {match[1] or match[2] for text in found if (match := MISSING.search(text))}
    variables |= {name: str(copy) for name in needed}
    modes = {match[1] for text in found if (match := MODE.search(text))}
    for name in modes:
        (copy / name).chmod(0o755)
    if not tree.slurm:
        variables["STANDIN_IMAGE"] = str(shutil.copytree(copy, scratch / "image"))
    file.write_text(tree.study_text(copy, scratch, variables, trials))
    words = [f"needs {name}" for name in sorted(needed)] + [f"{name} needs its x bit" for name in sorted(modes)]
    words += [walk.short(text) for text in found if not (MISSING.search(text) or MODE.search(text))]
    return walk, "; ".join(words) or "ok"


def swept(walk: Walk, kill_after: int) -> str:
    """Run the sweep, kill it with its jobs running after some trials, and run the same command again."""
    argv = [sys.executable, "-m", "lora_tune.sweep", *walk.options, "--quiet"]
    with (walk.scratch / "out.txt").open("w") as out:
        first = subprocess.Popen(
            argv, env={**os.environ, **walk.client}, stdout=out, stderr=out, cwd=REPOSITORY, start_new_session=True
        )
        end = time.monotonic() + SECONDS
        while first.poll() is None and walk.ended() < kill_after and time.monotonic() < end:
            time.sleep(1.5)
        alive = first.poll() is None
        if alive:
            os.kill(first.pid, signal.SIGKILL)
        first.wait()
    if not alive and first.returncode != 0:
        return f"{first.returncode}: {walk.short((walk.scratch / 'out.txt').read_text())}"
    again = walk.command("sweep", "--quiet")
    return ("killed, resumed: " if alive else "not killed: ") + walk.outcome(again)


def counts(walk: Walk) -> list[str]:
    """Trials, counted probes of those begun, and losses or double runs, by the records and by Slurm."""
    records = walk.records()
    trials = [t for t in records.trials.values() if t.replicate_of is None]
    probes = [t for t in trials if t.probe]
    counted = [t for t in probes if (t.metrics.samples_per_second or 0) > 0]
    lost = sum(t.state is not TrialState.FINISHED for t in trials)
    jobs = walk.cluster.run("squeue", "-h", "-a", "-t", "CD", "-o", "%j").split()  # ended by themselves
    twice = sum(n > 1 for name, n in Counter(jobs).items() if name.startswith(walk.file.stem))
    ends = Counter(str(t.verdict) for t in trials)
    switches = {n for t in probes for n in t.tuned if n not in ("LR", "MAX_STEPS", "WARMUP_STEPS", "layout")}
    odd = sorted({walk.short(t.sentence) for t in trials if str(t.verdict) in ("failed", "infeasible")})
    words = ", ".join(f"{n} {verdict}" for verdict, n in sorted(ends.items()))
    return [
        f"{len(trials)}: {words}" + ("".join(f" ({o})" for o in odd[:2])),
        f"{len(counted)} of {len(probes)}, {len(switches)} switches",
        f"{lost} lost, {twice} twice",
    ]


def by_hand(walk: Walk, exported: Mapping[str, object]) -> str:
    """Run the exported config by its printed command with the seed of the trial: are the evals equal?"""
    results, number = walk.scratch / "by_hand", exported["trial"]
    results.mkdir()
    scratch, records = walk.scratch, walk.records()
    data, model = str(scratch / "data"), str(scratch / "model")
    shell = {"CONT": str(scratch / "image.sqsh"), "DATADIR": data, "MODEL": model}
    shell |= {"PREPROC_DATA": data, "LOAD_CHECKPOINTS_PATH": model}  # names in Llama 3.1's trees
    if not isinstance(number, int):
        return "no trial is exported"
    seed = records.trials[number].seed
    environment = {
        **os.environ, **walk.client, **shell, "LOGDIR": str(results), "SBATCH_WAIT": "1", "NEXP": "1",
        "SEED_BASE": str(seed), "SEED": str(seed),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "-c", str(exported["run"])], env=environment, cwd=scratch / "best", capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    logs = [*results.rglob("*.log"), *results.rglob("*.out"), *walk.place.glob("slurm-*.out")]
    text = done.stdout + "\n".join(file.read_text(errors="replace") for file in logs)
    losses = {json.loads(m)["value"] for m in re.findall(r':::MLLOG (\{.*"eval_accuracy".*\})', text)}
    expected = {e.loss for e in records.last_evals(number)}
    if not losses:
        return f"exit {done.returncode}, no eval: {walk.short(done.stdout + done.stderr)}"
    same = len(losses & expected)
    trial = walk.scratch / "sweep" / records.attempts_of(number)[-1].folder / "job.log"
    if not same and _configuration(text) == _configuration(trial.read_text(errors="replace")):
        return "same variables, another seed"  # which the script draws
    return f"{same} evals, all equal" if losses == expected else f"{same} of {len(expected)}, {len(losses)} printed"


def _configuration(log: str) -> set[str]:
    """The formula's variables, as it printed them at its start."""
    return {json.loads(m)["value"] for m in re.findall(r':::MLLOG (\{.*"key": "configuration".*\})', log)}


def walked(walk: Walk, doctor: str, kill_after: int) -> list[str]:
    """The remaining cells of the row."""
    dry = walk.outcome(walk.command("sweep", "--dry-run"))
    before = digests(walk.place)
    sweep = swept(walk, kill_after)
    try:
        trials = counts(walk)
    except LoraTuneError as error:  # the sweep never began
        return [doctor, dry, sweep, walk.short(str(error)), "", "", "", "", "", ""]
    confirm = walk.outcome(walk.command("confirm", "--top", "1", "--seeds", "2", "--quiet"))
    check = walk.outcome(walk.command("export", "--to", str(walk.scratch / "best"), "--check"))
    exported = walk.command("export", "--to", str(walk.scratch / "best"), "--json")
    hand = by_hand(walk, json.loads(exported.stdout)) if exported.returncode == 0 else walk.outcome(exported)
    after = digests(walk.place)
    changed = sorted(str(f) for f, digest in before.items() if after.get(f) != digest)
    return [doctor, dry, sweep, *trials, confirm, check, hand, ", ".join(changed) or "unchanged"]


@contextlib.contextmanager
def mounted_results() -> Iterator[None]:
    """Provide ``/results``, where containers mount LOGDIR and v5.1's run_and_time.sh writes; removed if new."""
    folder = Path("/results")
    there = folder.exists()
    folder.mkdir(exist_ok=True)
    try:
        yield
    finally:
        if not there:
            shutil.rmtree(folder)


HEAD = (
    "tree", "config", "study", "doctor", "dry run", "sweep", "trials", "probes counted", "lost, twice", "confirm",
    "export --check", "by hand", "its files",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="+", help="with the checkouts of the public result repositories")
    parser.add_argument(
        "--only", action="append", help="trees whose round/submitter/folder/config holds this text; several times"
    )
    parser.add_argument("--trials", type=int, default=10, help="of each sweep [10]")
    parser.add_argument("--kill-after", type=int, default=3, help="trials that have ended when the sweep is killed [3]")
    parser.add_argument("--list", action="store_true", help="only name the trees")
    arguments = parser.parse_args()
    found = {f"{tree.round}/{tree.submitter}/{tree.name}/{tree.config.name}": tree for tree in trees(arguments.folder)}
    chosen = {name: t for name, t in found.items() if any(text in name for text in arguments.only or [""])}
    if not chosen:
        raise SystemExit(f"no training_results_v* below {arguments.folder[0]} has such a folder: {sorted(found)}")
    if arguments.list:
        raise SystemExit("\n".join(f"{name}: {tree.study}" for name, tree in chosen.items()))
    print(f"{len(chosen)} trees, {datetime.date.today()}, {os.cpu_count()} cores\n")
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD), flush=True)
    with tempfile.TemporaryDirectory(prefix="trees") as folder:
        scratch = Path(folder)
        jobs = prepare(scratch)
        with mounted_results(), Cluster(scratch / "c") as cluster:
            for tree in chosen.values():
                walk, doctor = prepared(tree, scratch, cluster, jobs, arguments.trials)
                row = walked(walk, doctor, arguments.kill_after)
                head = [f"{tree.round} {tree.submitter} {tree.name}", tree.config.name, tree.study]
                print("| " + " | ".join([*head, *row]) + " |", flush=True)
                cluster.clear()


if __name__ == "__main__":
    main()
