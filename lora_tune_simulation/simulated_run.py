"""A surface from a machine and a convergence model: one simulated MLPerf LoRA run, as values or as MLLOG text."""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from lora_tune.base.paths import AttemptPaths
from lora_tune.config.layout import config_file_name, layout_of
from lora_tune.config.study import Study
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.mlperf.benchmark import LORA, find_benchmark
from lora_tune.workloads.base import Export, Job, Proposal, Resources, Workload
from lora_tune.workloads.config_file import render
from lora_tune.workloads.implementation import PROBE_STEPS
from lora_tune.workloads.record import Record
from lora_tune_simulation import SHIPPED, machine
from lora_tune_simulation.machine import AVERAGE, FIGURES, TARGET, Array, Degrees, Machine, Recipe, SiteEffect

FloatArray = npt.NDArray[np.float64]
EPOCH_MS = 1_700_000_000_000
"""Virtual second 0 in the logs, epoch milliseconds."""
TEARDOWN_SECONDS = 20.0
"""Seconds from running out of memory to the job's end (assumption)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """The random part of one job: start-up seconds, samples/s, seconds per eval.

    dies_after: share of the run after which it runs out of memory, None if it does not.
    """

    init_seconds: float
    samples_per_second: float
    seconds_per_eval: float
    dies_after: float | None


def draw(machine: Machine, layout: Degrees, rng: np.random.Generator) -> Luck:
    """Random start-up as published, speeds within 0.14% and 0.5% (public runs), out of memory by the layout."""
    init = machine.init_median * math.exp(rng.normal(0, 0.5 * FIGURES["initialisation"]["sigma_ln"]))
    speed = machine.samples_per_second(layout) * math.exp(rng.normal(0, 0.0014))
    eval_seconds = machine.seconds_per_eval(layout) * math.exp(rng.normal(0, 0.005))
    p = machine.oom_probability(layout)
    dies = rng.random() < p
    # A layout without room fails at once; a borderline one half of the time, else when a fragmented allocator peaks.
    at_once = rng.random() < max(0.5, p)
    after = 0.0 if at_once else float(rng.random())
    return Luck(
        init_seconds=init, samples_per_second=speed, seconds_per_eval=eval_seconds, dies_after=after if dies else None
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class UndisturbedRun:
    """A run on a machine that never fails. samples, losses: its evals up to the end of training.

    total: samples at the end of training. step: samples per optimizer step. blow_up: samples after which losses are
    NaN, infinite if never.
    """

    samples: FloatArray
    losses: FloatArray
    total: float
    step: int
    blow_up: float
    target: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome:
    """One simulated run. Seconds count from the start of the job; ``evals`` are (samples, loss, second) at eval end,
    ``train`` the same for train losses."""

    init_seconds: float
    samples_per_second: float
    block_seconds: tuple[float, ...]
    seconds_per_eval: float
    evals: tuple[tuple[float, float, float], ...]
    train: tuple[tuple[float, float, float], ...]
    end: Literal["success", "aborted", "oom"]
    end_seconds: float
    samples: float


def timed(undisturbed: UndisturbedRun, luck: Luck, cold_seconds: float, rng: np.random.Generator) -> RunOutcome:
    """The run on a machine's clock; ``cold_seconds``: extra time of the first block."""
    losses = np.where(undisturbed.samples > undisturbed.blow_up, math.nan, undisturbed.losses)
    reached = np.flatnonzero(losses <= undisturbed.target)
    stop = float(undisturbed.samples[reached[0]]) if len(reached) else float(undisturbed.total)
    if luck.dies_after is not None:
        stop *= luck.dies_after
    at = undisturbed.samples[undisturbed.samples <= stop]
    edges = np.concatenate([[0.0], at, [stop]]) if not len(at) or at[-1] < stop else np.concatenate([[0.0], at])
    blocks = np.diff(edges) / luck.samples_per_second * np.exp(rng.normal(0, 0.001, len(edges) - 1))
    blocks[0] += cold_seconds
    ends = luck.init_seconds + np.cumsum(blocks) + luck.seconds_per_eval * np.arange(len(blocks))
    done = ends + luck.seconds_per_eval
    evals = tuple((float(s), float(x), float(t)) for s, x, t in zip(at, losses, done, strict=False))
    success = bool(evals) and evals[-1][1] <= undisturbed.target
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
        train=_train_losses(undisturbed, edges, ends - blocks, ends, rng),
        end=end,
        end_seconds=last + (TEARDOWN_SECONDS if end == "oom" else 0.0),
        samples=stop,
    )


