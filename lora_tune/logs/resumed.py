"""Lines by which programs say that their training goes on from a checkpoint."""

from __future__ import annotations

import re

_NOTHING = (
    r"(?!\W*(?:(?:the )?checkpoint\W+)?(?:none|null|false|no |''|\"\"|(?:global )?(?:step|epoch|iteration|iter)\W*0\b))"
)
_GOES_ON = re.compile(
    rf"(?i)\bcontinuing training from {_NOTHING}(?:a |the |global |checkpoint|step|epoch|iter)"
    rf"|\bresum(?:ing|ed) (?:the )?(?:training |run |optimizer )?(?:from|at) {_NOTHING}"
    r"|\bcheckpoint detected, resuming\b"
    r"|\brestored all states from the checkpoint\b"
    r"|\bwill skip the first [1-9]\d* (?:epochs|batches)"
)
"""transformers' Trainer and its examples, Lightning, and how scripts of one's own say it. What loads the weights of a
base model ("Loading checkpoint shards") is none of them."""

LONGEST = 400
"""Characters of a line that are looked at."""


def says_resumed(line: str) -> bool:
    """Whether a line says that training goes on from a checkpoint that is not its beginning."""
    if "esum" not in line and "ontinuing" not in line and "estored" not in line and "ill skip" not in line:
        return False  # nearly all lines: a search for words costs a tenth of the patterns
    return _GOES_ON.search(line[:LONGEST]) is not None
