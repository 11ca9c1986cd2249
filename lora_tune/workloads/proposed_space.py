"""Which options of a script are worth a search, and over which range: proposals for people to correct.

The ranges are those in common use: a learning rate within a decade of today's on a log scale, a batch size and a rank
within a factor of two, warm-up from none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lora_tune.workloads.script_options import Option

Range = tuple[str, str, str | None]
"""A parameter as TOML, why, and today's value as TOML (None where it is not known)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedParameter:
    """One option as a parameter of a study.

    Parameters
    ----------
    place : str
        The parameter's name, which the command holds in braces.
    toml : str
        The parameter as it stands in ``[space]``.
    why : str
        The guess in words.
    today : str or None
        Today's value as TOML, None where it is not known.
    option : Option
        The option that it fills.
    """

    place: str
    toml: str
    why: str
    today: str | None
    option: Option


@dataclass(frozen=True, slots=True)
class _Knob:
    """Names of options of one meaning.

    make: the range from today's value, and where it is ``scheduled`` from the steps of the whole run, None where no
    option states them. searched: by default, or only proposed.
    """

    place: str
    names: str
    make: Callable[..., Range | None]
    searched: bool = True
    scheduled: bool = False


def propose(options: Sequence[Option]) -> list[ProposedParameter]:
    """The parameters of a study for these options, in the order of how much they usually matter."""
    parameters = []
    for knob in _KNOBS:
        option = next((o for o in options if _is(knob, o)), None)
        if option is None:
            continue
        proposal = knob.make(option, scheduled_steps(options)) if knob.scheduled else knob.make(option)
        if proposal is None:
            continue
        toml, why, today = proposal
        if not knob.searched:
            if today is None:
                continue
            toml, why = today, f"not searched yet; a range to try: {toml}"
        parameters.append(ProposedParameter(place=knob.place, toml=toml, why=why, today=today, option=option))
    return parameters


def _is(knob: _Knob, option: Option) -> bool:
    if knob.place == "LORA_RANK" and not _may_be_rank(option):
        return False
    return any(re.fullmatch(knob.names, name) for name in option.names)


def _may_be_rank(option: Option) -> bool:
    """Whether an option holds a whole number, and is said to be of LoRA: ``-r`` may resume, ``--rank`` be a process."""
    words = f"{option.flag} {' '.join(option.aliases)} {option.description}".lower()
    return (
        re.fullmatch(r"|None|\d+", option.value) is not None
        and re.search(r"lora|low[- ]rank|peft|adapter", words) is not None
    )


def scheduled_steps(options: Sequence[Option]) -> int | None:
    """The optimizer steps after which a run, or its learning rate's schedule, ends; None where no option states them.

    options: those of the script, with what each is today. The shortest of several counts.
    """
    stated = (int(o.value) for o in options if o.value.isdigit() and any(map(_STEPS.fullmatch, o.names)))
    return min((steps for steps in stated if steps), default=None)


def _rate(option: Option) -> Range:
    now = option.number
    if not now or now <= 0:
        return '{ type = "float", low = 1e-5, high = 1e-2, log = true }', "today's value is not known", None
    low, high = f"{now / 10:.2g}", f"{now * 10:.2g}"
    return (
        f'{{ type = "float", low = {_real(low)}, high = {_real(high)}, log = true }}',
        (f"a decade on each side of {now:g}"),
        _real(f"{now:g}"),
    )


