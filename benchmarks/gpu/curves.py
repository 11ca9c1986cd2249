"""Eval curves of the NeMo recipe over learning rates and batches: what target separates good from bad.

``python -m benchmarks.gpu.curves --base FOLDER`` runs each point once, prints the losses at each evaluation, and for
some targets the seconds that each point needed; ``studies/nemo_h100x1.toml`` takes its target from here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path

from benchmarks.gpu.trials import Outcome, run_trial


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="model folder that make_base wrote")
    parser.add_argument("--lr", type=float, nargs="*", default=[1e-4, 1e-3, 3e-3, 1e-2, 3e-2])
    parser.add_argument("--batch", type=int, nargs="*", default=[16])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=256, help="samples between evaluations (default %(default)s)")
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--limit", type=float, default=60, help="seconds a run")
    parser.add_argument("--total", type=float, default=300, help="seconds in all")
    parser.add_argument("--out", type=Path, default=Path("curves.json"))
    options = parser.parse_args()
    end = time.monotonic() + options.total
    outcomes: list[Outcome] = []
    for lr, batch in itertools.product(options.lr, options.batch):
        if end - time.monotonic() < 10:
            break
        name = f"lr{lr:g}_gbs{batch}"
        variables = {
            "MODEL": options.base,
            "DATADIR": "lora_tune_recipes/tiny",
            "SEQ": options.seq,
            "LR": lr,
            "MINIBS": batch,
            "MBS": batch,
            "MAX_STEPS": options.steps,
            "VAL_CHECK_INTERVAL": options.every,
            "TARGET": 0,
        }
        limit = min(options.limit, end - time.monotonic())
        outcome = run_trial(name, variables, limit=limit, folder=options.out.parent / "logs")
        outcomes.append(outcome)
        speed = f"start {outcome.start_seconds} s, {outcome.samples_per_second} samples/s"
        print(f"{name:18} {outcome.seconds:5.1f} s, {speed}  {outcome.failure}")
        print("   " + " ".join(f"{loss:.3f}" for _, loss, _ in outcome.evals), flush=True)
    options.out.write_text(json.dumps([o.record() for o in outcomes], indent=1))
    print_targets(outcomes)


def print_targets(outcomes: list[Outcome]) -> None:
    """Seconds to each of some targets, by point; a dash where it was not reached."""
    losses = sorted(loss for o in outcomes for _, loss, _ in o.evals)
    if not losses:
        return
    best = losses[0]
    for margin in (0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        times = [next((f"{s:.1f}" for _, loss, s in o.evals if loss <= best + margin), "-") for o in outcomes]
        print(f"target {best + margin:.3f}: " + " ".join(times))


if __name__ == "__main__":
    main()
