"""Parses ``sbatch`` command lines as sbatch does, for the options that determine a job's identity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LONG = frozenset({
    "array", "clusters", "comment", "error", "export", "hold", "ignore-pbs", "job-name", "ntasks", "ntasks-per-node",
    "output", "parsable", "partition", "qos", "quiet", "requeue", "reservation", "test-only", "time", "time-min",
    "wait",
})  # fmt: skip
_NAMESAKES = frozenset({
    "cluster-constraint", "constraint", "container", "contiguous", "core-spec", "cores-per-socket", "export-file",
    "exclude", "exclusive", "account", "acctg-freq", "cpus-per-gpu", "cpus-per-task", "nodelist", "nodefile", "nodes",
    "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "open-mode", "overcommit", "oversubscribe", "power",
    "priority", "profile", "help", "hint", "reboot",
    "threads-per-core", "thread-spec", "tmp", "wait-all-nodes", "wckey", "wrap",
})  # fmt: skip
"""Other options that share prefixes with these, which makes abbreviations ambiguous."""
_FLAGS = frozenset({"hold", "requeue", "ignore-pbs", "parsable", "quiet", "test-only", "wait"})
_SHORT = {
    "a": "array",
    "e": "error",
    "H": "hold",
    "o": "output",
    "J": "job-name",
    "M": "clusters",
    "n": "ntasks",
    "p": "partition",
    "q": "qos",
    "Q": "quiet",
    "t": "time",
    "W": "wait",
}
_SHORT_FLAGS = "HIOQVWhksuv"
_HETEROGENEOUS = frozenset({":", "hetjob", "packjob"})
"""Separators of heterogeneous job components: on a command line, and in a header by new and old name."""


@dataclass(frozen=True, slots=True)
class SbatchOption:
    """One option. name: its long form, without dashes. value: "" if it has none. text: as written."""

    name: str
    value: str
    text: str


def sbatch_options(
    line: Sequence[str], short: Mapping[str, str] = _SHORT, short_flags: str = _SHORT_FLAGS
) -> list[SbatchOption]:
    """The options in ``line`` that this module knows, in their order.

    short: one-letter options by their long names; short_flags: letters without a value. sbatch's own where not named.
    """
    options: list[SbatchOption] = []
    rest = list(line)
    while rest:
        token = rest.pop(0)
        if token.startswith("--"):
            options += _long(token, rest)
        elif token.startswith("-"):
            options += _short(token, rest, short, short_flags)
        elif token in _HETEROGENEOUS:
            options.append(SbatchOption("hetjob", "", token))
    return options


def _long(token: str, rest: list[str]) -> list[SbatchOption]:
    """``--name``, ``--name=value``, ``--name value``, and unambiguous abbreviations."""
    stem, _, value = token[2:].partition("=")
    names = [stem] if stem in _LONG else [name for name in (*_LONG, *_NAMESAKES) if name.startswith(stem)]
    if len(names) != 1 or names[0] not in _LONG:
        return []
    if names[0] not in _FLAGS and "=" not in token and rest:
        value = rest.pop(0)
        token = f"{token} {value}"
    return [SbatchOption(names[0], value, token)]


def _short(token: str, rest: list[str], short: Mapping[str, str], flags: str) -> list[SbatchOption]:
    """``-x value``, ``-xvalue`` and combined letters."""
    options = []
    for place, letter in enumerate(token[1:], start=2):
        value = ""
        if letter not in flags:
            value = token[place:] or (rest.pop(0) if rest else "")
        if letter in short:
            options.append(SbatchOption(short[letter], value, f"-{letter} {value}".strip()))
        if letter not in flags:
            break
    return options
