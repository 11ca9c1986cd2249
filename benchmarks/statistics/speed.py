"""How long the statistics take on one core."""

from __future__ import annotations

import time

import numpy as np

from lora_tune import curves
from lora_tune.curves.overlay import ComparedRun
from lora_tune.curves.points import usable
from lora_tune.curves.stopping import Evidence, verdict
from lora_tune.logs.run import Eval
from lora_tune.mlperf import convergence

TARGET = 0.925


def main() -> None:
    published = convergence.published(8)
    assert published is not None
    family = published.family
    rng = np.random.default_rng(0)
    usual = [_run(family, rng, 6) for _ in range(10_000)]
    long = [_run(family, rng, 3000) for _ in range(20)]
    whole = (_run(family, rng, 18) for _ in range(400))
    references = [c for c in (ComparedRun(curve=usable(e), length=8192) for e in whole) if c.stop(TARGET) < 8192][:200]
    calls = {
        "10,000 estimates, fixed shape, 6 evals": lambda: [curves.estimate(e, TARGET, family=family) for e in usual],
        "10,000 estimates, free fit, 6 evals": lambda: [curves.estimate(e, TARGET) for e in usual],
        "10,000 verdicts, published envelope": lambda: [
            verdict(e[:3], TARGET, Evidence(published=published), length=8192) for e in usual
        ],
        "100 verdicts, 200 references": lambda: [
            verdict(e[:3], TARGET, Evidence(references=references), length=8192) for e in usual[:100]
        ],
        "1,000 forecasts": lambda: [curves.forecast(e[:3], TARGET, family=family) for e in usual[:1000]],
        "20 estimates of runs with 3,000 evals": lambda: [curves.estimate(e, TARGET) for e in long],
    }
    for name, call in calls.items():
        begin = time.process_time()
        call()
        print(f"{name:46} {time.process_time() - begin:6.2f} s of CPU")


def _run(family: curves.Family, rng: np.random.Generator, evals: int) -> list[Eval]:
    samples = 1536 + 384.0 * np.arange(evals)
    loss = family.loss_at(samples) + rng.normal(0, family.seed) + rng.normal(0, 1, evals) * family.noise_at(samples)
    return [Eval(s, v, s / 2) for s, v in zip(samples, loss, strict=True)]
