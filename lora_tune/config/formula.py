"""Plain arithmetic from a study file, evaluated without executing code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping

_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": min,
    "max": max,
    "ceil": math.ceil,
    "floor": math.floor,
    "round": round,
    "sqrt": math.sqrt,
}
_LIMIT = 500  # characters: a formula is a line, and a parser's stack is finite


class FormulaError(ValueError):
    """A formula that cannot be read or computed; ``name`` is the parameter that it defines."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(problem)
        self.name = name


class Formula:
    """An arithmetic expression over named values.

    Allowed: numbers, names, ``+ - * / // %``, parentheses, ``min max ceil floor round``. Anything else
    raises FormulaError on construction. No power operator: a formula's cost stays bounded.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > _LIMIT:
            raise FormulaError("", f"a formula of {len(text)} characters; at most {_LIMIT} are allowed")
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise FormulaError("", f"{text!r} is not arithmetic: {error}") from error
        self.names: frozenset[str] = frozenset(self._check(self._tree))

    def _check(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            return set()
        if isinstance(node, ast.Name):
            return {node.id}
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._check(node.left) | self._check(node.right)
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
            return self._check(node.operand)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and node.args:
            if node.func.id not in _FUNCTIONS:
                raise FormulaError("", f"{node.func.id}() is not allowed; use {', '.join(_FUNCTIONS)}")
            return set().union(*(self._check(a) for a in node.args))
        raise FormulaError("", f"{self.text!r} holds something other than arithmetic")

    def value(self, name: str, values: Mapping[str, object]) -> int | float:
        """The result over ``values``. Raises FormulaError (blaming ``name``) on a missing or non-numeric value."""
        try:
            result = self._compute(self._tree, name, values)
        except (ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
            if isinstance(error, FormulaError):
                raise
            raise FormulaError(name, f"{self.text!r} cannot be computed: {error}") from error
        if not math.isfinite(result):
            raise FormulaError(name, f"{self.text!r} gives {result}")
        return result

    def _compute(self, node: ast.AST, name: str, values: Mapping[str, object]) -> int | float:
        if isinstance(node, ast.Constant):
            return node.value  # type: ignore[return-value]  # _check admits numbers only
        if isinstance(node, ast.Name):
            value = values.get(node.id)
            if isinstance(value, bool) or not isinstance(value, int | float):
                known = ", ".join(sorted(n for n, v in values.items() if isinstance(v, int | float)))
                raise FormulaError(name, f"{self.text!r} needs the number {node.id}; known numbers: {known}")
            return value
        if isinstance(node, ast.BinOp):
            left, right = self._compute(node.left, name, values), self._compute(node.right, name, values)
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.UnaryOp):
            return _OPERATORS[type(node.op)](self._compute(node.operand, name, values))
        assert isinstance(node, ast.Call)
        assert isinstance(node.func, ast.Name)
        return _FUNCTIONS[node.func.id](*(self._compute(a, name, values) for a in node.args))
