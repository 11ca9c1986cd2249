"""The closed division's rules of one benchmark as the package's YAML states them: what each MLLOG key must be.

The YAML holds Python expressions; ``rule_state`` reads and evaluates them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from lora_tune.base.errors import InputError
from lora_tune.mlperf.rule_state import Direction, RuleState, bounds
from lora_tune.mlperf.rulesets import rules_file


@dataclass(frozen=True, slots=True)
class Metric:
    """A quality metric. name: what several metrics of one benchmark are told apart by, "" where there is one."""

    name: str
    target: float
    direction: Direction
    strict: bool = False

    def reached(self, value: float) -> bool:
        """Whether a reading meets the target; NaN never does."""
        if self.direction == "minimize":
            return value < self.target if self.strict else value <= self.target
        return value > self.target if self.strict else value >= self.target


def reaching(metric: Metric) -> float:
    """The reading nearest to the target that meets it."""
    if not metric.strict:
        return metric.target
    return math.nextafter(metric.target, -math.inf if metric.direction == "minimize" else math.inf)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """What the rules say of one MLLOG key.

    tests: expressions that hold for each of its records. first_test: for the first one. target_test: for at least one.
    after: code that runs behind each.
    """

    key: str
    tests: tuple[str, ...]
    after: str
    first_test: str = ""
    target_test: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of a division's files, in the order in which they are checked. begin: code that runs first."""

    keys: tuple[KeyRule, ...]
    begin: tuple[str, ...]

    @property
    def keeping(self) -> frozenset[str]:
        """The keys behind whose records code runs: their values may be kept for the rules of other keys."""
        return frozenset(rule.key for rule in self.keys if rule.after)

    def demanded(self, header: Mapping[str, object]) -> dict[str, object]:
        """What each key must be where the rules leave one value, beside those in ``header`` (GBS among them).

        A formula of a key that neither is given nor follows is left out.
        """
        return self._announced(header)[0]

    def accepted(self, header: Mapping[str, object]) -> dict[str, object]:
        """A value for every key that its rule accepts beside ``header``: the demanded one where there is one.

        Others are taken from what the rule itself names; a key none of them fits is left out.
        """
        state = RuleState(self.begin)
        values: dict[str, object] = {}
        for rule in self.keys:
            candidates = (header[rule.key],) if rule.key in header else state.candidates(rule.tests)
            value = next((c for c in candidates if state.holds(rule.tests, c)), header.get(rule.key))
            if value is not None:
                values[rule.key] = value
                state.run(rule.after, value)
        return values

    def eval_samples(self, header: Mapping[str, object]) -> tuple[float | None, float | None]:
        """Where the first eval falls and the interval after it, in samples; None for what the rules leave open."""
        demanded, state = self._announced(header)
        rule = next((rule for rule in self.keys if rule.target_test), None)
        stated = demanded.get("evaluation_frequency")
        if isinstance(stated, int | float) or rule is None:
            return (float(stated),) * 2 if isinstance(stated, int | float) else (None, None)
        first = state.samples((rule.first_test, *rule.tests))
        interval = state.interval(rule.tests)
        if first is not None and interval is None:
            state.run(rule.after, 0.0, {"samples_count": first})
            second = state.samples(rule.tests)
            interval = second - first if second is not None and second > first else None
        return first, interval

    def _announced(self, header: Mapping[str, object]) -> tuple[dict[str, object], RuleState]:
        """What is demanded, and the state behind a header with the stated and the demanded values."""
        state = RuleState(self.begin)
        demanded: dict[str, object] = {}
        for rule in self.keys:
            wanted = next((w for test in rule.tests if (w := state.value(test)) is not None), None)
            if wanted is not None:
                demanded[rule.key] = wanted
            value = header.get(rule.key, wanted)
            if value is not None:
                state.run(rule.after, value)
        return demanded, state


@cache
def read_rules(ruleset: str, *names: str) -> Rules:
    """The rules of the files ``names`` (``common``, ``closed_flux1``, ...) of a ruleset, one after another.

    Raises InputError where a file is missing.
    """
    keys: dict[str, KeyRule] = {}
    begin: list[str] = []
    for name in names:
        path = rules_file(ruleset, name)
        try:
            records = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader) or []
        except OSError as error:
            raise InputError(f"{path}: {error.strerror}; ruleset {ruleset} has no {name}") from error
        begin += [record["BEGIN"]["CODE"] for record in records if "BEGIN" in record]
        for record in records:
            if "KEY" in record:
                rule = _key_rule(record["KEY"])
                keys.pop(rule.key, None)  # a later file's rule replaces an earlier one's, and stands where it is
                keys[rule.key] = rule
    return Rules(tuple(keys.values()), tuple(begin))


def _key_rule(record: Mapping[str, Any]) -> KeyRule:
    tests = record.get("CHECK", [])
    return KeyRule(
        key=record["NAME"],
        tests=tuple(tests) if isinstance(tests, list) else (tests,),
        after=record.get("POST", ""),
        first_test=record.get("FIRST_CHECK", ""),
        target_test=record.get("ATLEAST_ONE_CHECK", ""),
    )


def metrics(rules: Rules) -> tuple[Metric, ...]:
    """What a run must reach, from the test that one of its evals must pass.

    The test bounds each metric twice, by the target and by what a metric can be at all (a loss is above 0, a share at
    most 1): the other bound is the target. Raises ValueError where no key has such a test, or it has another form.
    """
    test = next((rule.target_test for rule in rules.keys if rule.target_test), "")
    if not test:
        raise ValueError("no key has a test for the target")
    state = RuleState(rules.begin)
    found_bounds: dict[str, list[tuple[Direction, float, bool]]] = {}
    for name, direction, bound, strict in bounds(ast.parse(test.strip(), mode="eval").body, state):
        found_bounds.setdefault(name, []).append((direction, bound, strict))
    reached = []
    for name, all_bounds in found_bounds.items():
        telling = [b for b in all_bounds if b[:2] not in (("maximize", 0.0), ("minimize", 1.0))] or all_bounds
        direction, bound, strict = telling[0]
        reached.append(Metric(name, bound, direction, strict))
    return tuple(reached)
