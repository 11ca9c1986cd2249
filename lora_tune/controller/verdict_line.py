"""A verdict as one terse line for who watches; the whole sentence stands in driver.log, status and the report."""

from __future__ import annotations

_NUMBER, _WORD = 9, 11
"""Characters of the columns "trial 12" and "infeasible"."""


def verdict_line(number: int, word: str, sentence: str) -> str:
    """``trial 3  pruned      diverged: ...``: the columns of all verdicts stand below one another.

    number: of the trial. word: its verdict, for people. sentence: why.
    """
    return f"{f'trial {number}':<{_NUMBER}}{word:<{_WORD}} {sentence}"


def first_clause(sentence: str) -> str:
    """What a sentence says first; statistics and remedies stand behind its semicolons."""
    return sentence.partition("; ")[0]
