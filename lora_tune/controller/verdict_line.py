"""A verdict as one terse line for who watches; the whole sentence stands in driver.log, status and the report."""

from __future__ import annotations

from lora_tune.store.records import Trial

_NUMBER, _WORD = 9, 11
"""Characters of the columns "trial 12" and "infeasible"."""


def verdict_line(trial: Trial, word: str, sentence: str) -> str:
    """``trial 3  pruned      diverged: ...``: the columns of all verdicts stand below one another.

    A replicate is ``run 3    reached     trial 13: ...``: its number is not that of the trial that is run again.
    word: the trial's verdict, for people. sentence: why.
    """
    if trial.replicate_of is None:
        return f"{f'trial {trial.number}':<{_NUMBER}}{word:<{_WORD}} {sentence}"
    return f"{f'run {trial.number}':<{_NUMBER}}{word:<{_WORD}} trial {trial.replicate_of}: {sentence}"


def first_clause(sentence: str) -> str:
    """What a sentence says first; statistics and remedies stand behind its semicolons."""
    return sentence.partition("; ")[0]