def _train_losses(
    undisturbed: UndisturbedRun, edges: FloatArray, begins: FloatArray, ends: FloatArray, rng: np.random.Generator
) -> tuple[tuple[float, float, float], ...]:
    """A train loss every ten steps, as in logs of v4.x and v5.0."""
    points = np.arange(10 * undisturbed.step, edges[-1] + 1, 10 * undisturbed.step)
    block = np.clip(np.searchsorted(edges, points, side="left") - 1, 0, len(ends) - 1)
    share = (points - edges[block]) / np.maximum(edges[block + 1] - edges[block], 1e-9)
    seconds = begins[block] + (ends - begins)[block] * share
    # The public train losses fall from 2.1 to 1.3 within 900 samples and then scatter by 0.05.
    values = 1.29 + 0.85 * np.exp(-points / 250) + rng.normal(0, 0.05, len(points))
    values = np.where(points > undisturbed.blow_up, math.nan, values)
    return tuple(zip(points.tolist(), values.tolist(), seconds.tolist(), strict=True))


Line = Callable[..., tuple[float, str]]


def log_lines(outcome: RunOutcome, header: Mapping[str, object]) -> Iterator[tuple[float, str]]:
    """The outcome as a job log in MLLOG format: (second, line) in time order.

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


Score = Literal["time_to_target", "mlperf_score"]
DRAWS = 512
"""Simulated runs for an expected score."""


def rcp_samples(gbs: int) -> float:
    """Mean samples of the reference convergence point at ``gbs``; 0 if there is none."""
    point = find_benchmark(LORA).reference(gbs)
    return point.mean if point else 0.0


def eval_samples(parameters: Mapping[str, object], gbs: int, total: int) -> Array:
    """Samples of a run's evals: the closed division's schedule unless VAL_CHECK_INTERVAL or SKIP_EVALS is set."""
    rule = find_benchmark(LORA).eval_schedule(gbs)
    assert rule is not None, "llama2_70b_lora has an eval grid"
    every = math.ceil(int(str(parameters.get("VAL_CHECK_INTERVAL") or rule.interval_samples)) / gbs) * gbs
    skip = parameters.get("SKIP_EVALS")
    skipped = round(rule.first_samples / rule.interval_samples) - 1 if skip in (None, "") else int(str(skip))
    return np.arange(every * (skipped + 1), total + 1, every, dtype=np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A surface: call it with parameters and a seed for the log; ``expected_score`` is the ground truth.

    Parameters read: LR, MAX_STEPS, WARMUP_STEPS, TP, PP, CP, MINIBS, MBS; VAL_CHECK_INTERVAL and SKIP_EVALS if present.
    score: kind of ``expected_score``, in seconds. site: this site's convergence.
    """

    machine: Machine
    score: Score = "mlperf_score"
    site: SiteEffect = AVERAGE

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log: (virtual seconds since its start, line)."""
        recipe = self.recipe(parameters)
        header = {
            "submission_benchmark": "llama2_70b_lora",
            "seed": seed,
            "global_batch_size": recipe.gbs,
            "opt_base_learning_rate": recipe.learning_rate,
            "opt_learning_rate_training_steps": recipe.steps,
            "opt_learning_rate_warmup_factor": recipe.warmup_steps / recipe.steps,
            "gradient_accumulation_steps": Degrees.of(parameters).minibs,
        }
        return log_lines(self.outcome(parameters, seed), header)

    def variant(self, number: int) -> SimulatedRun:
        """Another site of the same kind; 0 is the public average.

        The level varies (sd 2.8%) as between public submissions; the shift of the best learning rate (sd 15% in ln) is
        an assumption. For the machine see ``Machine.elsewhere``.
        """
        if number == 0:
            return self
        rng = np.random.default_rng([number, 20])
        level, rate, gbs, steps, speed, evals, memory, init = rng.normal(size=8)
        return replace(
            self,
            site=SiteEffect(level=0.028 * level, learning_rate=0.15 * rate, gbs=0.023 * gbs, steps=0.02 * steps),
            machine=self.machine.elsewhere(number, speed, evals, memory, init),
        )

    def recipe(self, parameters: Mapping[str, object]) -> Recipe:
        """The part of ``parameters`` that determines convergence."""
        return Recipe(
            learning_rate=float(str(parameters["LR"])),
            gbs=self.machine.gbs(Degrees.of(parameters)),
            steps=int(str(parameters["MAX_STEPS"])),
            warmup_steps=float(str(parameters.get("WARMUP_STEPS") or 0)),
        )

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run, with the randomness of this seed."""
        rng = np.random.default_rng([seed, 7])
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        luck = draw(self.machine, layout, rng)
        diverges = rng.random() < machine.divergence_probability(recipe, self.site)
        blow_up = rng.uniform(0.02, 0.3) * recipe.total_samples if diverges else math.inf
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        crossing = math.exp(machine.ln_samples(recipe, self.site))
        undisturbed = UndisturbedRun(
            samples=at,
            losses=machine.noisy_losses(machine.median_losses(at, crossing, recipe.gbs), rng, 1)[0],
            total=recipe.total_samples,
            step=recipe.gbs,
            blow_up=blow_up,
            target=TARGET,
        )
        return timed(undisturbed, luck, self.machine.cold_seconds(), rng)

    def expected_score(self, parameters: Mapping[str, object], draws: int = DRAWS) -> float:
        """Ground truth: expected seconds until a run succeeds, when failed ones are repeated; ``draws`` seeds.

        With ``mlperf_score`` the mean is multiplied by max(1, RCP mean / mean samples). Infinite if nearly every run
        fails. Deterministic.
        """
        layout, recipe = Degrees.of(parameters), self.recipe(parameters)
        at = eval_samples(parameters, recipe.gbs, recipe.total_samples)
        if not len(at):
            return math.inf
        crossing = math.exp(machine.ln_samples(recipe, self.site))
        losses = machine.expected_losses(machine.median_losses(at, crossing, recipe.gbs), draws)
        reached = losses <= TARGET
        finishes = reached.any(axis=1)
        lives = 1 - self.machine.oom_probability(layout)
        tame = 1 - machine.divergence_probability(recipe, self.site)
        chance = float(finishes.mean()) * lives * tame
        if chance < 1e-3:
            return math.inf
        first = reached[finishes].argmax(axis=1)
        speed, eval_seconds = self.machine.samples_per_second(layout), self.machine.seconds_per_eval(layout)
        samples = float(at[first].mean())
        seconds = self.machine.cold_seconds() + float((at[first] / speed + eval_seconds * (first + 1)).mean())
        # Running out of memory costs a quarter of a run (half of the time it is at once), other failures a whole one.
        whole = recipe.total_samples / speed + eval_seconds * len(at)
        expected = (
            seconds + ((1 - lives) * 0.25 * seconds + lives * (1 - float(finishes.mean()) * tame) * whole) / chance
        )
        if self.score == "mlperf_score":
            expected *= max(1.0, rcp_samples(recipe.gbs) / samples)
        return expected


