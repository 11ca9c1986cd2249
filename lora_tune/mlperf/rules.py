"""The closed division's rules of one benchmark, from mlperf_logging's YAML: the allowed values of each MLLOG key.

The YAML holds Python expressions; :class:`RuleState` evaluates them.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import CodeType
from typing import Any, Literal

import yaml

from lora_tune.base.errors import InputError
from lora_tune.curves.timing import Schedule
from lora_tune.mlperf.rulesets import order, rules_file

# Compiled rules: mlperf_logging's checker would compile them again for every record.


Mode = Literal["eval", "exec"]

_EXPRESSIONS = frozenset({"CHECK", "FIRST_CHECK", "ATLEAST_ONE_CHECK"})
_STATEMENTS = frozenset({"PRE", "POST", "CODE"})


@cache
def compiled(text: str, mode: Mode) -> CodeType:
    """The code object of a rule. Raises SyntaxError as ``eval`` and ``exec`` would."""
    return compile(text.strip(), "<rule>", mode)


class _Code(str):
    """A rule's text whose ``strip()`` returns its code object, as the checker passes that to ``eval`` and ``exec``.

    Otherwise it is the text, so that complaints quote it.
    """

    __slots__ = ("_mode",)
    _mode: Mode

    def __new__(cls, text: str, mode: Mode) -> _Code:
        code = super().__new__(cls, text)
        code._mode = mode
        return code

    def strip(self, chars: str | None = None, /) -> Any:
        """The code object; with ``chars`` the stripped text, as of ``str``."""
        return compiled(str(self), self._mode) if chars is None else super().strip(chars)


def with_code(rules: Any, key: str = "") -> Any:
    """The content of a YAML file of rules, with each rule's text replaced by one that compiles once.

    key: the name that holds ``rules``. Text that does not compile stays a plain ``str``, for the checker to report.
    """
    if isinstance(rules, dict):
        return {name: with_code(value, name) for name, value in rules.items()}
    if isinstance(rules, list):
        return [with_code(value, key) for value in rules]
    if not isinstance(rules, str) or key not in _EXPRESSIONS | _STATEMENTS:
        return rules
    mode: Mode = "eval" if key in _EXPRESSIONS else "exec"
    try:
        compiled(rules, mode)
    except SyntaxError:
        return rules
    return _Code(rules, mode)


# Evaluation of the rules. They are Python over ``v`` (the record) and ``s`` (state that earlier records set). The value
# that an equation demands is read from its syntax tree; whether a value is accepted is decided by running the rule.


Direction = Literal["minimize", "maximize"]

NEIGHBOURS = 8
"""Floating-point numbers tried on either side of a formula's value, for rules that compare exactly."""


class RuleState:
    """The namespace in which the rules run, set up as the checker does."""

    def __init__(self, begin: tuple[str, ...]) -> None:
        self._names: dict[str, Any] = {"s": {}, "math": math, "is_integer": _is_integer, "enqueue_config": _ignore}
        for code in begin:
            self._exec(code, {"loglines": []})

    def run(self, code: str, value: object, metadata: Mapping[str, object] | None = None) -> None:
        """Run a rule's code for a record with this value, which may change the state."""
        if code:
            self._exec(code, {"v": {"value": value, "metadata": dict(metadata or {})}})

    def candidates(self, tests: tuple[str, ...]) -> Iterator[object]:
        """Values that the tests may accept: demanded ones, the tests' constants, common ones, numbers in the state."""
        yield from (w for test in tests if (w := self.value(test)) is not None)
        for test in tests:
            yield from _constants(test)
        yield from (1, 0.0, "none")
        yield from (left for left in self._names["s"].values() if type(left) in (int, float))

    def holds(self, tests: tuple[str, ...], value: object) -> bool:
        """Whether all tests pass for a record with this value."""
        try:
            return all(self._eval(test, {"v": {"value": value, "metadata": {}}}) for test in tests)
        except _RULES_RAISE:
            return False

    def samples(self, tests: tuple[str, ...]) -> float | None:
        """The samples_count that a test demands of the next eval: E of ``samples_count == E``."""
        return next((self.number(right) for left, right in _equalities(tests) if ast.unparse(left) in _SAMPLES), None)

    def interval(self, tests: tuple[str, ...]) -> float | None:
        """The interval that a test demands of every eval: E of ``samples_count % E == 0``."""
        for left, right in _equalities(tests):
            if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and ast.unparse(left.left) in _SAMPLES:
                return self.number(left.right) if ast.unparse(right) == "0" else None
        return None

    def number(self, node: ast.expr) -> float:
        """The value of an expression over the state. Raises ValueError if it is not a number."""
        try:
            return float(self._eval(ast.unparse(node), {}))
        except _RULES_RAISE as error:
            raise ValueError(f"{ast.unparse(node)} is not a number: {error}") from error

    def value(self, test: str) -> object:
        """The one value for which a test holds, from its syntax tree; None if it allows several or lacks a name."""
        wanted, scale = _equation(test)
        if not wanted:
            return None
        try:
            value = self._eval(wanted, {})
            return self._exact(test, value / scale) if scale != 1 else value
        except _RULES_RAISE:
            return None

    def _exact(self, test: str, value: float) -> object:
        """The number nearest to ``value`` for which the test holds."""
        up = down = value
        for _ in range(NEIGHBOURS):
            for candidate in (up, down):
                if self._eval(test, {"v": {"value": candidate}}):
                    return candidate
            up, down = math.nextafter(up, math.inf), math.nextafter(down, -math.inf)
        return value

    def _eval(self, text: str, local: dict[str, Any]) -> Any:
        return eval(compiled(text, "eval"), self._names, local)  # the installed package's own rules

    def _exec(self, code: str, local: dict[str, Any]) -> None:
        try:
            exec(compiled(code, "exec"), self._names, local)
        except _RULES_RAISE:  # a value of an unexpected type, whose test has already failed
            return


