"""Registry of ``search.sampler`` and the features of each sampler. Libraries are imported when a sampler is created."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from lora_tune.base.errors import SetupError
from lora_tune.base.registry import SAMPLERS
from lora_tune.config.study import Study
from lora_tune.search.objectives import objective_of

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from lora_tune.search.grey_box.features import Coordinates
    from lora_tune.search.grey_box.sampler import GreyBoxSampler
    from lora_tune.search.observations import Observation
    from lora_tune.search.optuna_samplers import WarmTPESampler
    from lora_tune.store.records import StudyRecords

    OldRuns = Callable[[], Sequence[Observation]]


# Optional features of a sampler, tested with ``isinstance``.


@runtime_checkable
class Recommends(Protocol):
    """A sampler with a model that can recommend."""

    def recommend(self, study: optuna.Study) -> tuple[dict[str, Any], float, str]:
        """The best configuration: values, expected objective, a sentence. A pure function of the trials.

        Raises ValueError if there is no data yet for a recommendation.
        """
        ...


@runtime_checkable
class EstimatesGain(Protocol):
    """A sampler that can estimate the gain of another node-hour."""

    def expected_gain(self, study: optuna.Study) -> float | None:
        """Expected improvement of the best by the next node-hour, as a share of the score; None if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerKind:
    """A sampler selectable by ``search.sampler``.

    Parameters
    ----------
    make : callable
        ``make(study, old_runs)`` returns an Optuna sampler; ``old_runs()`` returns observations of ingested logs.
    knows_gain : bool
        It is an :class:`EstimatesGain`, so that ``budget.stop_below`` can end the sweep.
    proposes_probes : bool
        It proposes short runs that measure a layout's speed (``search.probes``).
    takes_old_runs : bool
        It starts from ingested logs and published results.
    several_node_counts : bool
        It can compare trials on different numbers of nodes.
    draws_first : bool
        The first ``search.startup_trials`` proposals are random.
    draws_always : bool
        All proposals are random.
    proposes : bool
        It proposes by itself; else it only completes requested points.
    objectives : tuple of str, or None
        Scores that it models; None: any, and two at a time.
    recommends_unrun : bool
        Its model of seconds to the target recommends (``Recommends``), possibly a configuration that no trial has run.
        For other samplers the recommendation uses only results, shrunk towards neighbours (``search.recommendation``).
    """

    make: Callable[[Study, OldRuns], BaseSampler]
    recommends_unrun: bool = False
    knows_gain: bool = False
    proposes_probes: bool = False
    takes_old_runs: bool = False
    several_node_counts: bool = True
    draws_first: bool = False
    draws_always: bool = False
    objectives: tuple[str, ...] | None = None
    proposes: bool = True


def sampler_kind(study: Study) -> SamplerKind:
    """The study's sampler kind; a plain class or function counts as one that creates samplers.

    Raises InputError for an unknown name.
    """
    kind = SAMPLERS.load(study.search.sampler)
    return kind if isinstance(kind, SamplerKind) else SamplerKind(make=kind)


def make_sampler(
    study: Study, old_runs: OldRuns = tuple, *, begun: int = 0, start: Mapping[str, Any] | None = None
) -> BaseSampler:
    """Create the study's sampler. old_runs: returns the current ingested runs, from which some samplers start.

    begun: number of existing trials, part of the seed so that random draws are not repeated. start: tuned values of the
    user's configuration, which counts as the first enqueued point.
    """
    points = (dict(start), *study.search.enqueue) if start else study.search.enqueue
    search = study.search.model_copy(update={"seed": study.search.seed + begun, "enqueue": points})
    seeded = study.model_copy(update={"search": search})
    built: BaseSampler = SAMPLERS.make(search.sampler, sampler_kind(study).make, seeded, old_runs)
    return built


def sampler_of(study: Study, sweep: StudyRecords) -> BaseSampler:
    """The study's sampler, with ingested runs and the user's configuration from the records."""
    from lora_tune.search import priors

    return make_sampler(study, lambda: priors.observations(sweep.priors, study.target), start=start_of(sweep))


def start_of(sweep: StudyRecords) -> Mapping[str, Any] | None:
    """Tuned values of the user's configuration before the sweep; None if it is outside the space."""
    return next((t.tuned for t in sweep.trials.values() if t.metrics.base is not None and t.tuned), None)


def _tpe(study: Study, old_runs: OldRuns) -> BaseSampler:
    if study.objective.second is not None:
        from optuna.samplers import TPESampler

        return TPESampler(seed=study.search.seed, n_startup_trials=study.search.startup_trials, multivariate=True)
    return _warm_tpe(study, old_runs)


def _warm_tpe(study: Study, old_runs: OldRuns) -> WarmTPESampler:
    from lora_tune.search.optuna_samplers import WarmTPESampler

    # constant_liar keeps parallel proposals apart while their results are pending.
    return WarmTPESampler(
        old_trials=partial(_old_trials, study, old_runs),
        seed=study.search.seed, n_startup_trials=study.search.startup_trials, multivariate=True, constant_liar=True,
    )  # fmt: skip


