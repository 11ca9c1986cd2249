"""``lora-tune package``: make a submission package of confirmed runs and run MLPerf's checkers on it."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import click

from lora_tune.base.errors import EXIT_INPUT, InputError
from lora_tune.base.paths import display_path
from lora_tune.cli import confirm, export
from lora_tune.cli.options import Review, command_line, load_review, typed
from lora_tune.mlperf.log_check import parse
from lora_tune.mlperf.package import (
    check_description,
    counted,
    described_by_logs,
    described_by_machine,
    folder_of,
    remedy,
    template,
    tree,
)
from lora_tune.mlperf.submission import Submission, chance, read_submission, result_files, sentences
from lora_tune.workloads import load as load_workload

CHECKERS = ("package_checker", "repo_checker")
"""Programs of mlperf_logging that must accept a package, unmodified."""
WRITTEN_BY_CHECKERS = "scaling.json"
"""File that ``package_checker`` writes beside the results."""
CHECKER_SECONDS = 600
SKIPPED = {".git", ".venv", "__pycache__", "sweeps"}
"""Folders of an implementation that are not packaged."""


@dataclass(frozen=True, slots=True)
class Source:
    """Result folder, code, configs and ruleset to package."""

    results: Path
    code: Path
    configs: tuple[Path, ...]
    ruleset: str | None


def run(
    results: Path | None, study_name: str | None, storage: str | None, output: Path | None, system_file: Path,
    code: Path | None, configs: tuple[Path, ...], license_file: Path | None, borrow: tuple[Path, ...], dry_run: bool,
    out: Path, ruleset: str | None, json_: bool,
) -> None:  # fmt: skip
    """Run ``package``; options: cli/commands.py."""
    if (results is None) == (study_name is None):
        raise InputError("give the folder of results, or --study NAME to run what its sweep recommends")
    if results is not None:
        if code is None:
            raise InputError("--code is missing: name the folder of the implementation that was run")
        source = Source(results, code, configs, ruleset)
    else:
        review = load_review(str(study_name), output, storage)
        if not dry_run:
            _described(system_file)  # checked before any run
            _run_recommended(review, storage, code, configs, verbose=not json_)
        source = _of_sweep(load_review(str(study_name), output, storage), code, configs, ruleset)
    submission = read_submission(source.results, source.ruleset)
    if dry_run:
        others = [read_submission(folder, submission.ruleset) for folder in borrow]
        lines = chance(submission, _nodes(system_file), others)
        click.echo(json.dumps({"chance": lines}) if json_ else "\n".join(lines))
        return
    _package(source, submission, system_file, license_file, out, json_=json_)


def _run_recommended(
    review: Review, storage: str | None, code: Path | None, configs: Sequence[Path], *, verbose: bool
) -> None:
    """Make the recommended configuration's missing runs; exits if they are not completed."""
    words = [*typed("system_file", "license_file", "out", "ruleset"), *(["--code", str(code)] if code else [])]
    words += [word for config in configs for word in ("--config", str(config))]
    if ended := confirm.confirm_recommended(
        review, storage, command_line("package", review.study.name, *words), verbose=verbose
    ):
        sys.exit(ended)


def _of_sweep(review: Review, code: Path | None, configs: Sequence[Path], ruleset: str | None) -> Source:
    """The recommended configuration's confirmed runs. Exports its config only once, so that packages stay identical."""
    study, workload = review.study, export.as_measured(load_workload(review.study, review.file), review.sweep)
    trial, recommended = export.chosen(study, review.sweep, None)
    results = review.paths.confirm(trial.number)
    if code is None:
        code = workload.scripts_folder()
        if code is None:
            raise InputError(f"{study.name}: its study names no folder of the code; --code FOLDER does")
    exported = results / "config"
    if not exported.exists() and results.is_dir():
        with tempfile.TemporaryDirectory(prefix=".config-", dir=results) as scratch:
            export.export_trial(study, trial, workload, Path(scratch) / "config", recommended)
            shutil.move(Path(scratch) / "config", exported)
    copies = sorted(path for path in exported.glob("config_*") if path.suffix not in (".json", ".toml"))
    benchmark = study.benchmark
    ruleset = ruleset or (study.ruleset(benchmark.name) if benchmark else study.objective.ruleset)
    return Source(results, code, (*copies, *configs), ruleset)