# Switches of a simulated site: the effect of each level on speed, evals, samples to target and survival.
#
# All are assumptions, except for the sizes: public sites with equal layouts differ by up to 13%, each switch here by 0
# to 6%. At each site some levels interact in pairs, one level crashes, and one arithmetic switch is fast but costs
# samples. An unset switch has its published value, which neither crashes nor costs samples.

LEVELS: Mapping[str, tuple[object, ...]] = {
    "VBOOST_VALUE": (1, 0),
    "TP_COMM_OVERLAP": (1, 0),
    "MC_TP_OVERLAP_RS_DGRAD": ("False", "True"),
    "LAYER_CUDA_GRAPH": (0, 1),
    "MCORE_CUDA_GRAPH": (0, 1),
    "NCCL_MIN_CTAS": (32, 16, 8),
    "NCCL_NVLS_ENABLE": (0, 1),
    "NUM_WORKERS": (8, 4, 2),
    "DDP_OVERLAP_GRAD_REDUCE": ("False", "True"),
    "DDP_OVERLAP_PARAM_GATHER": ("False", "True"),
    "VAL_MBS": (1, 2, 4),
    "FP8_DPA": (1, 0),
    "NVTE_FP8_DPA_BWD": (1, 0),
    "FP8_ACT": (0, 1),
    "FP8_AMAX_ALGO": ("max", "most_recent"),
    "FP8_AMAX_HISTORY": (32, 4),
}
"""The switches and their values, the published configuration's first."""
ARITHMETIC = ("FP8_DPA", "NVTE_FP8_DPA_BWD", "FP8_ACT", "FP8_AMAX_ALGO", "FP8_AMAX_HISTORY")
"""Switches that change the arithmetic."""
OF_EVALS = ("VAL_MBS",)
"""Switches that change only eval time, by eight times as much, because evals are an eighth of a run."""

