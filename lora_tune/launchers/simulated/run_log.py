"""A simulated run as values and as MLLOG text: when its blocks and evals happen, and what its log says."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from lora_tune.launchers.simulated.convergence import FIGURES
from lora_tune.launchers.simulated.machine import Degrees, Machine

Array = npt.NDArray[np.float64]
EPOCH_MS = 1_700_000_000_000
"""Virtual second 0 in the logs, epoch milliseconds."""
TEARDOWN_SECONDS = 20.0
"""From a death of memory to the job's end (assumption)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """What chance does to one job on a machine: seconds of start-up, samples/s, seconds per eval.

    dies_after: share of the run after which it dies of memory, None when it lives.
    """

    init_seconds: float
    samples_per_second: float
    seconds_per_eval: float
    dies_after: float | None


def draw(machine: Machine, layout: Degrees, rng: np.random.Generator) -> Luck:
    """One job's luck: start-up as published, speeds within 0.14% and 0.5% (public runs), memory by the layout."""
    init = machine.init_median * math.exp(rng.normal(0, 0.5 * FIGURES["initialisation"]["sigma_ln"]))
    speed = machine.samples_per_second(layout) * math.exp(rng.normal(0, 0.0014))
    eval_seconds = machine.seconds_per_eval(layout) * math.exp(rng.normal(0, 0.005))
    p = machine.oom_probability(layout)
    dies = rng.random() < p
    # Certain deaths come at once; of the lucky layouts' half, when a fragmented allocator meets its peak.
    at_once = rng.random() < max(0.5, p)
    after = 0.0 if at_once else float(rng.random())
    return Luck(
        init_seconds=init, samples_per_second=speed, seconds_per_eval=eval_seconds, dies_after=after if dies else None
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UndisturbedRun:
    """What a run would do on a machine that never fails. samples, losses: its evals up to the end of training.

    total: samples at which training ends. step: samples per optimizer step. blow_up: samples from which on losses are
    NaN, infinite if never.
    """

    samples: Array
    losses: Array
    total: float
    step: int
    blow_up: float
    target: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """One simulated run. Seconds count from the start of the job; ``evals`` are (samples, loss, second) at eval end,
    ``train`` the same of train losses."""

    init_seconds: float
    samples_per_second: float
    block_seconds: tuple[float, ...]
    seconds_per_eval: float
    evals: tuple[tuple[float, float, float], ...]
    train: tuple[tuple[float, float, float], ...]
    end: Literal["success", "aborted", "oom"]
    end_seconds: float
    samples: float


def timed(course: UndisturbedRun, luck: Luck, cold_seconds: float, rng: np.random.Generator) -> RunOutcome:
    """The course on a machine's clock; ``cold_seconds``: what the first block takes longer."""
    losses = np.where(course.samples > course.blow_up, math.nan, course.losses)
    reached = np.flatnonzero(losses <= course.target)
    stop = float(course.samples[reached[0]]) if len(reached) else float(course.total)
    if luck.dies_after is not None:
        stop *= luck.dies_after
    at = course.samples[course.samples <= stop]
    edges = np.concatenate([[0.0], at, [stop]]) if not len(at) or at[-1] < stop else np.concatenate([[0.0], at])
    blocks = np.diff(edges) / luck.samples_per_second * np.exp(rng.normal(0, 0.001, len(edges) - 1))
    blocks[0] += cold_seconds
    ends = luck.init_seconds + np.cumsum(blocks) + luck.seconds_per_eval * np.arange(len(blocks))
    done = ends + luck.seconds_per_eval
    evals = tuple((float(s), float(x), float(t)) for s, x, t in zip(at, losses, done, strict=False))
    success = bool(evals) and evals[-1][1] <= course.target
    end: Literal["success", "aborted", "oom"] = (
        "success" if success else "oom" if luck.dies_after is not None else "aborted"
    )
    last = evals[-1][2] if evals and evals[-1][0] >= stop else float(ends[-1])
    return RunOutcome(
        init_seconds=luck.init_seconds,
        samples_per_second=luck.samples_per_second,
        block_seconds=tuple(blocks.tolist()),
        seconds_per_eval=luck.seconds_per_eval,
        evals=evals,
        train=_train_losses(course, edges, ends - blocks, ends, rng),
        end=end,
        end_seconds=last + (TEARDOWN_SECONDS if end == "oom" else 0.0),
        samples=stop,
    )


def _train_losses(
    course: UndisturbedRun, edges: Array, begins: Array, ends: Array, rng: np.random.Generator
) -> tuple[tuple[float, float, float], ...]:
    """A train loss every ten steps, as v4.x and v5.0 print them."""
    points = np.arange(10 * course.step, edges[-1] + 1, 10 * course.step)
    block = np.clip(np.searchsorted(edges, points, side="left") - 1, 0, len(ends) - 1)
    share = (points - edges[block]) / np.maximum(edges[block + 1] - edges[block], 1e-9)
    seconds = begins[block] + (ends - begins)[block] * share
    # The public train losses fall from 2.1 to 1.3 within 900 samples and then scatter by 0.05.
    values = 1.29 + 0.85 * np.exp(-points / 250) + rng.normal(0, 0.05, len(points))
    values = np.where(points > course.blow_up, math.nan, values)
    return tuple(zip(points.tolist(), values.tolist(), seconds.tolist(), strict=True))


Line = Callable[..., tuple[float, str]]


def log_lines(outcome: RunOutcome, header: Mapping[str, object]) -> Iterator[tuple[float, str]]:
    """The outcome as a job log in MLLOG form, in time order, with the second at which each line appears.

    header: keys and values printed at the start, such as ``global_batch_size`` and ``seed``.
    """

    def line(
        second: float, key: str, value: object, kind: str = "POINT_IN_TIME", **metadata: object
    ) -> tuple[float, str]:
        event = {
            "namespace": "",
            "time_ms": EPOCH_MS + round(second * 1000),
            "event_type": kind,
            "key": key,
            "value": value,
            "metadata": {"file": "surface", "lineno": 0, **metadata},
        }
        return second, ":::MLLOG " + json.dumps(event)

    yield line(0.5, "init_start", None, "INTERVAL_START")
    for key, value in header.items():
        yield line(0.5, key, value)
    yield line(outcome.init_seconds, "init_stop", None, "INTERVAL_END")
    yield line(outcome.init_seconds, "run_start", None, "INTERVAL_START")
    yield from _blocks(outcome, line)
    if outcome.end == "oom":
        text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB."
        yield outcome.end_seconds, text
        return
    yield line(outcome.end_seconds, "run_stop", None, "INTERVAL_END", samples_count=outcome.samples, status=outcome.end)


def _blocks(outcome: RunOutcome, line: Line) -> Iterator[tuple[float, str]]:
    """Training blocks with their losses, each followed by its eval."""
    waiting = deque(outcome.train)
    begin, samples = outcome.init_seconds, 0.0
    for index, seconds in enumerate(outcome.block_seconds):
        end = begin + seconds
        yield line(begin, "block_start", None, "INTERVAL_START", samples_count=samples)
        while waiting and waiting[0][2] <= end + 1e-6:
            at, loss, second = waiting.popleft()
            yield line(min(second, end), "train_loss", loss, samples_count=at)
        if index >= len(outcome.evals):
            return
        reached, loss, done = outcome.evals[index]
        yield line(end, "tracked_stats", {"throughput": (reached - samples) / seconds}, step=reached)
        yield line(end, "block_stop", None, "INTERVAL_END", samples_count=reached)
        yield line(end, "eval_start", None, "INTERVAL_START", samples_count=reached)
        yield line(done, "eval_accuracy", loss, samples_count=reached)
        yield line(done, "eval_stop", None, "INTERVAL_END", samples_count=reached)
        begin, samples = done, reached
