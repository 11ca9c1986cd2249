"""``python -m lora_tune.logs --study NAME FILE``: show what a study's log reader extracts from each line of a log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from lora_tune.base.errors import EXIT_NOTHING_REACHED
from lora_tune.base.text import counted, visible
from lora_tune.config.study import Study, find_study, load_study
from lora_tune.logs.lines import TELL_APART, Unmatched, cut
from lora_tune.logs.log_files import log_files
from lora_tune.logs.run import LogReader, RunLog
from lora_tune.workloads import load as load_workload
from lora_tune.workloads.base import Workload

SHOWN = 40
"""Maximum lines printed per log; all are counted."""


BLOCK = 200
"""Lines that are checked together first."""


@dataclass(frozen=True, slots=True)
class ReadLine:
    """One line of a log and the facts extracted from it."""

    number: int
    text: str
    facts: tuple[str, ...]


def run(study_name: str, every: bool, json_: bool, logs: tuple[Path, ...]) -> None:
    """Run ``logs``; options: cli/commands.py."""
    file = find_study(study_name)
    study = load_study(file)
    workload = load_workload(study, file)
    if not (print_objects if json_ else check_logs)(study, workload, logs, every=every):
        raise SystemExit(EXIT_NOTHING_REACHED)


def check_logs(study: Study, workload: Workload, logs: Sequence[Path], *, every: bool = False) -> int:
    """Print what the reader extracts; returns the number of evals. Raises InputError if there is no file."""
    evals = 0
    for log in log_files(logs):
        evals += show(log.name, read_lines(workload.reader, log.pieces(), study.counted), every=every)
        if log.problem:
            click.echo(log.problem, err=True)
    return evals


def print_objects(study: Study, workload: Workload, logs: Sequence[Path], *, every: bool = False) -> int:
    """check_logs(), as one JSON object per log. every: include lines without facts."""
    evals = 0
    for log in log_files(logs):
        lines = list(read_lines(workload.reader, log.pieces(), study.counted))
        found = sum(fact.startswith("eval:") for line in lines for fact in line.facts)
        read = [
            {"line": line.number, "text": visible(line.text), "facts": line.facts}
            for line in lines
            if line.facts or every
        ]
        problem = log.problem or None
        click.echo(json.dumps({"log": log.name, "lines": len(lines), "evals": found, "read": read, "problem": problem}))
        evals += found
    return evals


def read_lines(
    make_reader: Callable[[], LogReader], pieces: Iterable[bytes], progress: Callable[[float], str]
) -> Iterator[ReadLine]:
    """Feed a log line by line, and yield what each line added.

    progress: formats a run's progress, see :meth:`~lora_tune.config.study.Study.counted`.
    A line counts when it ends, so each is fed with its newline. run() gets slower as the log grows, so a second reader
    first reads a block of lines; a block that adds nothing is fed at once.
    """
    ahead, reader, number = make_reader(), make_reader(), 0
    for lines in _blocks(pieces):
        known, block = ahead.run(), b"".join(line + b"\n" for line in lines)
        ahead.feed(block)
        silent = ahead.run() == known
        if silent:
            reader.feed(block)
        for number, line in enumerate(lines, start=number + 1):  # noqa: B020 - continues the numbering
            facts: tuple[str, ...] = ()
            if not silent:
                before = reader.run()
                reader.feed(line + b"\n")
                facts = tuple(_added(before, reader.run(), progress))
            yield ReadLine(number, line.decode("utf-8", "replace"), facts)


def _blocks(pieces: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The lines of a log, in blocks."""
    held = b""
    for piece in pieces:
        *lines, held = cut(held + piece)
        yield from (lines[at : at + BLOCK] for at in range(0, len(lines), BLOCK))
    if held:
        yield [held]


def _added(before: RunLog, now: RunLog, progress: Callable[[float], str]) -> Iterator[str]:
    """The facts in ``now`` that ``before`` lacks."""
    for point in now.evals[len(before.evals) :]:
        yield f"eval: loss {point.loss:g} at {progress(point.samples)}"
    if now.other_values > before.other_values:
        yield "another value of an eval before, passed over"
    for train in now.train[len(before.train) :]:
        yield f"train loss {train.loss:g} at {progress(train.samples)}"
    if before.run_stop_ms is None and now.run_stop_ms is not None:
        yield "the run ends"
    if now.dropped_lines > before.dropped_lines:
        yield "not understood"
    for name in now.hyperparameters.keys() - before.hyperparameters.keys():
        yield f"{name} = {now.hyperparameters[name]}"


def show(name: str, lines: Iterable[ReadLine], *, every: bool) -> int:
    """Print one log's lines with their facts; returns the number of evals."""
    unmatched, shown, evals, total, others = Unmatched(patterns="loss"), 0, 0, 0, 0
    click.echo(visible(name))
    for line in lines:
        total += 1
        evals += sum(fact.startswith("eval:") for fact in line.facts)
        others += any(fact.startswith("another value") for fact in line.facts)
        unmatched.found |= any(fact.startswith("eval:") for fact in line.facts)
        if not line.facts and not unmatched.found:
            unmatched.take(line.text)
        if (line.facts or every) and (every or shown < SHOWN):
            shown += 1
            click.echo(f"{line.number:7}  {'; '.join(line.facts) or '-':48.48}  {visible(line.text)[:120]}")
        elif line.facts and shown == SHOWN:
            shown += 1
            click.echo(f"{'':7}  ... (--all shows every line)")
    click.echo(f"{counted(total, 'lines')}, {counted(evals, 'evals')}")
    if others:
        known = f"{counted(others, 'lines')} with another value where one is known already"
        click.echo(f"{known}; the first counts: {TELL_APART}")
    if sentence := unmatched.describe(ended=True):
        click.echo(sentence)
    return evals
