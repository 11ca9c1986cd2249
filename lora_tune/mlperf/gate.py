"""Whether a configuration may enter the closed division: the compliance checker decides on the log it would print."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.header import log_lines
from lora_tune.mlperf.knobs import INTERVAL_NAMES, SKIP_NAMES, announced, keys_of
from lora_tune.mlperf.log_check import findings, parse
from lora_tune.mlperf.rulesets import benchmarks_of


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of the closed division. fatal: the study is refused; otherwise it is a warning.

    sentence: what came, what is allowed and what to do, with where the rule stands.
    """

    name: str
    sentence: str
    fatal: bool = True


def check_header(benchmark: Benchmark, values: Mapping[str, object]) -> list[tuple[str, str]]:
    """What the compliance checker says against a log with these values by MLLOG key, each with the key it is about.

    Nothing of a benchmark of another package: the checker has no rules for it.
    """
    if not _has_checker(benchmark):
        return []
    return findings(parse(log_lines(benchmark, values), benchmark.ruleset), benchmark.ruleset)


def check_values(benchmark: Benchmark, values: Mapping[str, object]) -> list[Violation]:
    """What a configuration breaks of the closed division, by the checker and by the rules' text; empty when nothing.

    A benchmark of another package is judged by its own rules alone. values: the trial's variables by name, GBS among
    them where it is known.
    """
    logged = announced(benchmark.name, values)
    names = {keys_of(benchmark.name).get(name.upper(), ""): name for name in values}
    demanded, broken = benchmark.demanded(logged), _broken(benchmark, logged)
    stated = [key for key in broken if key in logged]  # what nobody states is the implementation's, no line of a study
    batch = logged.get("global_batch_size")
    if batch is None:  # what a batch decides is broken where every reference batch says so
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
    """The keys of a log with these values that break a rule, stated ones and those that the rules derive."""
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
    """What a search space breaks: each point as it is, and with each tuned variable at each of its ends.

    tuned: variable -> its ends, or its choices. points: resolved values, GBS among them, one for each layout; those
    that differ in nothing that a log announces count once, and the ends of a variable are tried at one of those that
    differ in nothing that its rule can read.

    following: variables that change with tuned ones by a formula of the study. at_ends: resolved values with each tuned
    variable at its ends: beside them the following ones are judged, and nowhere else.
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
    for name, ends in tuned.items():
        if name.upper() not in keys or name in violations:
            continue
        for point in _distinct(bare, lambda p: _of_names(read, announced(benchmark.name, p)) | dict.fromkeys(p)):
            tried = (v for end in ends for v in check_values(benchmark, {**point, name: end}) if v.name == name)
            if refused := next(tried, None):
                violations[name] = _tuned(refused)
                break
    return list(violations.values())


def _distinct(
    points: Sequence[Mapping[str, object]], seen_as: Callable[[Mapping[str, object]], Mapping[str, object]]
) -> list[Mapping[str, object]]:
    """The first of the points of each kind; those that are seen as the same values are of one kind."""
    kinds: dict[tuple[tuple[str, str], ...], Mapping[str, object]] = {}
    for point in points:
        kinds.setdefault(tuple(sorted((key, repr(value)) for key, value in seen_as(point).items())), point)
    return list(kinds.values())


def _of_names(names: Collection[str], values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if name in names}


def check_space(
    benchmark: Benchmark,
    tuned: Mapping[str, Sequence[object]],
    points: Sequence[Mapping[str, object]],
    following: Collection[str] = (),
    at_ends: Sequence[Mapping[str, object]] = (),
) -> list[Violation]:
    """All that a search space breaks of the closed division: values, the eval schedule. Batch sizes that cannot win or
    have no reference, and runs that end before any submission has converged, are warned of.

    All other arguments: as for :func:`check_range`.
    """
    batches = sorted({batch for point in points if isinstance(batch := point.get("GBS"), int)})
    violations = check_range(benchmark, tuned, points, following, at_ends)
    warned = [*_unreferenced(benchmark, batches), *([] if "MAX_STEPS" in tuned else _short_runs(benchmark, points))]
    return [*violations, *_schedule_violations(benchmark, tuned, points), *warned]


def _schedule_violations(
    benchmark: Benchmark, tuned: Mapping[str, object], points: Sequence[Mapping[str, object]]
) -> list[Violation]:
    """Eval schedules other than the one that follows from the batch size, under any of the names for it."""
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
                violations.setdefault(name, Violation(name, f"{sentence}; remove the line"))
    return list(violations.values())


def _needed(name: str, value: object, schedule: Schedule, batch: object) -> str:
    """What a variable of the eval schedule must be; "" where it is that, or is no such variable.

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


def _unreferenced(benchmark: Benchmark, batches: Sequence[int]) -> list[Violation]:
    """Warnings for batch sizes without a reference convergence point on either side."""
    warned = _below(benchmark, batches)
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


def _below(benchmark: Benchmark, batches: Sequence[int]) -> list[Violation]:
    """A warning for batch sizes below the smallest reference: they cannot win."""
    smallest = min(benchmark.batch_sizes, default=0)
    below = [batch for batch in batches if batch < smallest]
    against = benchmark.reference(smallest) if below else None
    if against is None:
        return []
    sentence = (
        f"GBS {', '.join(map(str, below))} cannot win: it is below {smallest}, the smallest batch size with a "
        f"reference convergence point, and is scored as if it converged no sooner than that ({against.mean:.6g}), in "
        f"more and smaller steps; keep GBS >= {smallest}"
    )
    return [Violation("GBS", sentence, fatal=False)]


def _short_runs(benchmark: Benchmark, points: Sequence[Mapping[str, object]]) -> list[Violation]:
    """A warning for training that ends before the fewest samples in which a submission may converge.

    One that ends before its first eval is told so: it fails for that, whatever its learning rate.
    """
    for point in points if benchmark.progress == "samples_count" else ():
        batch, steps = point.get("GBS"), point.get("MAX_STEPS")
        if not isinstance(batch, int) or not isinstance(steps, int):
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


def _tuned(violation: Violation) -> Violation:
    return Violation(violation.name, f"{violation.name} is tuned, and at one of its ends: {violation.sentence}")


def _violation(benchmark: Benchmark, name: str, came: object, batch: object, demanded: object, key: str) -> Violation:
    at = f" at GBS {batch}" if batch is not None and key != "global_batch_size" else ""
    source = benchmark.text.sources.get(key)
    rules = f"closed_{benchmark.name}.yaml of mlperf_logging" if _has_checker(benchmark) else "its own rules"
    rule = f"training rules, {source}" if source else rules
    must = f"{key} must be {demanded}" if demanded is not None else f"{key} may not be that"
    return Violation(
        name,
        f"{name} = {came}{at}: in the closed division of {benchmark.name} {must} ({rule}, ruleset "
        f"{benchmark.ruleset}); remove the line, or use the open division",
    )


def _equal(value: object, demanded: object) -> bool:
    if isinstance(value, int | float) and isinstance(demanded, int | float):
        return math.isclose(value, demanded, rel_tol=1e-6)
    return value == demanded