_SAMPLES = ("v['metadata']['samples_count']", "int(v['metadata']['samples_count'])")


def _equalities(tests: tuple[str, ...]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of each test that is a single equation."""
    for test in tests:
        tree = ast.parse(test.strip() or "None", mode="eval").body
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq):
            yield tree.left, tree.comparators[0]


_RULES_RAISE = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""Exceptions of the rules' code on unexpected values."""


@cache
def _constants(test: str) -> tuple[object, ...]:
    """The constants in a test."""
    nodes = [node for node in ast.walk(ast.parse(test.strip(), mode="eval")) if isinstance(node, ast.Constant)]
    return tuple(node.value for node in nodes if node.value not in ("value", "metadata"))


@cache
def _equation(test: str) -> tuple[str, float]:
    """E and c of a test ``v['value'] == E``, ``v['value'] * c == E`` or ``abs(v['value'] - E) < x``; else "" and 1."""
    tree = ast.parse(test.strip(), mode="eval").body
    if not isinstance(tree, ast.Compare) or len(tree.ops) != 1:
        return "", 1.0
    left, operator, right = tree.left, tree.ops[0], tree.comparators[0]
    if isinstance(operator, ast.Eq):
        if _metric_name(left) == "":
            return ast.unparse(right), 1.0
        if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mult) and _metric_name(left.left) == "":
            scale = left.right
            if isinstance(scale, ast.Constant) and isinstance(scale.value, int | float):
                return ast.unparse(right), float(scale.value)
    if isinstance(operator, ast.Lt | ast.LtE) and isinstance(left, ast.Call) and ast.unparse(left.func) == "abs":
        inner = left.args[0]
        if isinstance(inner, ast.BinOp) and isinstance(inner.op, ast.Sub) and _metric_name(inner.left) == "":
            return ast.unparse(inner.right), 1.0
    return "", 1.0


def _is_integer(value: float) -> bool:
    return abs(round(value) - value) < 1e-5


def _ignore(_config: str) -> None:
    """Replaces the checker's queue of further rule files, which the caller names."""


def bounds(node: ast.expr, state: RuleState) -> Iterator[tuple[str, Direction, float, bool]]:
    """The comparisons of a test as (metric, direction, bound, strict): ``v['value'] <= 3.3`` means minimize."""
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            yield from bounds(part, state)
    elif isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            below = isinstance(operator, ast.Lt | ast.LtE)
            strict = isinstance(operator, ast.Lt | ast.Gt)
            if (name := _metric_name(left)) is not None:
                yield name, "minimize" if below else "maximize", state.number(right), strict
            elif (name := _metric_name(right)) is not None:
                yield name, "maximize" if below else "minimize", state.number(left), strict


def _metric_name(node: ast.expr) -> str | None:
    """ "" for ``v['value']``, "FID" for ``v['value']['FID']``, None for anything else."""
    text = ast.unparse(node)
    if text == "v['value']":
        return ""
    inner = text.removeprefix("v['value']['").removesuffix("']")
    return inner if text == f"v['value']['{inner}']" else None


