"""Shared by the commands that drive jobs: signals, keeping or cancelling running jobs, and the view."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from lora_tune.base.errors import EXIT_INTERRUPTED
from lora_tune.base.text import redraws
from lora_tune.controller.driver import Driver, Outcome
from lora_tune.review import screen

_CANCEL_SECONDS = 90.0


def make_view(quiet: bool, as_json: bool) -> Any:
    """The view for no output, JSON, a terminal, or a file."""
    if quiet:
        return screen.Quiet()
    if as_json:
        return screen.JsonLines()
    return screen.Screen() if redraws() else screen.Plain()


def run_interruptibly(driver: Driver) -> Outcome:
    """Run the driver; the first Ctrl-C, SIGTERM or SIGHUP (closed terminal) ends it after the current tick.

    If SIGHUP is ignored (nohup), it stays ignored.
    """

    def interrupt(number: int, _frame: Any) -> None:
        driver.interrupt = driver.interrupt or number

    hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, *hung_up)}
    try:
        return driver.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def writing_results(command: str) -> Iterator[None]:
    """On an interrupt while results are written, print that no trial is lost and how to write them.

    command: the command line that writes them.
    """
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        click.echo(
            f"interrupted while config and report were written; all trials are recorded, so write them with: {command}",
            err=True,
        )
        sys.exit(EXIT_INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)


CANCEL = "cancel"
"""The answer that cancels the jobs; any other, and a second Ctrl-C, keeps them."""


def after_interrupt(driver: Driver, command: str) -> None:
    """Keep the running jobs, unless the user answers ``cancel``. Without a terminal, keep them.

    After SIGTERM or SIGHUP there is no question, because nobody could answer it.

    command: the command line that resumes.
    """
    running = [t.number for t in driver.sweep.trials.values() if t.verdict is None]
    if not running:
        return
    answer = ""
    if sys.stdin.isatty() and driver.interrupt == signal.SIGINT:
        # Also if the parent process ignores SIGINT, as shells do for background jobs.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        count = "1 trial still runs" if len(running) == 1 else f"{len(running)} trials still run"
        try:
            answer = input(f"\n{count}. Enter keeps them, the word {CANCEL} cancels them [keep] ").strip().lower()
        except (KeyboardInterrupt, EOFError):
            click.echo(err=True)
    if answer == CANCEL:
        cancelled = driver.cancel_all(_CANCEL_SECONDS)
        click.echo("cancelled." if cancelled else "some jobs do not end; see lora_tune.status", err=True)
    else:
        click.echo(f"the jobs keep running; resume with: {command}", err=True)
