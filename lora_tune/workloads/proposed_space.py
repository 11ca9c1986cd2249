"""Proposes which options of a script to tune, and over which range, for users to correct.

The ranges are common ones: a learning rate within a decade of the present one on a log scale, a batch size and a rank
within a factor of two, warm-up from none. Each contains the present value; an option without a known value is left
alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

# The options of a user's training script, from its own parser and from its present command line.
#
# Pure functions of text. A Python parser reports its options itself (``parser_hook``); for other programs the help
# text is parsed, in the formats of argparse and of usage texts of C programs.


_START = re.compile(r"^\s{0,12}(?P<text>-{1,2}[A-Za-z].*)$")
_FLAG = re.compile(r"(?<![\w-])-{1,2}[A-Za-z][\w.-]*")
_DEFAULT = re.compile(r"(?i)\bdefaults?(?: is| to| value)?\s*[:=]?\s*(?P<value>\"[^\"]*\"|'[^']*'|[^\s)\],;]+)")
_CHOICES = re.compile(r"\{(?P<names>[\w.+-]+(?:,[\w.+-]+)+)\}")
_WORD = re.compile(r"-{1,2}[A-Za-z][\w.-]*|[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)*")
"""An option before its value: dashed, or a key of yacs as ``SOLVER.BASE_LR``."""
_BINDING = re.compile(r"--?[A-Za-z][\w-]*=[A-Za-z][\w./]*=[^=]+$")
_NUMBER = re.compile(r"(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)[fF]?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option of a script.

    Parameters
    ----------
    flag : str
        As typed, such as ``--lr``; ``optimizer.lr`` for words of the form ``name=value``.
    value : str
        Its present value: from the command, else the parser's default; "" if neither states one value.
    choices : tuple of str
        The values that the help text allows; empty if it lists none.
    description : str
        Its description in the help text.
    at : int or None
        Index of the word in the command that holds the option; None if the command does not set it.
    aliases : tuple of str
        The other flags of the same option.
    joined : bool
        Whether flag and value are one word, ``--lr=0.1``; else the value is the next word.
    in_file : bool
        Whether it is a key of the command's config file instead of an option: its flag is the dotted key.
    in_environment : bool
        Whether it is an environment variable instead of an option: its flag is the variable's name.
    may_be_added : bool
        Whether a word appended to the command would reach the option's parser.
    """

    flag: str
    value: str = ""
    choices: tuple[str, ...] = ()
    description: str = ""
    at: int | None = None
    aliases: tuple[str, ...] = ()
    joined: bool = True
    in_file: bool = False
    in_environment: bool = False
    may_be_added: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Possible names of the option, in lower case with ``_``: its flags, else its description."""
        flags = (flag.lstrip("-").rpartition(".")[2] for flag in (self.flag, *self.aliases))
        flag_names = tuple(dict.fromkeys(flag.replace("-", "_").lower() for flag in flags))
        if any(len(name) > 1 for name in flag_names):
            return flag_names
        described = re.findall(r"[a-z]+", re.split(r"[(,:;.\[]", self.description.lower())[0])
        while described and len(described[-1]) == 1:  # ``batch size B``
            described.pop()
        if described[:1] in (["set"], ["sets"], ["the"]):
            del described[0]
        return (*flag_names, "_".join(described))

    @property
    def number(self) -> float | None:
        """The value as a number, C's ``1e-3f`` included; None if it is not one."""
        match = _NUMBER.fullmatch(self.value)
        number = float(match["number"]) if match else math.inf
        return number if math.isfinite(number) else None


def from_help(text: str) -> list[Option]:
    """The options with a value in a help text, in order."""
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
    """One option from its lines; None for a switch, and for help itself."""
    head, _, rest = re.sub(r"\t|>: ", "   ", block[0]).partition("  ")
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
    """The options with a value in a command line: ``--a=1``, ``--a 1``, ``-a 1``, ``a=1`` and ``A.B 1``.

    Also gin's ``--gin_bindings=train.lr=1``, whose flag is everything before the last ``=``.
    """
    options = []
    for at, token in enumerate(command):
        name, equals, value = token.rpartition("=") if _BINDING.match(token) else token.partition("=")
        after = command[at + 1] if at + 1 < len(command) else ""
        if equals and re.fullmatch(r"-{0,2}[A-Za-z][\w.-]*(?:=[\w./]+)?", name):
            options.append(Option(flag=name, value=value, at=at))
        elif _WORD.fullmatch(token) and after and (not after.startswith("-") or _is_number(after)):
            options.append(Option(flag=token, value=after, at=at, joined=False))
    return options


