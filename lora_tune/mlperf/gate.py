"""Checks a configuration against the closed division, by running the compliance checker on the log it would print."""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.log_check import findings, parse
from lora_tune.mlperf.rules import reaching, read_rules
from lora_tune.mlperf.rulesets import benchmarks_of

# The synthetic log of a trial: a header with the announced values, and one run that succeeds. Keys that are not
# announced get the value that the rules demand or accept, so every complaint is about an announced value.


CLOSED: Mapping[str, object] = {
    "submission_org": "lora_tune",
    "submission_platform": "proposal",
    "submission_division": "closed",
    "submission_status": "onprem",
    "cache_clear": True,
    "seed": 1,
}
"""Header values other than hyperparameters, the same for every benchmark."""

READ_BY_OTHERS = ("global_batch_size", "opt_learning_rate_warmup_steps")
"""Keys that the rules of other keys read, in the order in which a log must have them."""

_EVENTS = frozenset({
    "init_start", "init_stop", "run_start", "run_stop", "block_start", "block_stop", "epoch_start", "epoch_stop",
    "eval_start", "eval_stop", "eval_accuracy", "aggregated_eval_accuracy",
})  # fmt: skip


def header(benchmark: Benchmark, announced: Mapping[str, object]) -> dict[str, object]:
    """Every key of a compliant header, in the order of the rules.

    announced: values by MLLOG key, ``global_batch_size`` among them; the header holds them unchanged.
    """
    logged = {**CLOSED, "submission_benchmark": benchmark.name, **announced}
    for part in (benchmark.rules, read_rules(benchmark.ruleset, "common")):
        accepted = part.accepted({**benchmark.by_text(logged), **logged})
        logged |= {key: value for key, value in accepted.items() if key not in logged and key not in _EVENTS}
    # The rule of a key may read state that another key set, and rules run in the order of the log.
    first = {key: logged[key] for key in READ_BY_OTHERS if key in logged}
    return first | logged


def log_lines(
    benchmark: Benchmark, announced: Mapping[str, object], readings: Mapping[str, float] | None = None
) -> list[str]:
    """``:::MLLOG`` lines of a whole run with that header, which reaches the target at its first evals.

    readings: eval results by metric name, in place of ones that reach the target.
    """
    lines = [_line(0, "init_start")]
    lines += [_line(1, key, value) for key, value in header(benchmark, announced).items()]
    lines += [_line(2, "init_stop"), _line(3, "run_start")]
    lines += list(_evals(benchmark, announced.get("global_batch_size"), readings or {}))
    return [*lines, _line(9, "run_stop", status="success")]


def _evals(benchmark: Benchmark, batch: object, readings: Mapping[str, float]) -> Iterator[str]:
    """The first two blocks and evals of a run, at the rules' eval schedule."""
    whole = batch if isinstance(batch, int) and batch >= 1 else 1
    schedule = benchmark.eval_schedule(whole)
    first, interval = (schedule.first_samples, schedule.interval_samples) if schedule else (whole, whole)
    for samples in (first, first + interval):
        at: dict[str, object] = {benchmark.progress: int(samples) if float(samples).is_integer() else samples}
        block = {"samples_count": 0} if benchmark.progress == "samples_count" else {"first_epoch_num": 0}
        yield _line(4, "block_start", **block, **({} if "samples_count" in block else {"epoch_count": 1}))
        yield _line(5, "block_stop", **at, **({} if "samples_count" in block else block))
        yield _line(6, "eval_start", **at)
        for metric in benchmark.metrics:
            named = {"metric": metric.name} if metric.name else {}
            yield _line(7, "eval_accuracy", readings.get(metric.name, reaching(metric)), **at, **named)
        yield _line(8, "eval_stop", **at)


