"""How often a run with very many evals is looked at: what a look costs grows with them."""

EACH = 1000
"""Evals up to which a run is looked at each time there is more."""

LATER = 3.0
"""Seconds (or evals) that pass for each so many evals until a longer run is looked at again."""


def due(evals: int, passed: float) -> bool:
    """Whether a run with so many evals is made of its log, or judged, anew.

    With n thousand evals, 3 n seconds after the last time: one log takes the same share of a processor, however long it
    is. A curve that nobody gives a clock is looked at after as many evals.

    Parameters
    ----------
    evals : int
        Evals of the run when it was looked at last.
    passed : float
        Seconds, or evals, since then. Asked again with none passed, the answer is yes, as it was.
    """
    return evals <= EACH or not 0 < passed < LATER * evals / EACH
