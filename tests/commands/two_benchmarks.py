"""A campaign of two benchmarks with small real trainings: a loss that falls, and an accuracy that rises."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import REPOSITORY

TRAINING = REPOSITORY / "tests" / "mlperf" / "small_training.py"

STUDY = """
[workload]
kind = "command"
argv = [{python}, {trial}]
stop_at_target = false
[workload.environment]
BENCHMARK = "{benchmark}"
MEASURE = "{measure}"
TARGET = "{target}"
[site]
kill_seconds = 5
{site}
[space]
LR = {{ type = "categorical", choices = [0.001, 0.3, 1.0] }}
GBS = 16
MAX_STEPS = 200
[objective]
benchmark = "{benchmark}"
target = {target}
[pruning]
rule = "none"
[search]
sampler = "tpe"
enqueue = [{{ LR = 0.3 }}, {{ LR = 1.0 }}, {{ LR = 0.001 }}]
[budget]
trials = 3
"""

CAMPAIGN = """
description = "two benchmarks of one machine"
[budget]
node_hours = 6
[[sweeps]]
study = "falling.toml"
share = 2
[[sweeps]]
study = "rising.toml"
"""


def write(folder: Path, site: str = "") -> Path:
    """The campaign of a loss that falls and an accuracy that rises; returns its file. site: further lines of [site]."""
    for name, benchmark, measure, target in (
        ("falling", "flux1", "loss", 0.25),
        ("rising", "dlrmv4", "accuracy", 0.92),
    ):
        words = {"python": json.dumps(sys.executable), "trial": json.dumps(str(TRAINING)), "benchmark": benchmark}
        (folder / f"{name}.toml").write_text(STUDY.format(**words, measure=measure, target=target, site=site))
    file = folder / "machine.toml"
    file.write_text(CAMPAIGN)
    return file
