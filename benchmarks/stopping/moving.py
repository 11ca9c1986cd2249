"""What breaks exchangeability: a search that moves to other kinds of runs than its references are of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.stopping.tables import Table, recorded, seen
from lora_tune.curves.conformal import compare, supported
from lora_tune.curves.overlay import ComparedRun
from lora_tune.curves.points import Points

DRAWS, EACH, REFERENCES, RATE = 25, 20, 20, 0.05
SHARE_OF_KINDS = 1 / 3


def main() -> None:
    """Print the shares of good runs stopped."""
    print(
        f"\n{REFERENCES} references of a third of the kinds, stated {RATE:.0%}; good runs of the other kinds stopped:"
    )
    print(f"(supported: {supported(RATE, REFERENCES):.1%} where kinds are ignored)")
    for table in recorded():
        kinds = sorted({run.alike for run in table.good}, key=str)
        if len(kinds) > 2 and len(table.good) > 2 * REFERENCES:
            told, blind = (
                np.mean([_moved(table, kinds, seed, blind=b) for seed in range(DRAWS)]) for b in (False, True)
            )
            print(f"  {table.name}: {told:.1%} by kinds, {blind:.1%} where kinds are ignored", flush=True)


def _moved(table: Table, kinds: Sequence[object], seed: int, *, blind: bool) -> float:
    """Share of good runs of other kinds that are stopped, with one draw of kinds and references."""
    rng = np.random.default_rng(seed)
    known = {kinds[i] for i in rng.permutation(len(kinds))[: max(1, round(SHARE_OF_KINDS * len(kinds)))]}
    at_hand = [run for run in table.good if run.alike in known]
    others = [run for run in table.good if run.alike not in known]
    references = [at_hand[i] for i in rng.permutation(len(at_hand))[:REFERENCES]]
    judged = [seen(others[i], table.target) for i in rng.permutation(len(others))[:EACH]]
    if blind:
        references, judged = ([_blind(c) for c in runs] for runs in (references, judged))
    return float(np.mean([compare(c, references, target=table.target, rate=RATE).outside for c in judged]))


def _blind(run: ComparedRun) -> ComparedRun:
    """The run by share of training, as if all were of one kind and length."""
    length = run.length or 1.0
    return ComparedRun(curve=Points(run.curve.samples / length, run.curve.loss), length=1.0)