def _powers(usual: Sequence[int]) -> Callable[[Option], Range]:
    def around(option: Option) -> Range:
        now = option.number
        if now is None or now < 1 or now != int(now):
            return f'{{ type = "categorical", choices = {[*usual]} }}', "today's value is not known", None
        whole = int(now)
        choices = sorted({max(1, whole // 2), whole, whole * 2})
        return f'{{ type = "categorical", choices = {choices} }}', f"half and twice {whole}", str(whole)

    return around


def _warmup_steps(option: Option, steps: int | None) -> Range | None:
    now = int(option.number or 0)
    high, why = max(100, 4 * now), "none, to four times today's"
    if steps is not None and high > steps // 2:
        high, why = max(now, steps // 2), f"none, to half of the {steps} steps"
        if not 0 < high < steps:
            return None
    step = max(1, 10 ** math.floor(math.log10(high / 20)))
    today = str(now) if now % step == 0 else None
    return f'{{ type = "int", low = 0, high = {high}, step = {step} }}', why, today


def _warmup_share(option: Option) -> Range:
    now = option.number or 0.0
    return (
        '{ type = "float", low = 0.0, high = 0.2 }',
        "a share of the training",
        _real(f"{now:g}") if now <= 0.2 else None,
    )


def _warmup(option: Option, steps: int | None) -> Range | None:
    share = option.number is not None and 0 < option.number < 1
    return _warmup_share(option) if share else _warmup_steps(option, steps)


def _dropout(option: Option) -> Range:
    now = option.number
    return '{ type = "float", low = 0.0, high = 0.3 }', "", None if now is None else _real(f"{now:g}")


def _decay(option: Option) -> Range:
    now = option.number
    return '{ type = "float", low = 1e-4, high = 0.1, log = true }', "", None if now is None else _real(f"{now:g}")


def _beta(option: Option) -> Range:
    now = option.number
    return '{ type = "categorical", choices = [0.95, 0.98, 0.999] }', "", None if now is None else _real(f"{now:g}")


def _listed(option: Option) -> Range | None:
    if len(option.choices) < 2:
        return None
    named = ", ".join(f'"{choice}"' for choice in option.choices)
    today = f'"{option.value}"' if option.value in option.choices else None
    return f'{{ type = "categorical", choices = [{named}] }}', "what its help lists", today


def _real(text: str) -> str:
    """A number as TOML's floats are written: a point or an exponent with digits on both sides."""
    value = float(text)
    return repr(value) if math.isfinite(value) else "0.0"


_KNOBS = (
    _Knob("LR", r"(?:base_|max_|peak_|init_|initial_)?(?:lr|learning_?rate)", _rate),
    _Knob("LORA_RANK", r"(?:lora_)?(?:r|rank|dim)", _powers((8, 16, 32))),
    _Knob(
        "BATCH_SIZE",
        r"(?:per_device_|per_gpu_|global_|micro_|mini_)?(?:train_)?(?:batch_?size|bs|batch|minibatch)",
        _powers((8, 16, 32)),
    ),
    _Knob("WARMUP_STEPS", r"(?:num_|lr_|learning_rate_)?warm_?up_(?:steps|iters|iterations|updates)|warm_?up", _warmup,
          scheduled=True),
    _Knob("WARMUP_RATIO", r"(?:lr_)?warm_?up_(?:ratio|fraction|frac|share|pct)", _warmup_share),
    _Knob("LORA_ALPHA", r"lora_alpha", _powers((16, 32, 64)), searched=False),
    _Knob("DROPOUT", r"(?:lora_|hidden_|attention_)?drop_?out(?:_p|_rate|_prob)?", _dropout, searched=False),
    _Knob("WEIGHT_DECAY", r"weight_?decay|wd", _decay, searched=False),
    _Knob("ACCUMULATION", r"(?:gradient_|grad_)?accum(?:ulation|ulate)?_(?:steps|iter|batches)", _powers((1, 2, 4)),
          searched=False),
    _Knob("BETA2", r"(?:adam_)?beta_?2", _beta, searched=False),
    _Knob("SCHEDULE", r"(?:lr_)?schedule(?:r)?(?:_type|_name)?", _listed, searched=False),
)  # fmt: skip

_STEPS = re.compile(r"(?:n|num|max|total|lr_decay)_(?:train_|training_)?(?:steps|iters|iterations|updates)"
                    r"|train(?:ing)?_(?:steps|iters|iterations|updates)|steps|iters|iterations")  # fmt: skip

SEED = re.compile(r"(?:random_|manual_|train_|data_)?seed")
OUTPUT = re.compile(r"(?:output|out|save|log|logging|logger|checkpoint|tb|tensorboard|run|results?|default_root)_?"
                    r"(?:dir|path|folder|directory)|logdir|outdir|savedir|workdir|output")  # fmt: skip
"""Names of options that take a folder of the trial's own."""
