"""Trials that take more of the host's memory than there is: ``python -m benchmarks.packed_greedy``.

Sweeps the shipped tiny task in packs, on a machine of so many MiB (a cgroup with a limit, which root may make). Some of
the trials have steps of 16,384 sequences and never fit; the kernel's OOM killer ends the pack under all of them. At the
end those alone must have failed, as ``host memory`` and after ``budget.attempts`` attempts, and every other one come to
its end. Exit code 1 where it is not so.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.packed_faults import recorded
from lora_tune.base.paths import SweepPaths
from lora_tune.controller.conclusion import made
from lora_tune.store.records import Verdict
from tests.memory_limit import enter, little_memory

GREEDY = 16384
STUDY = """
[workload]
kind = "peft"
[site]
slots = {trials}
[space]
LR = {{ type = "float", low = 1e-3, high = 1e-2, log = true }}
MINIBS = {{ type = "categorical", choices = [4, {greedy}] }}
MAX_STEPS = 4
VAL_CHECK_INTERVAL = 8
SEQ = 32
EVAL_SAMPLES = 2
[objective]
target = 1.0
[search]
sampler = "random"
seed = 3
[pruning]
rule = "none"
cap = false
[budget]
trials = {trials}
parallel = {trials}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trials", type=int, default=4, help="all side by side (default %(default)s)")
    parser.add_argument("--mib", type=int, default=1200, help="memory of the machine (default %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, little_memory(options.mib << 20) as group:
        study, paths = Path(root) / "greedy.toml", SweepPaths(Path(root) / "sweep")
        study.write_text(STUDY.format(trials=options.trials, greedy=GREEDY))
        command = [sys.executable, "-m", "lora_tune.sweep", "--study", str(study), "--output", str(paths.root)]
        began = time.monotonic()
        subprocess.run(command, preexec_fn=functools.partial(enter, group), check=False)
        sweep, packs = recorded(paths), len(list(paths.packs.iterdir()))
    assert sweep is not None
    wrong = [
        f"trial {number}: {trial.verdict}, {made(sweep.attempts_of(number))} attempts that count"
        for number, trial in sweep.trials.items()
        if (trial.verdict is Verdict.FAILED) != (trial.parameters["MINIBS"] == GREEDY)
    ]
    ends = Counter(a.failure or "came to its end" for a in sweep.attempts.values())
    verdicts = Counter(str(trial.verdict) for trial in sweep.trials.values())
    seconds = round(time.monotonic() - began)
    print(json.dumps({"verdicts": verdicts, "attempts": ends, "packs": packs, "seconds": seconds, "wrong": wrong}))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