LARGEST = 0.06
"""Largest effect of a level on ln(seconds of a run), drawn uniformly with either sign."""
PAIRS, INTERACTION_SD = 5, 0.012
"""Number of interacting pairs of levels, and the sd of their interaction."""
COSTS_SAMPLES = (0.05, 0.15)
"""Range added to ln(samples) by the one costly arithmetic level, which saves 2 to 6% of the seconds."""
HARMLESS_SD = 0.008
"""Sd of the effect of the other arithmetic levels on ln(samples)."""
STARTS_IN = 40.0
"""Seconds until a crashing level has failed."""
REFUSAL = "AssertionError: this configuration is not supported by the installed version of Transformer Engine"

Level = tuple[str, str]
"""(switch, one of its values as text)."""


@dataclass(frozen=True, kw_only=True)
class SiteSwitches:
    """The effects of one site's switches, drawn from its number."""

    number: int

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """Every value other than the published ones."""
        return tuple((name, str(value)) for name, values in LEVELS.items() for value in values[1:])

    @cached_property
    def _drawn(self) -> tuple[dict[Level, float], dict[tuple[Level, Level], float], dict[Level, float], Level]:
        """ln(seconds) of levels and of pairs of them, ln(samples) of levels, and the level that crashes."""
        rng = np.random.default_rng([self.number, 32])
        effects = {at: float(rng.uniform(0, LARGEST) * rng.choice([-1, 1])) for at in self.levels}
        arithmetic = [at for at in self.levels if at[0] in ARITHMETIC]
        costly = arithmetic[int(rng.integers(len(arithmetic)))]
        effects[costly] = -float(rng.uniform(0.02, LARGEST))
        samples = {at: float(rng.normal(0, HARMLESS_SD)) for at in arithmetic}
        samples[costly] = float(rng.uniform(*COSTS_SAMPLES))
        others = [at for at in self.levels if at != costly]
        dead = others[int(rng.integers(len(others)))]
        couples = [pair for pair in itertools.combinations(self.levels, 2) if pair[0][0] != pair[1][0]]
        chosen = rng.choice(len(couples), PAIRS, replace=False)
        return effects, {couples[i]: float(rng.normal(0, INTERACTION_SD)) for i in chosen}, samples, dead

    def changed(self, parameters: Mapping[str, object]) -> frozenset[Level]:
        """The levels of a trial that differ from the published ones."""
        stated = ((name, parameters.get(name, values[0]), values[0]) for name, values in LEVELS.items())
        return frozenset((name, str(value)) for name, value, usual in stated if str(value) != str(usual))

    def runs(self, levels: frozenset[Level]) -> bool:
        """Whether a trial with these levels reaches training."""
        return self._drawn[3] not in levels

    def applied(self, run: SimulatedRun, levels: frozenset[Level]) -> SimulatedRun:
        """The run with the effects of these levels."""
        effects, pairs, samples, _ = self._drawn
        of_both = [seconds for at in levels if at[0] not in OF_EVALS for seconds in [effects.get(at, 0.0)]]
        interaction = sum(seconds for (a, b), seconds in pairs.items() if a in levels and b in levels)
        of_evals = 8 * sum(effects.get(at, 0.0) for at in levels if at[0] in OF_EVALS)
        seconds = sum(of_both) + interaction
        machine = replace(
            run.machine,
            speed=run.machine.speed * math.exp(-seconds),
            eval_speed=run.machine.eval_speed * math.exp(-seconds - of_evals),
        )
        more = sum(samples.get(at, 0.0) for at in levels)
        return replace(run, machine=machine, site=replace(run.site, level=run.site.level + more))