def _old_trials(study: Study, old_runs: OldRuns) -> list[FrozenTrial]:
    """Old runs as finished Optuna trials; empty if the objective is a time, which depends on the machine."""
    from optuna.trial import create_trial

    if objective_of(study).timed:
        return []
    distributions = study.search_space.distributions()
    created = []
    for run in old_runs():
        losses = [e.loss for e in run.evals if math.isfinite(e.loss)]
        params = {name: run.values[name] for name in distributions if name in run.values}
        if not losses or len(params) < len(distributions):
            continue
        loss = losses[-1] if study.objective.score == "final_value" else min(losses)
        with contextlib.suppress(ValueError):  # Optuna's error for values outside the space
            created.append(create_trial(params=params, distributions=distributions, value=study.shown(loss)))
    return created


def takes_old_runs(study: Study) -> bool:
    """Whether the study's search uses old runs."""
    kind = sampler_kind(study)
    return kind.takes_old_runs and (kind.recommends_unrun or not objective_of(study).timed)


def _lowest(study: Study, old_runs: OldRuns) -> BaseSampler:
    """Sampler for the lowest loss: Optuna's Gaussian process if torch is installed and trials are few, else TPE."""
    objective = objective_of(study)
    modelled = objective.judges_evals and not objective.has_target and study.objective.second is None
    if not modelled or importlib.util.find_spec("torch") is None:
        return _tpe(study, old_runs)
    return _ordered_gp(study, old_runs, later=_warm_tpe(study, old_runs))


def _ordered_gp(study: Study, old_runs: OldRuns, later: BaseSampler | None = None) -> BaseSampler:
    from lora_tune.search.optuna_samplers import OrderedGPSampler

    return OrderedGPSampler(
        seed=study.search.seed, n_startup_trials=study.search.startup_trials, later=later,
        old_trials=partial(_old_trials, study, old_runs),
    )  # fmt: skip


def _random(study: Study, old_runs: OldRuns) -> BaseSampler:
    from optuna.samplers import RandomSampler

    return RandomSampler(seed=study.search.seed)


def _gp(study: Study, old_runs: OldRuns) -> BaseSampler:
    if importlib.util.find_spec("torch") is None:
        raise SetupError('search.sampler = "gp" needs torch, which is not installed here: pip install "lora-tune[gp]"')
    if study.objective.second is None:
        return _ordered_gp(study, tuple)
    from optuna.samplers import GPSampler

    return GPSampler(seed=study.search.seed, n_startup_trials=study.search.startup_trials)


def _cmaes(study: Study, old_runs: OldRuns) -> BaseSampler:
    from optuna.samplers import CmaEsSampler

    return CmaEsSampler(seed=study.search.seed, n_startup_trials=study.search.startup_trials)


def _grey_box(study: Study, old_runs: OldRuns) -> BaseSampler:
    from lora_tune.search.grey_box.sampler import GreyBoxSampler

    return _time_to_target(study, old_runs, GreyBoxSampler) if objective_of(study).timed else _throughput(study)


def _time_to_target(study: Study, old_runs: OldRuns, make: Callable[..., BaseSampler]) -> BaseSampler:
    """Call ``make`` with the study's rules and the public results that apply."""
    from lora_tune.search.grey_box import objective
    from lora_tune.search.physics import physics_of
    from lora_tune.search.published import CLOSED_DIVISION

    space, public = study.search_space, study.objective.curves == "llama2_70b_lora"
    benchmark = study.benchmark
    gridded = study.division == "closed" and benchmark is not None and benchmark.progress == "samples_count"
    scored = study.objective.score == "mlperf_score"
    goal = objective.Goal(
        target=study.target,
        schedule=partial(objective.closed_schedule, benchmark=benchmark) if gridded else None,
        reference_samples=partial(objective.rcp_mean, benchmark=benchmark) if scored else objective.no_reference,
        family=objective.public_family if public else objective.no_family,
        nodes=study.site.nodes,
        limit_seconds=60 * study.budget.trial_minutes,
    )
    return make(
        space.distributions(),
        goal=goal,
        gpus=space.gpus,
        fixed=space.fixed,
        roles=space.roles(),
        defaults={**(baseline_point(study) or {}), **(CLOSED_DIVISION if public else {})},
        prior=lambda: (*published_about(study), *old_runs()),
        conditions=space.conditions,
        full_fine_tuning_lr=study.search.full_fine_tuning_lr,
        needs=physics_of(study),
        probes=study.probes,
        capped=study.pruning.cap,
        seed=study.search.seed,
    )


def published_about(study: Study) -> tuple[Observation, ...]:
    """Published results that apply to this study: it uses LoRA's public curves, or keeps its benchmark's rules and
    target.

    An open-division study may use a benchmark's name for another training.
    """
    from lora_tune.search.published import llama2_70b_lora, of_benchmark

    if study.objective.curves == "llama2_70b_lora":
        return llama2_70b_lora()
    benchmark = study.benchmark
    standard_target = (
        study.division == "closed" and benchmark is not None and study.objective.target == benchmark.target
    )
    return of_benchmark(benchmark.name) if standard_target and benchmark is not None else ()