def _is_number(token: str) -> bool:
    return _NUMBER.fullmatch(token) is not None


def from_parser(records: str) -> list[Option] | None:
    """The options that ``parser_hook`` recorded for a script's parser, with their present values.

    records: one JSON object per line and parser. Of several parsers that parsed their whole command, one that appended
    words reach and that has options is preferred. None if no parser ran. Options that appended words cannot reach are
    marked so, and ``merged_options`` keeps those that the command holds.
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


def merged_options(typed: Sequence[Option], listed: Sequence[Option], *, parsed: bool = False) -> list[Option]:
    """The options of a command with their descriptions, and those that the command does not set.

    parsed: whether ``listed`` comes from the parser itself, so that a dashed option that it lacks is not the script's.
    """
    known = {_bare(flag): option for option in listed for flag in (option.flag, *option.aliases)}
    both = []
    for option in typed:
        described = known.get(_bare(option.flag)) or (_abbreviated(option.flag, listed) if parsed else None)
        if described is not None:
            others = tuple(flag for flag in (described.flag, *described.aliases) if flag != option.flag)
            option = replace(option, description=described.description, choices=described.choices, aliases=others)
        # A parser of dashed options does not know words such as optimizer.lr=0.02.
        if described is not None or not parsed or not option.flag.startswith("-") or "=" in option.flag:
            both.append(option)
    taken = {_bare(flag) for option in both for flag in (option.flag, *option.aliases)}
    return [*both, *(option for option in listed if option.may_be_added and _bare(option.flag) not in taken)]


def _abbreviated(flag: str, listed: Sequence[Option]) -> Option | None:
    """The option that an unambiguous prefix of its name means, as argparse allows it."""
    meant = [o for o in listed if flag.startswith("--") and any(f.startswith(flag) for f in (o.flag, *o.aliases))]
    return meant[0] if len(meant) == 1 else None


def _bare(flag: str) -> str:
    return flag.lstrip("-+").replace("-", "_")


Range = tuple[str, str, str]
"""(parameter as TOML, reason, present value as TOML)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedParameter:
    """One option as a parameter of a study.

    Parameters
    ----------
    place : str
        The parameter's name, in braces in the command.
    toml : str
        The parameter as in ``[space]``.
    why : str
        The reason for the range.
    today : str
        The present value as TOML.
    option : Option
        The option that it sets.
    """

    place: str
    toml: str
    why: str
    today: str
    option: Option


@dataclass(frozen=True, slots=True)
class _Knob:
    """A kind of parameter, recognised by option names.

    make: returns the range for an option's present value, and if ``scheduled`` for the steps of the whole run, None if
    unknown; returns None if no range could contain the value. searched: whether it is tuned by default, or only
    suggested.
    """

    place: str
    names: str
    make: Callable[..., Range | None]
    searched: bool = True
    scheduled: bool = False


def propose(options: Sequence[Option], steps: int | None = None) -> list[ProposedParameter]:
    """The parameters of a study for these options, most important first.

    steps: the optimizer steps of an earlier run, if known. Of several options of one kind the first with a known
    present value counts.
    """
    known = [length for length in (scheduled_steps(options), steps) if length]
    bound = min(known, default=None)
    parameters = []
    for knob in _KNOBS:
        for option in (o for o in options if _is(knob, o)):
            proposal = knob.make(option, bound) if knob.scheduled else knob.make(option)
            if proposal is None:
                continue
            toml, why, today = proposal
            files = [o for o in options if o.in_file and _is(knob, o) and o.number not in (None, option.number)]
            if files and option.at is None and not option.in_file:
                why += f"; EDIT: the config file has {files[0].flag} = {files[0].value}: fill the one that counts"
            if not knob.searched:
                toml, why = today, f"not searched yet; a range to try: {toml}"
            parameters.append(ProposedParameter(place=knob.place, toml=toml, why=why, today=today, option=option))
            break
    return parameters