@dataclass(frozen=True, kw_only=True)
class SwitchedRun:
    """A surface with switches: parameters of ``run``, and those of ``LEVELS``."""

    run: SimulatedRun
    switches: SiteSwitches

    def __call__(self, parameters: Mapping[str, object], seed: int) -> Iterator[tuple[float, str]]:
        """The job's log: (virtual seconds since its start, line)."""
        levels = self.switches.changed(parameters)
        lines = self.switches.applied(self.run, levels)(parameters, seed)
        if self.switches.runs(levels):
            yield from lines
            return
        yield next(lines)
        yield STARTS_IN, REFUSAL

    def variant(self, number: int) -> SwitchedRun:
        """Another site, with its own machine, convergence and switches."""
        return replace(self, run=self.run.variant(number), switches=SiteSwitches(number=number))

    def outcome(self, parameters: Mapping[str, object], seed: int) -> RunOutcome:
        """One run, with the randomness of this seed."""
        levels = self.switches.changed(parameters)
        run_outcome = self.switches.applied(self.run, levels).outcome(parameters, seed)
        if self.switches.runs(levels):
            return run_outcome
        return replace(run_outcome, evals=(), train=(), end="oom", end_seconds=STARTS_IN)

    def expected_score(self, parameters: Mapping[str, object], draws: int = DRAWS) -> float:
        """As :meth:`SimulatedRun.expected_score`; infinite if the run crashes."""
        levels = self.switches.changed(parameters)
        if not self.switches.runs(levels):
            return math.inf
        return self.switches.applied(self.run, levels).expected_score(parameters, draws)


# Simulated trials, for ``launcher = "simulated"``: the surface generates the log.

PARAMETERS = "parameters.json"
"""File of a job with its parameters and seed, which the launcher reads."""


class SurfaceSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "surface"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    surface: str = Field(description=f"path/to/module.py:function, or a shipped one: {', '.join(SHIPPED)}")
    cluster_nodes: int | None = Field(None, ge=1, description="nodes of the simulated cluster [enough for parallel]")
    queue_minutes: float = Field(0, ge=0, description="mean wait of a job in the queue beside waiting for nodes")
    node_failures_per_1000_hours: float = Field(0, ge=0, description="failures of one node in 1,000 hours of running")
    preemptions_per_1000_hours: float = Field(0, ge=0, description="preemptions of a job in 1,000 hours of running")


class SurfaceWorkload(Workload):
    """Trials of a surface."""

    Settings = SurfaceSettings
    ends_probes: ClassVar[bool] = True

    def __init__(self, study: Study, settings: SurfaceSettings) -> None:
        self._study = study
        self._settings = settings

    def job(self, proposal: Proposal, folder: Path) -> Job:
        """A job whose only file states the parameters and the seed."""
        record = {"parameters": dict(self.written(proposal)), "seed": proposal.seed}
        site = self._study.site
        return Job(
            name=self._study.job_name(proposal.number, proposal.attempt),
            folder=folder,
            files={PARAMETERS: json.dumps(record, indent=1) + "\n"},
            argv=("simulated", self._settings.surface),
            log=AttemptPaths(folder).log,
            resources=Resources(
                nodes=self._nodes(proposal), gpus_per_node=site.gpus_per_node, minutes=self._study.budget.trial_minutes
            ),
        )

    def written(self, proposal: Proposal) -> Record:
        """The simulated parameters. A probe ends after two blocks, each with its eval.

        Without VAL_CHECK_INTERVAL a block is as long as in MLPerf's probes.
        """
        parameters = dict(proposal.parameters)
        if proposal.probe:
            batch = int(parameters.get("GBS", 1))
            block = int(parameters.get("VAL_CHECK_INTERVAL") or PROBE_STEPS * batch)
            steps = math.ceil(block / batch)
            parameters |= {"MAX_STEPS": 2 * steps, "VAL_CHECK_INTERVAL": block, "SKIP_EVALS": 0}
        return Record(stated=parameters)

    def _nodes(self, proposal: Proposal) -> int:
        return self._study.search_space.node_count(proposal.parameters)

    def reader(self, proposal: Proposal | None = None) -> LogReader:
        """A reader of MLLOG, which surfaces print."""
        return MllogReader()

    def export(self, proposal: Proposal, provenance: tuple[str, ...]) -> Export:
        """The configuration as exports, with a comment that it was simulated."""
        site = self._study.site
        layout = layout_of(proposal.parameters)
        name = config_file_name(site.system, self._nodes(proposal), max(1, site.gpus_per_node), layout)
        notes = (*provenance, f"found on the simulated surface {self._settings.surface}, not on a machine")
        return Export(files={name: render(proposal.parameters, comments=notes)}, usage=f"source {name}")