@dataclass(frozen=True, slots=True)
class Metric:
    """A quality metric. name: distinguishes several metrics of one benchmark, "" if there is one."""

    name: str
    target: float
    direction: Direction
    strict: bool = False

    def reached(self, value: float) -> bool:
        """Whether an eval result meets the target; NaN never does."""
        if self.direction == "minimize":
            return value < self.target if self.strict else value <= self.target
        return value > self.target if self.strict else value >= self.target


def reaching(metric: Metric) -> float:
    """The value nearest to the target that meets it."""
    if not metric.strict:
        return metric.target
    return math.nextafter(metric.target, -math.inf if metric.direction == "minimize" else math.inf)


@dataclass(frozen=True, slots=True)
class KeyRule:
    """The rules of one MLLOG key.

    tests: expressions that must hold for each of its records. first_test: for the first one. target_test: for at least
    one. after: code that runs after each record.
    """

    key: str
    tests: tuple[str, ...]
    after: str
    first_test: str = ""
    target_test: str = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of several files, in the order of checking. begin: code that runs first."""

    keys: tuple[KeyRule, ...]
    begin: tuple[str, ...]

    @property
    def keeping(self) -> frozenset[str]:
        """Keys with code that runs after their records and may keep their values for the rules of other keys."""
        return frozenset(rule.key for rule in self.keys if rule.after)

    def demanded(self, header: Mapping[str, object]) -> dict[str, object]:
        """The value of each key for which the rules leave only one, next to the values in ``header`` (with GBS).

        A formula over a key that is neither in ``header`` nor derived is left out.
        """
        return self._announced(header)[0]

    def accepted(self, header: Mapping[str, object]) -> dict[str, object]:
        """A value for every key that its rule accepts, given ``header``: the demanded value if there is one.

        Others are taken from the constants in the rule; a key for which none fits is left out.
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
        """The first eval and the interval after it, in samples; None where the rules leave it open."""
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
        """The demanded values, and the state after a header with ``header`` and the demanded values."""
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
    """The rules in the files ``names`` (``common``, ``closed_flux1``, ...) of a ruleset, in that order.

    Raises InputError if a file is missing.
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
                keys.pop(rule.key, None)  # a later file's rule replaces an earlier one's, at the later position
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
    """The metrics that a run must reach, from the test that one of its evals must pass.

    The test bounds each metric by its target and by its possible range (a loss is above 0, a share at most 1); the
    bound that is not of the range is the target. Raises ValueError if no key has such a test, or it has another form.
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


# Rules that only the text of MLPerf's training rules states, not mlperf_logging's files: a table with its sources.
#
# The text is ``training_rules.adoc`` of mlcommons/training_policies, as of 2026-05-14. Where text and checkers differ,
# the rules give precedence to the checkers, so this table repeats nothing that a checker checks.


Formula = Callable[[Mapping[str, object]], object]
"""MLLOG values by key -> the demanded value of another key; None if a value that it needs is missing."""


@dataclass(frozen=True, slots=True)
class Grid:
    """An eval schedule, in the benchmark's unit of progress.

    every: interval by batch size; with ``steps`` rounded up to a multiple of the batch size.
    skipped: evals left out at the start, by batch size.
    """

    every: Callable[[int], float]
    skipped: Callable[[int], int] = lambda _batch: 0
    steps: bool = True

    def schedule(self, batch: int) -> Schedule:
        """The first eval and the interval at a global batch size."""
        every = self.every(batch)
        interval = math.ceil(every / batch) * batch if self.steps else every
        return Schedule(first_samples=(self.skipped(batch) + 1) * interval, interval_samples=interval)


@dataclass(frozen=True, slots=True)
class TextRules:
    """Text rules of one benchmark: fixed value, formula and section of the text by MLLOG key, and the eval schedule."""

    fixed: Mapping[str, object] = field(default_factory=dict)
    formulas: Mapping[str, Formula] = field(default_factory=dict)
    grid: Grid | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def reads(self) -> frozenset[str]:
        """The MLLOG keys that the formulas read."""
        lookups = _Asked()
        for formula in self.formulas.values():
            formula(lookups)
        return frozenset(lookups.looked_for)


class _Asked(Mapping[str, object]):
    """An empty mapping that records each key looked up."""

    def __init__(self) -> None:
        self.looked_for: set[str] = set()

    def __getitem__(self, key: str) -> object:
        self.looked_for.add(key)
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRule:
    """One rule of the text. key: an MLLOG key, or "evals". since, until: rulesets, inclusive; "" for any."""

    benchmarks: tuple[str, ...]
    key: str
    value: object | None = None
    formula: Formula | None = None
    grid: Grid | None = None
    source: str
    since: str = ""
    until: str = ""

    def holds(self, benchmark: str, ruleset: str) -> bool:
        """Whether the rule applies to a benchmark in a ruleset."""
        if benchmark not in self.benchmarks:
            return False
        at = order(ruleset)
        return (not self.since or at >= order(self.since)) and (not self.until or at <= order(self.until))