def _auto(study: Study, old_runs: OldRuns) -> BaseSampler:
    """The grey box for seconds to the target, if layouts or published results inform it.

    The throughput sampler for throughput; a Gaussian process for the lowest loss; TPE for all other objectives, for
    varying node counts, and for scripts without prior knowledge, unless ``budget.stop_below`` needs an expected gain,
    which TPE cannot provide.
    """
    if not objective_of(study).timed or study.objective.second is not None:
        only_throughput = study.objective.score == "throughput" and study.objective.second is None
        return _throughput(study) if only_throughput else _lowest(study, old_runs)
    if not _has_model(study, old_runs):
        return _warm_tpe(study, old_runs)
    from lora_tune.search.grey_box.sampler import GreyBoxSampler

    start = baseline_point(study)
    make = partial(GreyBoxSampler, start=start)
    if study.search_space.switches() and study.probes and start is not None:
        return _time_to_target(study, old_runs, partial(_staged, study=study, start=start, make=make))
    return _time_to_target(study, old_runs, make)


def _staged(
    distributions: Mapping[str, BaseDistribution],
    *,
    study: Study,
    start: Mapping[str, Any],
    make: Callable[..., GreyBoxSampler],
    **settings: Any,
) -> BaseSampler:
    """Switches by probes first, then the sampler from ``make`` for all other parameters. settings: of the grey box."""
    from lora_tune.search.stages.sampler import StagesSampler, usual_costs

    def others(spread: Mapping[str, BaseDistribution]) -> GreyBoxSampler:
        """The grey box of some parameters; all others stay at the start."""
        fixed = {**settings["fixed"], **{n: v for n, v in start.items() if n not in spread}}
        return make(spread, **{**settings, "fixed": fixed, "start": {n: start[n] for n in spread}})

    return StagesSampler(
        distributions,
        switches=study.search_space.switches(),
        start=start,
        goal=settings["goal"],
        grey_box=others,
        costs=usual_costs(study),
        min_gain=study.budget.stop_below,
        seed=study.search.seed,
    )


def _has_model(study: Study, old_runs: OldRuns) -> bool:
    """Whether layouts, published results or old runs inform the grey box."""
    known = study.search.full_fine_tuning_lr is not None or bool(published_about(study)) or bool(old_runs())
    has_model = known or _coordinates(study).layout is not None or study.budget.stop_below is not None
    return has_model and not study.search_space.varies_nodes


def repeats_leader(study: Study) -> bool:
    """Whether the leader is repeated (``search.noise``): for samplers that do not model the noise between runs. The
    grey box proposes repeats itself, random samplers draw only what the study asks for, and throughput has almost no
    noise."""
    kind = sampler_kind(study)
    if study.objective.second is not None or study.objective.score == "throughput" or kind.draws_always:
        return False
    if study.search.sampler == "auto":
        return not objective_of(study).timed or not _has_model(study, tuple)
    return kind.draws_first


def baseline_point(study: Study, start: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
    """The first of ``start`` and the enqueued points with a value for every tuned parameter that exists at it.

    A switch missing from a point has its first value.
    """
    space = study.search_space
    tuned, conditions = space.distributions().keys(), space.conditions
    usual = {name: value for name, value in space.corner().items() if name in space.switches()}
    points = ({**usual, **conditions.rested(point)} for point in (start or {}, *study.search.enqueue) if point)
    return next((point for point in points if point.keys() >= tuned), None)


def _coordinates(study: Study) -> Coordinates:
    """The study's parameters by role: as stated, else by their names."""
    from lora_tune.search.grey_box.features import Coordinates

    space = study.search_space
    return Coordinates(
        distributions=space.distributions(), gpus=space.gpus, fixed=space.fixed, roles=space.roles(),
        conditions=space.conditions,
    )  # fmt: skip


def _throughput(study: Study) -> BaseSampler:
    """The throughput sampler, which models no convergence."""
    from lora_tune.search.physics import physics_of
    from lora_tune.search.throughput import ThroughputSampler

    space = study.search_space
    return ThroughputSampler(
        space.distributions(),
        gpus=space.gpus,
        seed=study.search.seed,
        physics=physics_of(study),
        conditions=space.conditions,
        unit=study.progress_unit,
    )


TPE = SamplerKind(make=_tpe, draws_first=True, takes_old_runs=True)
RANDOM = SamplerKind(make=_random, draws_always=True)
REQUESTS = SamplerKind(make=_random, draws_always=True, proposes=False)
GP = SamplerKind(make=_gp, draws_first=True)
CMAES = SamplerKind(make=_cmaes, draws_first=True)
GREY_BOX = SamplerKind(
    make=_grey_box,
    recommends_unrun=True,
    knows_gain=True,
    proposes_probes=True,
    takes_old_runs=True,
    several_node_counts=False,
    objectives=("time_to_target", "mlperf_score", "throughput"),
)
AUTO = SamplerKind(
    make=_auto,
    recommends_unrun=True,
    knows_gain=True,
    proposes_probes=True,
    takes_old_runs=True,
)
