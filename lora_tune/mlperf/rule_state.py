"""The expressions of the package's rules: what they state, and what they demand of a record.

They are Python over ``v`` (the record) and ``s`` (a state that records leave behind). Those that state a value are read
off their syntax tree; what they demand of a value is always asked of the expression itself.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Literal

from lora_tune.mlperf.rule_code import compiled

Direction = Literal["minimize", "maximize"]

NEIGHBOURS = 8
"""Floating-point numbers on either side of a formula's value that are tried where the rule compares exactly."""


class RuleState:
    """The names that the rules' code sees, as the checker sets them up."""

    def __init__(self, begin: tuple[str, ...]) -> None:
        self._names: dict[str, Any] = {"s": {}, "math": math, "is_integer": _is_integer, "enqueue_config": _ignore}
        for code in begin:
            self._exec(code, {"loglines": []})

    def run(self, code: str, value: object, metadata: Mapping[str, object] | None = None) -> None:
        """Let a record with this value leave its traces."""
        if code:
            self._exec(code, {"v": {"value": value, "metadata": dict(metadata or {})}})

    def candidates(self, tests: tuple[str, ...]) -> Iterator[object]:
        """Values that the tests may accept: what they demand, what they name, what records have left, plain ones."""
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
        """The samples_count that a test asks of the next eval by name: ``samples_count == E``."""
        return next((self.number(right) for left, right in _equalities(tests) if ast.unparse(left) in _SAMPLES), None)

    def interval(self, tests: tuple[str, ...]) -> float | None:
        """The grid that a test asks of every eval: E of ``samples_count % E == 0``."""
        for left, right in _equalities(tests):
            if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod) and ast.unparse(left.left) in _SAMPLES:
                return self.number(left.right) if ast.unparse(right) == "0" else None
        return None

    def number(self, node: ast.expr) -> float:
        """The value of an expression over the state. Raises ValueError where it is no number."""
        try:
            return float(self._eval(ast.unparse(node), {}))
        except _RULES_RAISE as error:
            raise ValueError(f"{ast.unparse(node)} is not a number: {error}") from error

    def value(self, test: str) -> object:
        """The one value for which a test holds, read off its form; None where it leaves a choice or lacks a name."""
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
        except _RULES_RAISE:  # a value of another kind than the rule expects: its test has failed already
            return


_SAMPLES = ("v['metadata']['samples_count']", "int(v['metadata']['samples_count'])")


def _equalities(tests: tuple[str, ...]) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of the tests that are one equation."""
    for test in tests:
        tree = ast.parse(test.strip() or "None", mode="eval").body
        if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq):
            yield tree.left, tree.comparators[0]


_RULES_RAISE = (ArithmeticError, AttributeError, LookupError, NameError, TypeError, ValueError)
"""What the rules' code raises on values that it does not foresee."""


@cache
def _constants(test: str) -> tuple[object, ...]:
    """The constants that a test names."""
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
    """In place of the checker's queue of further files: those are named by the caller."""


def bounds(node: ast.expr, state: RuleState) -> Iterator[tuple[str, Direction, float, bool]]:
    """The comparisons of a test as (metric, direction, bound, strict): ``v['value'] <= 3.3`` is to be minimised."""
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