def _share(of: str, factor: float) -> Formula:
    def formula(header: Mapping[str, object]) -> object:
        base = header.get(of)
        return base * factor if isinstance(base, int | float) else None

    return formula


def _steps_405b(steps: int) -> Callable[[Mapping[str, object]], int | None]:
    """A formula for as many sequences as ``steps`` at the reference's batch of 1,152, at every batch size."""

    def formula(header: Mapping[str, object]) -> int | None:
        batch = header.get("global_batch_size")
        return math.ceil(steps * 1152 / batch) if isinstance(batch, int | float) and batch > 0 else None

    return formula


HYPERPARAMETERS, EVALS = "Hyperparameters", "Quality measure, evaluation frequency"
OLD_EVALS = "Deprecated benchmarks quality measure"
LORA, PRETRAINING = ("llama2_70b_lora",), ("llama31_8b", "gpt_oss_20b")

TABLE = (
    TextRule(benchmarks=LORA, key="lora_alpha", value=32, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="lora_dropout", value=0.1, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="opt_adamw_weight_decay", value=1e-4, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="opt_gradient_clip_norm", value=0.3, source=HYPERPARAMETERS),
    # The table says 8196 and "fixed to reference"; the reference trains on sequences of 8,192 tokens.
    TextRule(benchmarks=LORA, key="max_sequence_length", value=8192, source=HYPERPARAMETERS),
    TextRule(benchmarks=LORA, key="evals", source=EVALS,
        grid=Grid(lambda _gbs: 384, lambda gbs: math.floor(0.125 * gbs + 2))),
    TextRule(benchmarks=PRETRAINING, key="opt_end_learning_rate", source=HYPERPARAMETERS,
        formula=_share("opt_base_learning_rate", 0.1)),
    TextRule(benchmarks=PRETRAINING, key="evals", source=EVALS, grid=Grid(lambda _gbs: 12_288)),
    TextRule(benchmarks=("llama31_405b",), key="opt_end_learning_rate", value=8e-7, source=HYPERPARAMETERS),
    TextRule(benchmarks=("llama31_405b",), key="opt_learning_rate_warmup_steps", source=HYPERPARAMETERS,
        formula=_steps_405b(8_000)),
    TextRule(benchmarks=("llama31_405b",), key="evals", source="v5.0 specific rules", until="5.0.0",
        grid=Grid(lambda _gbs: 46_080)),
    TextRule(benchmarks=("llama31_405b",), key="evals", source=EVALS, since="5.1.0",
        grid=Grid(lambda _gbs: 18_432, lambda gbs: math.floor(0.0026 * gbs + 12))),
    # The checker has one equation for two keys: GBS = prompts x 16 generations.
    TextRule(benchmarks=("qwen35_397b_grpo",), key="num_prompts_per_step", source="closed_qwen35_397b_grpo.yaml",
        formula=_share("global_batch_size", 1 / 16)),
    TextRule(benchmarks=("deepseekv3_671b",), key="evals", source=EVALS, grid=Grid(lambda gbs: gbs)),
    TextRule(benchmarks=("bert",), key="evals", source=OLD_EVALS,
        grid=Grid(lambda gbs: math.floor(0.05 * (230.23 * gbs + 3_000_000) / 25_000) * 25_000, steps=False)),
    TextRule(benchmarks=("retinanet",), key="evals", source=OLD_EVALS,
         grid=Grid(lambda _gbs: 1, steps=False)),
    TextRule(benchmarks=("rgat", "dlrm_dcnv2"), key="evals", source=OLD_EVALS,
         grid=Grid(lambda _gbs: 0.05, steps=False)),
)  # fmt: skip


def of(benchmark: str, ruleset: str) -> TextRules:
    """The text rules of a benchmark in a ruleset."""
    rows = [row for row in TABLE if row.holds(benchmark, ruleset)]
    return TextRules(
        fixed={row.key: row.value for row in rows if row.value is not None},
        formulas={row.key: row.formula for row in rows if row.formula is not None},
        grid=next((row.grid for row in rows if row.grid is not None), None),
        sources={row.key: row.source for row in rows},
    )
