"""What the commands that drive jobs share: Ctrl-C, keeping or cancelling what runs, who watches."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from typing import Any

import click

from lora_tune.base.terminal import redraws
from lora_tune.controller.driver import Driver, Outcome
from lora_tune.review import screen

_CANCEL_SECONDS = 90.0


def make_view(quiet: bool, as_json: bool) -> Any:
    """Who watches: nobody, a program, a person at a terminal, or a file."""
    if quiet:
        return screen.Quiet()
    if as_json:
        return screen.JsonLines()
    return screen.Screen() if redraws() else screen.Plain()


def run_interruptibly(driver: Driver) -> Outcome:
    """Run; the first Ctrl-C or SIGTERM ends the loop after its tick."""

    def interrupt(_signal: int, _frame: Any) -> None:
        driver.interrupt = True

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return driver.run()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def after_interrupt(driver: Driver, ask: Callable[[str], str] = input) -> None:
    """Keep or cancel the jobs that run; a second Ctrl-C cancels. Without a terminal they are kept."""
    running = [t.number for t in driver.sweep.trials.values() if t.verdict is None]
    if not running:
        return
    answer = "k"
    if sys.stdin.isatty():
        # Also where whoever started us ignores Ctrl-C, as shells do for jobs in the background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            answer = ask(f"\n{len(running)} trials still run. Keep them (k) or cancel them (c)? [k] ").strip().lower()
        except (KeyboardInterrupt, EOFError):
            answer = "c"
    if answer.startswith("c"):
        gone = driver.cancel_all(_CANCEL_SECONDS)
        click.echo("cancelled." if gone else "some jobs do not end; see lora_tune.status", err=True)
    else:
        click.echo("the jobs go on; the same command adopts them.", err=True)
