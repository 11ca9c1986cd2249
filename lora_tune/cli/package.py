"""``lora-tune package``: from confirmed runs to a submission package that MLPerf's own checkers accept."""

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
from pathlib import Path

import click

from lora_tune.base.errors import EXIT_INPUT, InputError
from lora_tune.base.paths import display_path
from lora_tune.mlperf.log_check import parse
from lora_tune.mlperf.package import (
    check_description,
    counted,
    described_by_logs,
    described_by_machine,
    folder_of,
    template,
    tree,
)
from lora_tune.mlperf.submission import Submission, chance, read_submission, result_files, sentences

CHECKERS = ("package_checker", "repo_checker")
"""Programs of mlperf_logging that must accept a package, as they ship."""
CHECKER_SECONDS = 600
SKIPPED = {".git", ".venv", "__pycache__", "sweeps"}
"""Folders of an implementation that are no part of what was run."""


def run(
    results: Path, system_file: Path, code: Path, configs: tuple[Path, ...], license_file: Path | None,
    borrow: tuple[Path, ...], dry_run: bool, out: Path, ruleset: str | None,
) -> None:  # fmt: skip
    """What ``package`` does; see cli/commands.py for its options."""
    submission = read_submission(results, ruleset)
    if submission.benchmark is None or submission.runs is None:
        raise InputError(f"{results}: the logs name no one benchmark of MLPerf; a package holds one")
    if dry_run:
        others = [read_submission(folder, submission.ruleset) for folder in borrow]
        for sentence in chance(submission, _nodes(system_file), others):
            click.echo(sentence)
        return
    announced = _announced(results, submission.ruleset)
    if not system_file.exists():
        _begin_description(system_file, announced)
    description = _read_description(system_file)
    check_description(description, announced, str(system_file))
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
        click.echo(f"left out {', '.join(beyond)}: a submission of {submission.benchmark} has {submission.runs} runs")
    _judge(
        out / folder_of(str(description["submitter"])), submission.ruleset, results=out, benchmark=submission.benchmark
    )


def _nodes(system_file: Path) -> int:
    """Of a run, as the system description states them; 1 where there is none yet."""
    if not system_file.exists():
        return 1
    stated = str(_read_description(system_file).get("number_of_nodes", "")).strip()
    return int(stated) if stated.isdigit() and int(stated) > 0 else 1


LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING")


def _licensed(code: Mapping[str, bytes], license_file: Path | None) -> dict[str, bytes]:
    """The code with its license; where there is none, that is said: MLPerf publishes what it is given."""
    if license_file is not None:
        return {**code, "LICENSE": license_file.read_bytes()}
    if not any(name in code for name in LICENSES):
        click.echo("no license in the code's folder: MLPerf publishes the code; --license FILE adds one", err=True)
    return dict(code)


def _log(file: Path) -> bytes:
    """A log's bytes; of a gzipped one those that were packed."""
    data = file.read_bytes()
    return gzip.decompress(data) if file.suffix == ".gz" else data


def _announced(results: Path, ruleset: str) -> dict[str, object]:
    """What the logs say of the submission, where they agree. Raises InputError where submitter or division differ.

    A public package (v4.0) has logs of two platforms: its description alone says which it is.
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
    """Write a system description to be filled in, and say so: nobody but the submitter knows the rest."""
    known = {**described_by_machine(_machine()), **described_by_logs(announced)}
    file.write_text(json.dumps(template(known), indent=2) + "\n", encoding="utf-8")
    raise InputError(
        f"{file}: was missing, and is begun with what the logs and this machine say; correct it where the runs were on "
        "another machine (srun on one of its nodes begins it there), fill in the rest, and run this again"
    )


def _machine() -> dict[str, str]:
    """What this machine says of itself, by name: as of ``described_by_machine``."""
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
    """Every file of the implementation by relative path; links to files as what they name."""
    files = {}
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED)
        for name in sorted(names):
            path = Path(place) / name
            if path.is_file():
                files[path.relative_to(folder).as_posix()] = path.read_bytes()
    return files


def _reproduce(submission: Submission, configs: Sequence[Path]) -> str:
    """How the runs are made again, for the implementation's folder."""
    lines = [f"# {submission.benchmark}: how to reproduce these runs", ""]
    lines += [f"1. `source {config.name}`" for config in configs]
    lines.append(
        f"{len(configs) + 1}. Start the implementation as its own README says, once a run, each with its own seed."
    )
    return "\n".join(lines) + "\n"


def _write(out: Path, files: Mapping[str, bytes]) -> None:
    """All files at once: what is killed half way leaves nothing at ``out``, and is run again.

    Raises InputError where something else is at ``out``.
    """
    if out.exists():
        if out.is_dir() and _code(out) == files:
            return  # written by one that was killed before the checkers had looked at it
        raise InputError(f"{out}: exists, and holds something else; name another --out, or remove it")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
        for name, data in files.items():
            path = Path(scratch) / "tree" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        shutil.move(Path(scratch) / "tree", out)


def _judge(package: Path, ruleset: str, *, results: Path, benchmark: str) -> None:
    """Print what MLPerf's checkers and our reading of its rules say; exit with 2 where a checker refuses."""
    refused = []
    for checker in CHECKERS:
        findings = _findings(checker, package, ruleset)
        refused += [checker] if findings is None or any(f.startswith("ERROR") for f in findings) else []
        click.echo(f"{checker:16} {'accepts it' if checker not in refused else 'REFUSES it'}")
        for finding in findings or ():
            click.echo(f"  {finding}")
    for folder in sorted((package / "results").glob(f"*/{benchmark}")):
        for sentence in sentences(read_submission(folder, ruleset)):
            click.echo(f"score            {sentence}")
    click.echo(f"package          {display_path(results)}")
    if refused:
        sys.exit(EXIT_INPUT)


def _findings(checker: str, package: Path, ruleset: str) -> list[str] | None:
    """The errors and warnings of one checker, each once; None, and its last words printed, where it broke off."""
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