def without_value(options: Sequence[Option], proposals: Sequence[ProposedParameter]) -> list[tuple[str, Option]]:
    """(place, option) of options worth tuning that are left out because their present value is unknown."""
    taken = {p.place for p in proposals}
    first = {k.place: next((o for o in options if _is(k, o)), None) for k in _KNOBS if k.searched}
    return [(place, o) for place, o in first.items() if o is not None and place not in taken and o.number is None]


def _is(knob: _Knob, option: Option) -> bool:
    if knob.place == "LORA_RANK" and not _may_be_rank(option):
        return False
    return any(re.fullmatch(knob.names, name) for name in option.names)


def _may_be_rank(option: Option) -> bool:
    """Whether an option is an integer about LoRA: ``-r`` may also mean resume, ``--rank`` a process."""
    haystack = f"{option.flag} {' '.join(option.aliases)} {option.description}".lower()
    return (
        re.fullmatch(r"|None|\d+", option.value) is not None
        and re.search(r"lora|low[- ]rank|peft|adapter", haystack) is not None
    )


def scheduled_steps(options: Sequence[Option]) -> int | None:
    """The optimizer steps at which a run, or its learning rate's schedule, ends; None if no option states them.

    options: those of the script, with their present values. The smallest of several counts.
    """
    stated = (int(o.value) for o in options if o.value.isdigit() and any(map(_STEPS.fullmatch, o.names)))
    return min((steps for steps in stated if steps), default=None)


def _rate(option: Option) -> Range | None:
    now = option.number
    if not now or now <= 0:
        return None
    low, high = min(now, float(f"{now / 10:.2g}")), max(now, float(f"{now * 10:.2g}"))
    return (
        f'{{ type = "float", low = {_real(low)}, high = {_real(high)}, log = true }}',
        f"a decade on each side of {now:g}",
        _real(now),
    )


