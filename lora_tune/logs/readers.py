"""Readers of logs that are not MLLOG: prints of Hugging Face's Trainer, JSON lines, and lines of any other form.

Most such logs have no time stamps. Then a line is stamped with its *arrival time*: what the reader's ``clock`` says
when :meth:`LogReader.feed` is called, so feed them as they grow (the driver polls every second or so; that is also the
error). A log that is read again later gets the times of that reading, unless somebody kept the first ones
(:mod:`lora_tune.logs.arrival_times`): only its samples and losses are then worth something. Formats that print seconds
themselves do not depend on the clock.

Settings of each kind are keyword arguments of :func:`make_reader`; study files name them under ``workload.log``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_tune.base.kinds import LOG_READERS
from lora_tune.base.process import steady_epoch
from lora_tune.logs.line_reader import Clock, ReaderKind
from lora_tune.logs.run import LogReader


def make_reader(kind: str, *, clock: Clock = steady_epoch, **settings: Any) -> LogReader:
    """A reader of a log format by its name, or of ``path/to/file.py:Class``.

    Parameters
    ----------
    kind : str
        ``mllog``, ``hf_trainer``, ``jsonl``, ``regex``, or one that was added.
    clock : callable
        Epoch seconds now; see above.
    **settings
        The kind's own settings.

    Raises
    ------
    ValueError
        An unknown kind, an unknown setting or a bad value, in words that name it.
    """
    LOG_READERS.known(kind)
    loaded = LOG_READERS.load(kind)
    reader = loaded if isinstance(loaded, ReaderKind) else ReaderKind(make=loaded)
    if reader.settings is not None:
        _check_settings(kind, reader.settings, settings)
    instance: LogReader = LOG_READERS.make(kind, reader.make, clock=clock, **settings)
    return instance


def _check_settings(kind: str, known: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that the kind does not have, or a value of another type."""
    unknown = sorted(settings.keys() - known.keys())
    if unknown:
        allowed = ", ".join(known) or "none"
        raise ValueError(f"log kind {kind!r} has no setting {unknown[0]!r}; its settings: {allowed}")
    for name, value in settings.items():
        wanted = known[name]
        if wanted is bool:
            if not isinstance(value, bool):
                raise ValueError(f"log setting {name!r} is {value!r}; it must be true or false")
        elif isinstance(value, bool) or not isinstance(value, wanted) or (wanted is not str and value <= 0):
            expected = "a text" if wanted is str else "a number above 0"
            raise ValueError(f"log setting {name!r} is {value!r}; it must be {expected}")
