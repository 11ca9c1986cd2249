"""Signals while a sweep is driven and while its results are written: nothing is lost, and what to type is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest

from lora_tune.base.errors import EXIT_INTERRUPTED
from lora_tune.cli.interrupts import run_interruptibly, writing_results
from lora_tune.controller.driver import Driver, Outcome

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers of a program that a terminal started, and afterwards those of before."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signalled:
    """A driver that gets signals in its first tick, and looks for the interrupt after it."""

    def __init__(self, *signals: signal.Signals) -> None:
        self.interrupt = 0
        self._signals = signals

    def run(self) -> Outcome:
        for number in self._signals:
            os.kill(os.getpid(), number)
        return Outcome("interrupted", interrupted=True) if self.interrupt else Outcome("all trials are proposed")


def run(*signals: signal.Signals) -> Outcome:
    return run_interruptibly(cast(Driver, Signalled(*signals)))


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_signal_ends_the_sweep_after_its_tick_however_often_it_comes(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    assert run(number, number, number).interrupted
    assert signal.getsignal(number) is before


def test_under_nohup_a_sweep_goes_on_without_its_terminal() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert run(signal.SIGHUP) == Outcome("all trials are proposed")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_who_interrupts_the_report_hears_that_no_trial_is_lost_and_what_to_type(
    number: signal.Signals, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as ended, writing_results("lora-tune sweep --study mine.toml"):
        signal.raise_signal(number)
    assert ended.value.code == EXIT_INTERRUPTED
    said = capsys.readouterr().err
    assert "all trials are recorded, so write them with: lora-tune sweep --study mine.toml" in said