def _package(
    source: Source, submission: Submission, system_file: Path, license_file: Path | None, out: Path, *, json_: bool
) -> None:
    """Write the package and run the checkers on it."""
    results, code, configs = source.results, source.code, source.configs
    if submission.benchmark is None or submission.runs is None:
        raise InputError(f"{results}: the logs name no one benchmark of MLPerf; a package holds one")
    announced = _announced(results, submission.ruleset)
    description = _described(system_file, announced)
    files = result_files(results)
    chosen, beyond = counted([file.name for file in files], submission.runs, str(results))
    contents = tree(
        str(description["submitter"]), system_file.stem, submission.benchmark,
        description=description,
        results=[_log(file) for file in files[: len(chosen)]],
        implementation=code.resolve().name,
        code={**_licensed(_code(code), license_file), **{config.name: config.read_bytes() for config in configs},
              "REPRODUCE.md": _reproduce(submission, configs).encode()},
    )  # fmt: skip
    _write(out, {str(path): data for path, data in contents.items()})
    if beyond:
        what = f"a submission of {submission.benchmark} has {submission.runs} runs"
        click.echo(f"left out {', '.join(beyond)}: {what}", err=json_)
    _judge(
        out / folder_of(str(description["submitter"])), submission.ruleset, results=out,
        benchmark=submission.benchmark, json_=json_,
    )  # fmt: skip


def _described(system_file: Path, announced: Mapping[str, object] | None = None) -> dict[str, object]:
    """The system description, checked against what the logs announce; a template is written if it is missing.

    Raises InputError if it is incomplete.
    """
    if not system_file.exists():
        _begin_description(system_file, announced or {})
    description = _read_description(system_file)
    check_description(description, announced or {}, str(system_file))
    return description


def _nodes(system_file: Path) -> int:
    """Nodes of a run by the system description; 1 if it does not exist or does not say."""
    if not system_file.exists():
        return 1
    stated = str(_read_description(system_file).get("number_of_nodes", "")).strip()
    return int(stated) if stated.isdigit() and int(stated) > 0 else 1


LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING")


def _licensed(code: Mapping[str, bytes], license_file: Path | None) -> dict[str, bytes]:
    """The code with its license; warns if there is none, because MLPerf publishes the code."""
    if license_file is not None:
        return {**code, "LICENSE": license_file.read_bytes()}
    if not any(name in code for name in LICENSES):
        click.echo("no license in the code's folder: MLPerf publishes the code; --license FILE adds one", err=True)
    return dict(code)


def _log(file: Path) -> bytes:
    """A log's bytes, decompressed."""
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == ".gz" else data


def _announced(results: Path, ruleset: str) -> dict[str, object]:
    """Submission facts on which all logs agree. Raises InputError if submitter or division differ.

    A public package (v4.0) has logs of two platforms; its description decides.
    """
    keys = ("submission_org", "submission_division", "submission_status", "submission_platform")
    by_key: dict[str, set[str]] = {key: set() for key in keys}
    for file in result_files(results):
        log = parse(_log(file).decode("utf-8", "replace").splitlines(), ruleset)
        for key in keys:
            by_key[key] |= {str(line.value["value"]) for line in log.lines if line.key == key}
    for key, values in by_key.items():
        if len(values) > 1 and key in ("submission_org", "submission_division"):
            raise InputError(f"{results}: the logs say {key} {' and '.join(sorted(values))}; a package has one")
    return {key: values.pop() for key, values in by_key.items() if len(values) == 1}


def _begin_description(file: Path, announced: Mapping[str, object]) -> None:
    """Write a system description template; always raises InputError, because the submitter must complete it."""
    known = {**described_by_machine(_machine()), **described_by_logs(announced)}
    file.write_text(json.dumps(template(known), indent=2) + "\n", encoding="utf-8")
    raise InputError(
        f"{file}: was missing, and is begun with what the logs and this machine say; correct it where the runs were on "
        "another machine (srun on one of its nodes begins it there), fill in the rest, and run this again"
    )