def _line(seconds: float, key: str, value: object = None, **metadata: object) -> str:
    kind = "INTERVAL_START" if key.endswith("start") else "INTERVAL_END" if key.endswith("stop") else "POINT_IN_TIME"
    record = {"namespace": "", "time_ms": 1_000 * seconds, "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**record, "metadata": {"file": "header", "lineno": 1, **metadata}})


# ``knobs.csv``: the MLLOG key that each variable of the public implementations sets, with a source for each row.


INTERVAL_NAMES = ("VAL_CHECK_INTERVAL", "PRIMUS_EVAL_INTERVAL", "EVAL_INTERVAL", "EVAL_EVERY", "EVAL_STEPS")
"""Variables that set the eval interval, in samples or in steps."""

INTERVAL_IN_STEPS = frozenset({"llama31_405b", "llama31_8b", "gpt_oss_20b", "deepseekv3_671b"})
"""Benchmarks whose public implementations count VAL_CHECK_INTERVAL in optimizer steps; others count samples.

Source: conf/custom.yaml of NVIDIA's llama31_405b and llama31_8b (v5.0 to v6.0), conf/gpt_oss.yaml (v6.0)."""

SKIP_NAMES = ("SKIP_EVALS", "SKIP_EVAL")
"""Variables that set how many evals are skipped at the start."""


@cache
def keys_of(benchmark: str) -> Mapping[str, str]:
    """Variable (upper case) -> MLLOG key for a benchmark; its own rows override those for all benchmarks."""
    text = (files("lora_tune.mlperf") / "knobs.csv").read_text(encoding="utf-8")
    rows = list(csv.DictReader(text.splitlines()))
    common = {row["variable"]: row["key"] for row in rows if row["benchmark"] == "*"}
    return common | {row["variable"]: row["key"] for row in rows if row["benchmark"] == benchmark}


def batch_names(benchmark: str) -> tuple[str, ...]:
    """Variables other than GBS that set the global batch size in implementations of a benchmark."""
    return tuple(name for name, key in keys_of(benchmark).items() if key == "global_batch_size" and name != "GBS")


def announced(benchmark: str, values: Mapping[str, object]) -> dict[str, object]:
    """Values that a trial with these variables would log, by MLLOG key; variables without a key are left out.

    Numbers in text become numbers, as the implementations read them.
    """
    keys = keys_of(benchmark)
    stated = {keys[name.upper()]: value for name, value in values.items() if name.upper() in keys}
    return {key: as_value(value) if isinstance(value, str) else value for key, value in stated.items()}


def as_value(text: str) -> str | int | float:
    """A variable's text as an int, else a float, else the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of the closed division. fatal: the study is refused; otherwise it is a warning.

    sentence: the value, what is allowed, what to do, and the source of the rule.
    """

    name: str
    sentence: str
    fatal: bool = True


def check_header(benchmark: Benchmark, values: Mapping[str, object]) -> list[tuple[str, str]]:
    """The compliance checker's complaints (key, message) about a log with these values by MLLOG key.

    Empty for a benchmark of another package, for which the checker has no rules.
    """
    if not _has_checker(benchmark):
        return []
    return findings(parse(log_lines(benchmark, values), benchmark.ruleset), benchmark.ruleset)


def check_values(benchmark: Benchmark, values: Mapping[str, object]) -> list[Violation]:
    """Violations of the closed division by one configuration, by the checker and the rules' text.

    A benchmark of another package is judged by its own rules alone. values: the trial's variables by name, with GBS
    where it is known.
    """
    logged = announced(benchmark.name, values)
    names = {keys_of(benchmark.name).get(name.upper(), ""): name for name in values}
    demanded, broken = benchmark.demanded(logged), _broken(benchmark, logged)
    stated = [key for key in broken if key in logged]  # other keys are set by the implementation, not by the study
    batch = logged.get("global_batch_size")
    if batch is None:  # what depends on the batch size is broken only if every reference batch size breaks it
        beside = [_broken(benchmark, {**logged, "global_batch_size": size}) for size in benchmark.batch_sizes]
        stated = [key for key in stated if all(key in there for there in beside)]
    elif broken and not stated:
        return [_of_batch(benchmark, names["global_batch_size"], batch, broken[0])]
    return [
        _violation(
            benchmark, names.get(key, key), logged.get(key), logged.get("global_batch_size"), demanded.get(key), key
        )
        for key in dict.fromkeys(stated)
    ]


def _broken(benchmark: Benchmark, logged: Mapping[str, object]) -> list[str]:
    """Keys of a log with these values that break a rule: stated keys and keys derived by the rules."""
    compared = benchmark.by_text(logged) if _has_checker(benchmark) else benchmark.demanded(logged)
    broken = [key for key, _ in check_header(benchmark, logged)]
    return broken + [key for key, wanted in compared.items() if key in logged and not _equal(logged[key], wanted)]


def _of_batch(benchmark: Benchmark, name: str, batch: object, key: str) -> Violation:
    return Violation(
        name,
        f"{name} = {batch}: in the closed division of {benchmark.name} no log with that batch size is accepted, for "
        f"its {key} (ruleset {benchmark.ruleset}); take another batch size, or use the open division",
    )


def _has_checker(benchmark: Benchmark) -> bool:
    return benchmark.name in benchmarks_of(benchmark.ruleset)


def check_range(
    benchmark: Benchmark,
    tuned: Mapping[str, Sequence[object]],
    points: Sequence[Mapping[str, object]],
    following: Collection[str] = (),
    at_ends: Sequence[Mapping[str, object]] = (),
) -> list[Violation]:
    """Violations of a search space, tried at each point and with each tuned variable at each of its ends.

    tuned: variable -> its ends, or its choices. points: resolved values with GBS, one for each layout. Points with the
    same logged values are tried once; the ends of a variable are tried once for each set of values its rule can read.

    following: variables that a formula of the study derives from tuned ones. at_ends: resolved values with each tuned
    variable at its ends; following variables are checked only at ``points`` and these.
    """
    violations: dict[str, Violation] = {}
    keys = keys_of(benchmark.name)
    bare = [{n: value for n, value in point.items() if n not in tuned and n not in following} for point in points]
    for point in _distinct(bare, lambda point: announced(benchmark.name, point)):
        for violation in check_values(benchmark, point):
            violations.setdefault(violation.name, violation)
    for point in _distinct([*points, *at_ends] if following else [], lambda point: announced(benchmark.name, point)):
        for violation in check_values(benchmark, point):
            if violation.name in following:
                violations.setdefault(violation.name, violation)
    read = benchmark.read_by_others

    def of_rule(point: Mapping[str, object]) -> dict[str, object]:
        """The values of a point that a variable's rule can read."""
        return {n: v for n, v in announced(benchmark.name, point).items() if n in read} | dict.fromkeys(point)

    for name, ends in tuned.items():
        if name.upper() not in keys or name in violations:
            continue
        for point in _distinct(bare, of_rule):
            tried = (v for end in ends for v in check_values(benchmark, {**point, name: end}) if v.name == name)
            if refused := next(tried, None):
                sentence = f"{name} is tuned, and at one of its ends: {refused.sentence}"
                violations[name] = Violation(name, sentence)
                break
    return list(violations.values())


def _distinct(
    points: Sequence[Mapping[str, object]], seen_as: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The first of each set of points for which ``seen_as`` returns the same values."""
    kinds: dict[tuple[tuple[str, str], ...], Mapping[str, object]] = {}
    for point in points:
        kinds.setdefault(tuple(sorted((key, repr(value)) for key, value in seen_as(point).items())), point)
    return list(kinds.values())


def check_space(
    benchmark: Benchmark,
    tuned: Mapping[str, Sequence[object]],
    points: Sequence[Mapping[str, object]],
    following: Collection[str] = (),
    at_ends: Sequence[Mapping[str, object]] = (),
) -> list[Violation]:
    """All violations of a search space: values and eval schedule; as warnings, batch sizes that cannot win or have no
    reference, and runs too short for any submission to converge. Other arguments as for :func:`check_range`.
    """
    batches = sorted({batch for point in points if isinstance(batch := point.get("GBS"), int)})
    violations = check_range(benchmark, tuned, points, following, at_ends)
    short = [] if "MAX_STEPS" in tuned else _short_runs(benchmark, points)
    warned = [*_unreferenced(benchmark, batches, points), *short]
    return [*violations, *_schedule_violations(benchmark, tuned, points), *warned]


def _schedule_violations(
    benchmark: Benchmark, tuned: Mapping[str, object], points: Sequence[Mapping[str, object]]
) -> list[Violation]:
    """Violations by eval intervals or skips (under any variable name) that differ from the schedule for the batch."""
    violations: dict[str, Violation] = {}
    for point in points:
        batch = point.get("GBS")
        schedule = benchmark.eval_schedule(batch) if isinstance(batch, int) else None
        for name in point if schedule else ():
            if name in tuned:
                if name.upper() in INTERVAL_NAMES + SKIP_NAMES:
                    sentence = f"{name} is tuned, but the eval schedule follows from GBS: {_grid(benchmark, batch)}"
                    violations[name] = Violation(name, f"{sentence}; remove it, or use the open division")
            elif schedule and (need := _needed(name, point[name], schedule, batch)):
                sentence = f"{name} = {point[name]}, but it must be {need} at GBS {batch}: {_grid(benchmark, batch)}"
                violations.setdefault(name, Violation(name, f"{sentence}; correct it"))
    return list(violations.values())


def _needed(name: str, value: object, schedule: Schedule, batch: object) -> str:
    """The value that an eval-schedule variable must have; "" if it has it, or is no such variable.

    Implementations count an interval in samples or in steps, and some round a shorter one up to whole steps.
    """
    interval, upper = schedule.interval_samples, name.upper()
    if not isinstance(value, int | float) or not isinstance(batch, int):
        return ""
    if upper in INTERVAL_NAMES and not (math.ceil(value / batch) * batch == interval or value * batch == interval):
        return f"{interval:g} samples"
    skipped = round(schedule.first_samples / interval) - 1
    return str(skipped) if upper in SKIP_NAMES and value != skipped else ""


def _grid(benchmark: Benchmark, batch: object) -> str:
    schedule = benchmark.eval_schedule(batch) if isinstance(batch, int) else None
    assert schedule is not None
    source = benchmark.text.sources.get("evals", "mlperf_logging")
    return (
        f"at GBS {batch} the first eval is at {schedule.first_samples:g}, then one every {schedule.interval_samples:g} "
        f"({benchmark.name}, {source}, ruleset {benchmark.ruleset})"
    )


def _unreferenced(
    benchmark: Benchmark, batches: Sequence[int], points: Sequence[Mapping[str, object]]
) -> list[Violation]:
    """Warnings for batch sizes without a reference convergence point on either side."""
    warned = _below(benchmark, batches, points)
    largest = max(benchmark.batch_sizes, default=0)
    above = [batch for batch in batches if batch > largest]
    if not largest or not above:
        return warned
    listed = ", ".join(map(str, above))
    sentence = (
        f"GBS {listed} is above {largest}, the largest batch size with a reference convergence point: such a "
        f"submission fails the RCP check until a reference is submitted for it; keep GBS <= {largest}"
    )
    return [*warned, Violation("GBS", sentence, fatal=False)]


def _below(benchmark: Benchmark, batches: Sequence[int], points: Sequence[Mapping[str, object]]) -> list[Violation]:
    """A warning for batch sizes below the smallest reference, which cannot win.

    A single batch size gets the number of steps before the first eval, and the MINIBS to raise if it follows from it.
    """
    smallest = min(benchmark.batch_sizes, default=0)
    below = [batch for batch in batches if batch < smallest]
    against = benchmark.reference(smallest) if below else None
    if against is None:
        return []
    schedule = benchmark.eval_schedule(below[0]) if len(below) == 1 and benchmark.progress == "samples_count" else None
    steps = schedule and f" (its first eval comes after {math.ceil(schedule.first_samples / below[0])} steps)"
    sentence = (
        f"GBS {', '.join(map(str, below))} cannot win: it is below {smallest}, the smallest batch size with a "
        f"reference convergence point, and is scored as if it converged no sooner than that ({against.mean:.6g}), in "
        f"more and smaller steps{steps or ''}; {_raised(below, points, smallest)}"
    )
    return [Violation("GBS", sentence, fatal=False)]


def _raised(below: Sequence[int], points: Sequence[Mapping[str, object]], smallest: int) -> str:
    """Advice that raises the batch to ``smallest``: by MINIBS where a single MINIBS gives a single batch."""
    known = {point.get("MINIBS") for point in points if point.get("GBS") in below}
    minibs = known.pop() if len(known) == len(below) == 1 else None
    if not isinstance(minibs, int) or minibs < 1 or below[0] % minibs:
        return f"keep GBS >= {smallest}"
    ranks = below[0] // minibs
    enough = math.ceil(smallest / ranks)
    return f"raise MINIBS from {minibs} to {enough}, which makes GBS {enough * ranks}"


def _short_runs(benchmark: Benchmark, points: Sequence[Mapping[str, object]]) -> list[Violation]:
    """A warning for training that ends before the fewest samples in which a submission may converge.

    The message says so if training even ends before the first eval: it then fails whatever the learning rate.
    """
    for point in points if benchmark.progress == "samples_count" else ():
        batch, steps = point.get("GBS"), point.get("MAX_STEPS")
        if not isinstance(batch, int) or not isinstance(steps, int) or steps < 1:  # -1: no limit in NeMo
            continue
        against = benchmark.reference(batch)
        if against is not None and steps * batch < against.fastest:
            schedule, remedy = benchmark.eval_schedule(batch), "raise MAX_STEPS or GBS"
            if schedule is not None and steps * batch < schedule.first_samples:
                remedy = (
                    f"the first eval is at {schedule.first_samples:g}, so none is made, or val_check_interval aborts "
                    "the run; raise MINIBS, which raises GBS, or MAX_STEPS"
                )
            sentence = (
                f"MAX_STEPS = {steps} at GBS {batch} ends training after {steps * batch} samples, and no submission "
                f"converges before {against.fastest:.6g}; {remedy}"
            )
            return [Violation("MAX_STEPS", sentence, fatal=False)]
    return []


def _violation(benchmark: Benchmark, name: str, came: object, batch: object, demanded: object, key: str) -> Violation:
    at = f" at GBS {batch}" if batch is not None and key != "global_batch_size" else ""
    source = benchmark.text.sources.get(key)
    rules = f"closed_{benchmark.name}.yaml of mlperf_logging" if _has_checker(benchmark) else "its own rules"
    rule = f"training rules, {source}" if source else rules
    must = f"{key} must be {demanded}" if demanded is not None else f"{key} may not be that"
    return Violation(
        name,
        f"{name} = {came}{at}: in the closed division of {benchmark.name} {must} ({rule}, ruleset "
        f"{benchmark.ruleset}); correct it, or use the open division",
    )


def _equal(value: object, demanded: object) -> bool:
    if isinstance(value, int | float) and isinstance(demanded, int | float):
        return math.isclose(value, demanded, rel_tol=1e-6)
    return value == demanded


# Disclosures that a log must hold from ruleset 6.1 on, derived from the trial's variables: the lowest numerical
# precision in linear layers, attention and communication, the parallelism, the micro batch size, and the name of the
# config file. Source: Training rules, "Run results", and common.yaml of mlperf_logging's 6.1.0.


LINEAR = "lowest_numerical_precision_in_linear"
ATTENTION = "lowest_numerical_precision_in_attn"
COMMUNICATION = "lowest_numerical_precision_in_comm"
PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")

VARIABLES: Mapping[str, tuple[str, ...]] = {
    LINEAR: (
        "MLPERF_LINEAR_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_LINEAR",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_LINEAR",
    ),
    ATTENTION: (
        "MLPERF_ATTN_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_ATTN",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_ATTN",
    ),
    COMMUNICATION: (
        "MLPERF_COMM_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_COMM",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_COMM",
    ),
    "tensor_parallelism": ("MLLOG_TENSOR_PARALLELISM",),
    "pipeline_parallelism": ("MLLOG_PIPELINE_PARALLELISM",),
    "context_parallelism": ("MLLOG_CONTEXT_PARALLELISM",),
    "expert_parallelism": ("MLLOG_EXPERT_PARALLELISM",),
    "micro_batch_size": ("MLLOG_MICRO_BATCH_SIZE",),
    "config_filename": ("MLLOG_CONFIG_FILENAME", "CONFIG_FILENAME"),
}
"""MLLOG key -> the variables from which implementations print it: NVIDIA's (MLPERF_...) and AMD's (MLLOG_...)."""

WIDE = "bfloat16"
"""Precision where no variable selects a lower one: the public implementations train in it."""


def disclosures(
    benchmark: str, values: Mapping[str, object], config_filename: str, wide: str = WIDE
) -> dict[str, object]:
    """The disclosures of a trial's log, by MLLOG key.

    values: every variable of the trial, tuned or from its base config. config_filename: of the submission's config.
    wide: the precision where no variable selects a lower one.
    """
    logged = announced(benchmark, values)
    return {
        **precisions(values, wide),
        **{key: _degree(logged.get(key)) for key in PARALLELISM},
        "micro_batch_size": _degree(logged.get("micro_batch_size")),
        "config_filename": config_filename,
    }


def precisions(values: Mapping[str, object], wide: str = WIDE) -> dict[str, str]:
    """The lowest precision in linear layers, attention and communication, from NVIDIA's and AMD's variables.

    A healing step, which raises the precision late, does not count, as the rules ask for the lowest one. Attention runs
    in FP8 if FP8_DPA is on, and never lower. Communication is below bfloat16 if parameters are gathered in the low
    precision, or if dlrmv4's sparse all-to-all is set so.
    """
    recipe = "mxfp4" if str(values.get("FP4_RECIPE", "")).lower() == "mxfp4" else "nvfp4"
    four = recipe if _on(values, "FP4") else None
    eight = "fp8" if _on(values, "FP8") else None
    gathered = (four or "nvfp4") if _on(values, "FP4_PARAM_GATHER") else None
    gathered = gathered or ("fp8" if _on(values, "FP8_PARAM_GATHER") and (four or eight) else None)
    sparse = {str(values[name]) for name in ("SPARSE_A2A_FWD", "SPARSE_A2A_BWD") if name in values}
    return {
        LINEAR: four or eight or wide,
        ATTENTION: "fp8" if _on(values, "FP8_DPA") and (four or eight) else wide,
        COMMUNICATION: gathered or ("fp16" if "fp16" in sparse else "fp32" if sparse == {"fp32"} else wide),
    }


def disclosure_exports(
    benchmark: str, values: Mapping[str, object], config_filename: str, reads: Collection[str]
) -> dict[str, object]:
    """Disclosures as the variables that an implementation reads; empty if it reads none of them.

    reads: names of the variables that its files read. A value that a script sets is replaced, because it was written
    for another configuration.
    """
    disclosed = disclosures(benchmark, values, config_filename)
    return {name: disclosed[key] for key, names in VARIABLES.items() for name in names if name in reads}


def _on(values: Mapping[str, object], name: str) -> bool:
    return str(values.get(name, "")).lower() in ("1", "true", "yes", "on")


def _degree(value: object) -> int:
    """A degree of parallelism or a micro batch size; 1 if unset."""
    return int(value) if isinstance(value, int | float) and value >= 1 else 1


# The numerical precision of a trial, read from the settings of its program or from its log.
#
# NVIDIA's implementations from v5.1 on train in FP4 when ``FP4`` is on and switch to a higher precision ("healing")
# at step ``HEALING_ITER``; 0 means never. ``HEALING_ITER`` has no effect on a run that is not in FP4.


FP4, FP8, BF16 = "fp4", "fp8", "bf16"

_HEALING = re.compile(r"(.*_)?healing_(iter|step)s?")
_STATED = re.compile(r"(.*_)?(linear_precision|precision_(in_)?linear|fp4_recipe|precision)")
_SWITCHES = {"fp4": FP4, "nvfp4": FP4, "mxfp4": FP4, "fp8": FP8, "mxfp8": FP8, "bf16": BF16}
_OFF = ("", "0", "0.0", "false", "none", "null", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The precision of a run's linear layers.

    lowest: "fp4", "fp8", "bf16", or "" if unknown. healing_steps: optimizer step at which an FP4 run switches to a
    higher precision; 0: never, or unknown.
    """

    lowest: str = ""
    healing_steps: int = 0

    def __or__(self, other: Precision) -> Precision:
        """This precision, or ``other`` if this one is unknown."""
        return self if self.lowest or self.healing_steps else other


def precision_of(settings: Mapping[str, object]) -> Precision:
    """The precision in ``settings``: environment variables, parameters or logged values; names in any case.

    A switch (``FP4``, ``FP8``, ...) takes precedence over a name with a precision as its value
    (``MLPERF_LINEAR_PRECISION``, ``lowest_numerical_precision_in_linear``). A healing step is ignored if the settings
    state a precision other than FP4.
    """
    named = {name.strip().lower(): _text(value) for name, value in settings.items()}
    on = {_SWITCHES[name] for name, value in named.items() if name in _SWITCHES and value not in _OFF}
    off = {_SWITCHES[name] for name, value in named.items() if name in _SWITCHES and value in _OFF}
    stated = {kind for name, value in named.items() if _STATED.fullmatch(name) for kind in _kinds(value)}
    kinds = on or (stated - off)
    lowest = next((kind for kind in (FP4, FP8, BF16) if kind in kinds), "")
    steps = max((_steps(value) for name, value in named.items() if _HEALING.fullmatch(name)), default=0)
    denied = lowest not in ("", FP4) or FP4 in off - on
    return Precision(lowest=lowest, healing_steps=0 if denied else steps)


def _text(value: object) -> str:
    return str(value).strip().strip("'\"").lower()


def _kinds(value: str) -> list[str]:
    return [kind for kind in (FP4, FP8, BF16) if kind in value]


def _steps(value: str) -> int:
    try:
        steps = float(value)
    except ValueError:
        return 0
    return int(steps) if 0 < steps < 1e12 else 0
