"""Whether a configuration may enter the closed division: the compliance checker decides on the log it would print."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_tune.mlperf.benchmark import Benchmark
from lora_tune.mlperf.header import log_lines
from lora_tune.mlperf.knobs import announced, keys_of
from lora_tune.mlperf.log_check import findings, parse


@dataclass(frozen=True, slots=True)
class Violation:
    """One breach of the closed division. fatal: the study is refused; otherwise it is a warning.

    sentence: what came, what is allowed and what to do, with where the rule stands.
    """

    name: str
    sentence: str
    fatal: bool = True


def check_header(benchmark: Benchmark, said: Mapping[str, object]) -> list[tuple[str, str]]:
    """What the compliance checker says against a log with these values by MLLOG key, each with the key it is about."""
    return findings(parse(log_lines(benchmark, said), benchmark.ruleset), benchmark.ruleset)


def check_values(benchmark: Benchmark, values: Mapping[str, object]) -> list[Violation]:
    """What a configuration breaks of the closed division, by the checker and by the rules' text; empty when nothing.

    values: the trial's variables by name, GBS among them where it is known.
    """
    said = announced(benchmark.name, values)
    names = {keys_of(benchmark.name).get(name.upper(), ""): name for name in values}
    by_text = benchmark.by_text(said)
    broken = [key for key, _ in check_header(benchmark, said)]
    broken += [key for key, wanted in by_text.items() if key in said and not _equal(said[key], wanted)]
    demanded = benchmark.demanded(said)
    return [
        _violation(benchmark, names.get(key, key), said.get(key), said.get("global_batch_size"), demanded.get(key), key)
        for key in dict.fromkeys(broken)
    ]


def check_range(
    benchmark: Benchmark, tuned: Mapping[str, Sequence[object]], points: Sequence[Mapping[str, object]]
) -> list[Violation]:
    """What a search space breaks: each point as it is, and with each tuned variable at each of its ends.

    tuned: variable -> its ends, or its choices. points: resolved values, GBS among them, one for each layout; those
    that differ in nothing that a log announces count once.
    """
    found: dict[str, Violation] = {}
    seen: set[tuple[tuple[str, str], ...]] = set()
    keys = keys_of(benchmark.name)
    for point in points:
        said = tuple(sorted((key, repr(value)) for key, value in announced(benchmark.name, point).items()))
        if said in seen:
            continue
        seen.add(said)
        for violation in check_values(benchmark, point):
            found.setdefault(violation.name, violation)
        for name, ends in tuned.items():
            if name in found or name.upper() not in keys:
                continue
            for end in ends:
                about = [v for v in check_values(benchmark, {**point, name: end}) if v.name == name]
                found.update((v.name, _tuned(v)) for v in about[:1] if name not in found)
    return list(found.values())


def _tuned(violation: Violation) -> Violation:
    return Violation(violation.name, f"{violation.name} is tuned, and at one of its ends: {violation.sentence}")


def _violation(benchmark: Benchmark, name: str, came: object, batch: object, wanted: object, key: str) -> Violation:
    at = f" at GBS {batch}" if batch is not None and key != "global_batch_size" else ""
    source = benchmark.text.sources.get(key)
    rule = f"training rules, {source}" if source else f"closed_{benchmark.name}.yaml of mlperf_logging"
    must = f"{key} must be {wanted}" if wanted is not None else f"{key} may not be that"
    return Violation(
        name,
        f"{name} = {came}{at}: in the closed division of {benchmark.name} {must} ({rule}, ruleset "
        f"{benchmark.ruleset}); remove the line, or use the open division",
    )


def _equal(value: object, wanted: object) -> bool:
    if isinstance(value, int | float) and isinstance(wanted, int | float):
        return math.isclose(value, wanted, rel_tol=1e-6)
    return value == wanted