def _machine() -> dict[str, str]:
    """Texts about this machine, by the names of ``described_by_machine``."""
    files = {"cpuinfo": "/proc/cpuinfo", "meminfo": "/proc/meminfo", "os-release": "/etc/os-release"}
    texts = {"uname": f"{platform.system()} {platform.release()}"}
    for name, path in files.items():
        with contextlib.suppress(OSError):
            texts[name] = Path(path).read_text(encoding="utf-8", errors="replace")
    with contextlib.suppress(OSError):
        texts["infiniband"] = " ".join(sorted(device.name for device in Path("/sys/class/infiniband").iterdir()))
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        texts["gpus"] = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    return texts


def _read_description(file: Path) -> dict[str, object]:
    try:
        by_key = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: is no system description: {error}; remove it, and it is begun anew") from error
    if not isinstance(by_key, dict):
        raise InputError(f"{file}: holds no JSON object; remove it, and it is begun anew")
    return by_key


def _code(folder: Path) -> dict[str, bytes]:
    """All files of the implementation by relative path; links to files are followed."""
    files = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(place) / name
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def _reproduce(submission: Submission, configs: Sequence[Path]) -> str:
    """The instructions to reproduce the runs."""
    lines = [f"# {submission.benchmark}: how to reproduce these runs", ""]
    lines += [f"1. `source {config.name}`" for config in configs]
    lines.append(
        f"{len(configs) + 1}. Start the implementation as its own README says, once a run, each with its own seed."
    )
    return "\n".join(lines) + "\n"


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    """Write all files atomically: a killed run leaves nothing at ``out``.

    Raises InputError if ``out`` has different content.
    """
    if out.exists():
        there = _code(out) if out.is_dir() else {}
        there = {name: data for name, data in there.items() if PurePosixPath(name).name != WRITTEN_BY_CHECKERS}
        if there == files:
            return  # written by an earlier run, perhaps killed before its checks
        other = min(name for name in {*there, *files} if there.get(name) != files.get(name))
        raise InputError(f"{out}: exists, and {other} is another there; name another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        for name, data in files.items():
            path = Path(scratch) / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        shutil.move(Path(scratch) / "tree", out)


def _judge(package: Path, ruleset: str, *, results: Path, benchmark: str, json_: bool) -> None:
    """Print the checkers' findings and our scores; exits with 2 if a checker refuses."""
    findings = {checker: _findings(checker, package, ruleset) for checker in CHECKERS}
    refused = [name for name, lines in findings.items() if lines is None or any(f.startswith("ERROR") for f in lines)]
    folders = sorted((package / "results").glob(f"*/{benchmark}"))
    scores = [sentence for folder in folders for sentence in sentences(read_submission(folder, ruleset))]
    if json_:
        checkers = {
            name: {"accepts": name not in refused, "findings": [{"what": f, "do": remedy(f)} for f in lines or ()]}
            for name, lines in findings.items()
        }
        click.echo(json.dumps({"package": str(results), "checkers": checkers, "scores": scores}))
    else:
        for checker, lines in findings.items():
            click.echo(f"{checker:16} {'accepts it' if checker not in refused else 'REFUSES it'}")
            for finding in lines or ():
                click.echo(f"  {finding}\n    -> {remedy(finding)}")
        for sentence in scores:
            click.echo(f"score            {sentence}")
        click.echo(f"package          {display_path(results)}")
    if refused:
        sys.exit(EXIT_INPUT)


def _findings(checker: str, package: Path, ruleset: str) -> list[str] | None:
    """Distinct errors and warnings of one checker; None if it crashed or timed out, which is printed."""
    with tempfile.TemporaryDirectory(prefix="lora-tune-package-") as scratch:
        log = Path(scratch) / "checker.log"
        program = [sys.executable, "-m", f"mlperf_logging.{checker}"]
        command = [*program, str(package.resolve()), "training", ruleset, "--log_output", str(log)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=CHECKER_SECONDS, cwd=scratch)
        except subprocess.TimeoutExpired:
            click.echo(
                f"{checker}: did not end within {CHECKER_SECONDS} s; run it by hand: {shlex.join(program)}", err=True
            )
            return None
        text = "\n".join((done.stdout, done.stderr, log.read_text(encoding="utf-8") if log.exists() else ""))
    lines = [line.strip() for line in text.splitlines()]
    if done.returncode != 0:
        click.echo(f"{checker}: ended with {done.returncode}: {lines[-1] if lines else ''}", err=True)
        return None
    return list(dict.fromkeys(line for line in lines if line.startswith(("ERROR", "WARNING"))))
