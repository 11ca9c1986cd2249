"""The options of somebody's training script: from its help text, and from the command line that runs it today.

Pure functions of text. Read are the forms of argparse, click, typer and absl, and usage texts of C programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_START = re.compile(r"^[\s│|]{0,12}(?P<text>-{1,2}[A-Za-z].*)$")
_FLAG = re.compile(r"(?<![\w-])-{1,2}[A-Za-z][\w.-]*")
_DEFAULT = re.compile(r"(?i)\bdefaults?(?: is| to| value)?\s*[:=]?\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s)\],;]+)")
_CHOICES = re.compile(r"\{(?P<names>[\w.+-]+(?:,[\w.+-]+)+)\}")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a script.

    Parameters
    ----------
    flag : str
        As it is typed, such as ``--lr``; ``optimizer.lr`` for words of the form ``name=value``.
    value : str
        What it is today: given in the command, else the default of the help text; "" where neither says it.
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
    """

    flag: str
    value: str = ""
    choices: tuple[str, ...] = ()
    description: str = ""
    at: int | None = None
    aliases: tuple[str, ...] = ()
    joined: bool = True

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
        """The value as a number; None where it is none."""
        match = _NUMBER.match(self.value)
        return float(match[0]) if match else None


def from_help(text: str) -> list[Option]:
    """The options with a value that a help text lists, in its order."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        line = line.rstrip(" │|\r")
        if begin := _START.match(line):
            blocks.append([begin["text"]])
        elif blocks and line[:2].strip(" │|") == "":
            blocks[-1].append(line.strip(" │|"))
    parsed = (_option(block) for block in blocks)
    return [option for option in parsed if option is not None]


def _option(block: Sequence[str]) -> Option | None:
    """One option out of its lines; None for a switch, and for help itself."""
    head, _, rest = re.sub(r"\t", "   ", block[0]).partition("  ")
    if ":" in head:  # absl: ``--lr: learning rate``
        head, _, help_text = head.partition(":")
        rest, head = f"{help_text} {rest}", f"{head} VALUE"
    description = " ".join((rest.strip(), *block[1:])).strip()
    flags = _FLAG.findall(head)
    if not flags:
        return None
    flag = max(flags, key=lambda f: (f.startswith("--"), len(f)))
    value = _DEFAULT.search(f"{head} {description}")
    named = _CHOICES.search(head)
    metavar = _FLAG.sub("", head).strip(" ,/")
    if not metavar and re.match(r"(?:FLOAT|INTEGER|INT|TEXT|NUMBER)\b", description):  # typer's columns
        metavar, _, description = description.partition(" ")
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


def together(typed: Sequence[Option], listed: Sequence[Option]) -> list[Option]:
    """The options of a command with what the help text says of them, and those that the help text alone knows."""
    known = {_bare(flag): option for option in listed for flag in (option.flag, *option.aliases)}
    both = []
    for option in typed:
        described = known.get(_bare(option.flag))
        if described is not None:
            option = replace(
                option,
                description=described.description,
                choices=described.choices,
                aliases=(described.flag, *described.aliases),
            )
        both.append(option)
    taken = {_bare(flag) for option in both for flag in (option.flag, *option.aliases)}
    return [*both, *(option for option in listed if _bare(option.flag) not in taken)]


def _bare(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_")