def _powers(option: Option) -> Range | None:
    now = option.number
    if now is None or now < 1 or now != int(now):
        return None
    whole = int(now)
    sizes = sorted({max(1, whole // 2), whole, whole * 2})
    allowed = [size for size in sizes if not option.choices or str(size) in (*option.choices, str(whole))]
    why = "what its parser allows of half and twice" if allowed != sizes else "half and twice"
    return f'{{ type = "categorical", choices = {allowed} }}', f"{why} {whole}", str(whole)


def _warmup_steps(option: Option, steps: int | None) -> Range | None:
    """From none to four times the present value, at most half of the run; None if unbounded or without room."""
    now = option.number
    if now is None or now < 0 or now != int(now) or not (now or steps):
        return None
    whole = int(now)
    high, why = 4 * whole, "none, to four times today's"
    if steps is not None and (high > steps // 2 or not high):
        high, why = max(whole, steps // 2), f"none, to half of the {steps} steps"
        if not 0 < high < steps:
            return None
    step = max(1, 10 ** math.floor(math.log10(high / 20)))
    while whole % step:
        step //= 10
    return f'{{ type = "int", low = 0, high = {high}, step = {step} }}', why, str(whole)


def _warmup_share(option: Option) -> Range | None:
    now = option.number
    if now is None or not 0 <= now < 1:
        return None
    return _interval(now, 0.0, 0.2), "a share of the training", _real(now)


def _warmup(option: Option, steps: int | None) -> Range | None:
    share = option.number is not None and 0 < option.number < 1
    return _warmup_share(option) if share else _warmup_steps(option, steps)


def _dropout(option: Option) -> Range | None:
    now = option.number
    return None if now is None or not 0 <= now < 1 else (_interval(now, 0.0, 0.3), "", _real(now))


def _decay(option: Option) -> Range | None:
    now = option.number
    if now is None or now < 0:
        return None
    if not now:
        return '{ type = "float", low = 0.0, high = 0.1 }', "", "0.0"
    low, high = min(now, 1e-4), max(now, 0.1)
    return f'{{ type = "float", low = {_real(low)}, high = {_real(high)}, log = true }}', "", _real(now)


def _beta(option: Option) -> Range | None:
    now = option.number
    if now is None or not 0 < now < 1:
        return None
    return f'{{ type = "categorical", choices = {sorted({0.95, 0.98, 0.999, now})} }}', "", _real(now)


def _listed(option: Option) -> Range | None:
    if len(option.choices) < 2 or option.value not in option.choices:
        return None
    named = ", ".join(json.dumps(choice, ensure_ascii=False) for choice in option.choices)
    today = json.dumps(option.value, ensure_ascii=False)
    return f'{{ type = "categorical", choices = [{named}] }}', "what its parser allows", today


def _interval(now: float, low: float, high: float) -> str:
    return f'{{ type = "float", low = {_real(min(low, now))}, high = {_real(max(high, now))} }}'


def _real(value: float) -> str:
    """A number as a TOML float: a point or an exponent with digits on both sides."""
    return repr(float(value))


_KNOBS = (
    _Knob("LR", r"(?:base_|max_|peak_|init_|initial_)?(?:lr|learn(?:ing)?_?rate|lrate|eta0?)(?:_(?:max|peak|init))?",
          _rate),
    _Knob("LORA_RANK", r"(?:lora_)?(?:r|rank|dim)", _powers),
    _Knob(
        "BATCH_SIZE",
        r"(?:per_device_|per_gpu_|global_|micro_|mini_)?(?:train_)?(?:batch_?size|bs|batch|minibatch)(?:_per_(?:gpu|device))?|ims_per_batch",
        _powers,
    ),
    _Knob("WARMUP_STEPS", r"(?:num_|lr_|learning_rate_)?warm_?up_(?:steps|iters|iterations|updates)|warm_?up", _warmup,
          scheduled=True),
    _Knob("WARMUP_RATIO", r"(?:lr_)?warm_?up_(?:ratio|fraction|frac|share|pct)", _warmup_share),
    _Knob("LORA_ALPHA", r"lora_alpha", _powers, searched=False),
    _Knob("DROPOUT", r"(?:lora_|hidden_|attention_)?drop_?out(?:_p|_rate|_prob)?", _dropout, searched=False),
    _Knob("WEIGHT_DECAY", r"weight_?decay|wd", _decay, searched=False),
    _Knob("ACCUMULATION", r"(?:gradient_|grad_)?accum(?:ulation|ulate)?_(?:steps|iter|batches)", _powers,
          searched=False),
    _Knob("BETA2", r"(?:adam_)?beta_?2", _beta, searched=False),
    _Knob("SCHEDULE", r"(?:lr_)?schedule(?:r)?(?:_type|_name)?", _listed, searched=False),
)  # fmt: skip

_STEPS = re.compile(r"(?:n|num|max|total|lr_decay|decay)_(?:train_|training_)?(?:steps|iters|iterations|updates)"
                    r"|train(?:ing)?_(?:steps|iters|iterations|updates)|steps|iters|iterations")  # fmt: skip

SEED = re.compile(r"(?:random_|manual_|train_|data_)?seed|seed_everything")
_FOLDER = re.compile(r"(?:output|out|save|log|logging|logger|checkpoint|ckpt|tb|tensorboard|run|results?|work|working"
                     r"|exp|experiment|default_root)_?(?:dir|path|folder|directory)|output")  # fmt: skip
_FILE = re.compile(r"(?:save|output|out|log|results?|export)(?:_?(?:file|filename|to|as|model|path))?"
                   r"|(?:save|output|export)_\w+_(?:to|path|file)"
                   r"|\w+_(?:save|output|out)(?:_(?:path|file))?")  # fmt: skip
_FILE_NAME = re.compile(r"[^\s=]*[^\s=/.][^\s=/]*\.[A-Za-z]\w{0,9}")


def place_of(option: Option) -> str:
    """Name in a trial's folder for an option that sets an output path; "" for other options.

    An option such as ``--save-dir`` takes a folder. Others, such as ``--save``, take a file if their present value
    looks like one, such as ``model.pt``; a checkpoint file may be read or written, so it is left alone.
    """
    name, value = option.names[0], option.value
    if _FILE_NAME.fullmatch(value) or (value and name.endswith("file") and not value.endswith("/")):
        return value.rpartition("/")[2] if _FILE.fullmatch(name) else ""
    is_cwd = value.rstrip("/") in (".", "..")  # the script may also read there
    return "out" if _FOLDER.fullmatch(name) and not is_cwd else ""
