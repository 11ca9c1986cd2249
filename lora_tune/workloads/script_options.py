"""The options of somebody's training script: from its own parser, and from the command line that runs it today.

Pure functions of text. A parser that runs in Python says itself what it knows (``parser_hook``); of other programs the
help text is read, in the forms of argparse and of usage texts of C programs.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_START = re.compile(r"^\s{0,12}(?P<text>-{1,2}[A-Za-z].*)$")
_FLAG = re.compile(r"(?<![\w-])-{1,2}[A-Za-z][\w.-]*")
_DEFAULT = re.compile(r"(?i)\bdefaults?(?: is| to| value)?\s*[:=]?\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s)\],;]+)")
_CHOICES = re.compile(r"\{(?P<names>[\w.+-]+(?:,[\w.+-]+)+)\}")
_NUMBER = re.compile(r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[fF]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a script.

    Parameters
    ----------
    flag : str
        As it is typed, such as ``--lr``; ``optimizer.lr`` for words of the form ``name=value``.
    value : str
        What it is today: as the command has it, else the parser's own default; "" where nothing states one value.
    choices : tuple of str
        The values that the help text allows; empty where it names none.
    description : str
        What the help text says of it.
    at : int or None
        Index of the word in the command that holds the option; None for one that the command leaves out.
    aliases : tuple of str
        The other flags of the same option.
    joined : bool
        Whether flag and value are one word, ``--lr=0.1``; else the value is a word of its own.
    in_file : bool
        Whether it is a key of the config file that the command names, and no option: its flag is the dotted key.
    may_be_added : bool
        Whether a word behind the command would reach the parser that knows it.
    """

    flag: str
    value: str = ""
    choices: tuple[str, ...] = ()
    description: str = ""
    at: int | None = None
    aliases: tuple[str, ...] = ()
    joined: bool = True
    in_file: bool = False
    may_be_added: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """What the option may be known as, in small letters with ``_``: its flag, or what it is described as."""
        flags = (flag.lstrip("-").rpartition(".")[2] for flag in (self.flag, *self.aliases))
        own = tuple(dict.fromkeys(flag.replace("-", "_").lower() for flag in flags))
        if any(len(name) > 1 for name in own):
            return own
        described = re.findall(r"[a-z]+", re.split(r"[(,:;.\[]", self.description.lower())[0])
        while described and len(described[-1]) == 1:  # ``batch size B``
            described.pop()
        return (*own, "_".join(described))

    @property
    def number(self) -> float | None:
        """The value as a number, C's ``1e-3f`` among them; None where it is none."""
        match = _NUMBER.fullmatch(self.value)
        number = float(match["number"]) if match else math.inf
        return number if math.isfinite(number) else None


def from_help(text: str) -> list[Option]:
    """The options with a value that a help text lists, in its order."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        line = line.rstrip()
        if begin := _START.match(line):
            blocks.append([begin["text"]])
        elif blocks and not line[:2].strip():
            blocks[-1].append(line.strip())
    parsed = (_option(block) for block in blocks)
    return [option for option in parsed if option is not None]


def _option(block: Sequence[str]) -> Option | None:
    """One option out of its lines; None for a switch, and for help itself."""
    head, _, rest = re.sub(r"\t", "   ", block[0]).partition("  ")
    description = " ".join((rest.strip(), *block[1:])).strip()
    flags = _FLAG.findall(head)
    if not flags:
        return None
    flag = max(flags, key=lambda f: (f.startswith("--"), len(f)))
    value = _DEFAULT.search(f"{head} {description}")
    named = _CHOICES.search(head)
    metavar = _FLAG.sub("", head).strip(" ,/")
    if flag in ("--help", "-h", "--version") or not (metavar or named):
        return None
    return Option(
        flag=flag,
        value=value["value"].strip("\"'.") if value else "",
        choices=tuple(named["names"].split(",")) if named else (),
        description=re.sub(r"\s+", " ", description),
        aliases=tuple(other for other in flags if other != flag),
        joined=flag.startswith("--"),
    )


def from_command(command: Sequence[str]) -> list[Option]:
    """The options with a value that a command line gives: ``--a=1``, ``--a 1``, ``-a 1`` and ``a=1``."""
    options = []
    for at, word in enumerate(command):
        name, equals, value = word.partition("=")
        after = command[at + 1] if at + 1 < len(command) else ""
        if equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*", name):
            options.append(Option(flag=name, value=value, at=at))
        elif (
            re.fullmatch(r"-{1,2}[A-Za-z][\w.-]*", word) and after and (not after.startswith("-") or _is_number(after))
        ):
            options.append(Option(flag=word, value=after, at=at, joined=False))
    return options


def _is_number(word: str) -> bool:
    return _NUMBER.fullmatch(word) is not None


def from_parser(records: str) -> list[Option] | None:
    """The options that a script's parser wrote down (``parser_hook``), with what each is today.

    records: one JSON object a line and a parser. Of several parsers the last of the first process that parsed its
    whole command counts. None where no parser was reached. Options of parsers that words behind the command do not
    reach are known by their value alone: ``together`` keeps those that the command holds.
    """
    parsers = [json.loads(line) for line in records.splitlines() if line.strip()]
    whole = [record for record in parsers if record["final"]] or parsers
    if not whole:
        return None
    best = max(whole, key=lambda record: (record["reached"], len(record["options"]) > 0))
    return [_known(option, reached=best["reached"]) for option in best["options"] if option["flags"]]


def _known(option: Mapping[str, Any], *, reached: bool) -> Option:
    flags = option["flags"]
    flag = max(flags, key=lambda f: (f.startswith("--"), len(f)))
    return Option(
        flag=flag,
        value=option["value"] or "",
        choices=tuple(option["choices"]),
        description=re.sub(r"\s+", " ", option["help"]).strip(),
        aliases=tuple(other for other in flags if other != flag),
        joined=not flag.startswith("-") or flag.startswith("--"),
        may_be_added=reached and not option["outer"],
    )


def together(typed: Sequence[Option], listed: Sequence[Option], *, parsed: bool = False) -> list[Option]:
    """The options of a command with what is known of them, and those that the command leaves out.

    parsed: whether ``listed`` is the parser's own word, so that a dashed option that it does not list is none of the
    script's.
    """
    known = {_bare(flag): option for option in listed for flag in (option.flag, *option.aliases)}
    both = []
    for option in typed:
        described = known.get(_bare(option.flag)) or (_abbreviated(option.flag, listed) if parsed else None)
        if described is not None:
            others = tuple(flag for flag in (described.flag, *described.aliases) if flag != option.flag)
            option = replace(option, description=described.description, choices=described.choices, aliases=others)
        # Of words such as optimizer.lr=0.02 an argument parser of dashed options knows nothing.
        if described is not None or not parsed or not option.flag.startswith("-"):
            both.append(option)
    taken = {_bare(flag) for option in both for flag in (option.flag, *option.aliases)}
    return [*both, *(option for option in listed if option.may_be_added and _bare(option.flag) not in taken)]


def _abbreviated(flag: str, listed: Sequence[Option]) -> Option | None:
    """The option that a beginning of its name stands for, as argparse allows it."""
    meant = [o for o in listed if flag.startswith("--") and any(f.startswith(flag) for f in (o.flag, *o.aliases))]
    return meant[0] if len(meant) == 1 else None


def _bare(flag: str) -> str:
    return flag.lstrip("-+").replace("-", "_")
