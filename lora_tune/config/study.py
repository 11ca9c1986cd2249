"""The study: one TOML file, validated, immutable and hashed."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from lora_tune.base.errors import InputError, StudyError
from lora_tune.base.registry import LOG_READERS, OBJECTIVES, SAMPLERS, WORKLOADS
from lora_tune.base.text import counted, number
from lora_tune.config.layout import with_minibs
from lora_tune.config.objective import LORA_TARGET, ObjectiveSettings, check_goal, filled_in, ruleset_of
from lora_tune.config.parameters import FormulaError, LayoutParameter, Parameter, Value, as_parameter
from lora_tune.config.problems import Section, first_problem, line_shown
from lora_tune.config.secrets import Secret, without_values, written_in
from lora_tune.config.space import Space, SpaceError, check_space, range_text, within
from lora_tune.config.tables import CHEAP_TRIALS, DEFAULT_AUDIT, Budget, Pruning, Search, Site, WorkloadTable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from lora_tune.logs.run import Eval
    from lora_tune.mlperf.benchmark import Benchmark
    from lora_tune.mlperf.gate import Violation


class Study(Section):
    """A whole study. Load it with :func:`load_study`; it never changes afterwards."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="folder under sweeps/ and job prefix")
    description: str = Field("", description="a line for people")
    division: Literal["open", "closed"] = Field("open", description="closed: MLPerf's rules are enforced")
    workload: WorkloadTable
    site: Site = Field(default_factory=lambda: Site.model_validate({}))
    space: dict[str, Parameter] = Field(description="what may vary: LR = { type, low, high } and so on")
    objective: ObjectiveSettings = Field(default_factory=ObjectiveSettings)
    search: Search = Field(default_factory=Search)
    pruning: Pruning = Field(default_factory=Pruning)
    budget: Budget

    @field_validator("space", mode="before")
    @classmethod
    def _bare_values_are_fixed(cls, table: Any) -> Any:
        return {k: as_parameter(v) for k, v in table.items()} if isinstance(table, dict) else table

    @model_validator(mode="before")
    @classmethod
    def _goal_filled_in(cls, table: Any) -> Any:
        """Fill in the target of a named benchmark, and the score of a metric without target."""
        if not isinstance(table, dict) or not isinstance(table.get("objective", {}), dict):
            return table
        return {**table, "objective": filled_in(table.get("objective", {}), table.get("workload"))}

    @model_validator(mode="after")
    def _batches_of_enqueued_layouts(self) -> Study:
        """Replace the batch in enqueued layouts by MINIBS, which follows from the site's GPUs."""
        space = self.search_space
        names = {n for n, p in self.space.items() if isinstance(p, LayoutParameter)}
        points = tuple(
            {n: with_minibs(str(v), space.gpus, space.gpus_per_node) if n in names else v for n, v in point.items()}
            for point in self.search.enqueue
        )
        return self.model_copy(update={"search": self.search.model_copy(update={"enqueue": points})})

    @property
    def benchmark(self) -> Benchmark | None:
        """The MLPerf benchmark whose rules and score apply, under :meth:`ruleset`; None if there is none.

        Raises InputError if the ruleset does not include it.
        """
        from lora_tune.mlperf.benchmark import LORA, find_benchmark

        name = named_benchmark(self)
        if name is None and self.objective.curves != LORA and self.division == "open":
            return None
        return find_benchmark(name or LORA, self.ruleset(name or LORA))

    def ruleset(self, benchmark: str) -> str | None:
        """The round whose rules apply to ``benchmark``; None for the newest. See :func:`ruleset_of`."""
        return ruleset_of(self.objective.ruleset, self.workload, benchmark)

    @property
    def rising(self) -> bool:
        """Whether larger is better; evals are then stored as their distance to :attr:`ceiling`."""
        return self.objective.direction == "maximize"

    @property
    def ceiling(self) -> float:
        """Rising evals are stored as this minus their value: 1 if the target is between 0 and 1, else 0."""
        target = self.objective.target
        return 1.0 if target is not None and 0 < target < 1 else 0.0

    @property
    def target(self) -> float:
        """The stored eval value at or below which a run has reached the target; -inf without a target."""
        if self.objective.target is None:
            return -math.inf
        return self.ceiling - self.objective.target if self.rising else self.objective.target

    @property
    def stops_at_target(self) -> bool:
        """Whether a trial that trains beyond the target is stopped."""
        setting = self.workload.stop_at_target
        return getattr(WORKLOADS.load(self.workload.kind), "stops_at_target", True) if setting is None else setting

    @property
    def probes(self) -> bool:
        """Whether the search may propose short runs that measure a layout's speed; each counts as a trial."""
        ends = getattr(WORKLOADS.load(self.workload.kind), "ends_probes", False)
        return ends and self.budget.trials is None if self.search.probes is None else self.search.probes

    @property
    def measure(self) -> str:
        """The name of the eval metric, for display."""
        return self.objective.metric or ("eval accuracy" if self.rising else "eval loss")

    @property
    def goal(self) -> str:
        """The metric with its target, for display."""
        return self.measure if self.objective.target is None else f"{self.measure} {self.objective.target:g}"

    def shown(self, loss: float) -> float:
        """A stored eval value as the log printed it."""
        return round(self.ceiling - loss, 12) if self.rising else loss

    def eval_text(self, point: Eval) -> str:
        """An eval as text: "eval loss 0.4832 at 640 samples"."""
        return f"{self.measure} {number(self.shown(point.loss))} at {self.counted(point.samples)}"

    def counted(self, samples: float) -> str:
        """A run's progress as text: "640 samples", "1 step"."""
        return counted(samples, self.progress_unit)

    @property
    def log_kind(self) -> str:
        """The log format of its trials, a name in ``base.registry.LOG_READERS``."""
        return self._log()[0]

    @property
    def progress_unit(self) -> str:
        """The unit of progress in the log: samples, steps or epochs; samples if the format has no setting for it."""
        kind, settings = self._log()
        counts = getattr(LOG_READERS.load(kind), "counts", None)
        return str(counts(settings)) if counts else "samples"

    def samples_a_step(self, parameters: Mapping[str, Value]) -> float | None:
        """Samples of one optimizer step in the log's unit; None if neither log settings nor trial state them."""
        kind, settings = self._log()
        known = getattr(LOG_READERS.load(kind), "settings", None) or {}
        batch = settings.get("global_batch_size", 1.0) if "global_batch_size" in known else "GBS"
        samples = parameters.get(batch) if isinstance(batch, str) else batch
        return float(samples) if isinstance(samples, int | float) else None

    def _log(self) -> tuple[str, dict[str, Any]]:
        """The log's format and its settings."""
        table = (self.workload.model_extra or {}).get("log")
        settings = dict(table) if isinstance(table, dict) else {}
        return str(settings.pop("kind", "mllog")), settings

    @property
    def search_space(self) -> Space:
        """The space on this study's GPUs."""
        return Space(self.space, self.site.nodes, self.site.gpus_per_node)

    @property
    def audit_share(self) -> float:
        """The share of condemned trials that continue to their end (``pruning.audit``, or its default)."""
        if self.pruning.audit is not None:
            return self.pruning.audit
        return DEFAULT_AUDIT if self._affordable_trials() >= CHEAP_TRIALS else 0.0

    def _affordable_trials(self) -> float:
        """Minimum number of trials within the budget, each assumed to use its whole time limit."""
        budget, minutes = self.budget, self.budget.trial_minutes
        limits = [float(budget.trials)] if budget.trials is not None else []
        if budget.node_hours is not None:
            limits.append(budget.node_hours * 60 / (minutes * self.site.nodes))
        if budget.wall_hours is not None:
            limits.append(budget.wall_hours * 60 / minutes * budget.parallel)
        return min(limits, default=0.0)

    @property
    def digest(self) -> str:
        """Twelve hex digits of SHA-256 over the validated content, independent of comments and order of tables."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def job_name(self, trial: int, attempt: int) -> str:
        """The name of an attempt's job, unique in this study."""
        return f"{self.name}-{trial:04d}-{attempt}"

    def trial_seed(self, number: int) -> int:
        """The seed of trial ``number``."""
        return self.search.seed * 1000 + number + 1

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> Study:
        """A copy with command-line options overriding its sections, validated again.

        options: such as ``{"budget": {"trials": 4}}``; None values are ignored. Raises InputError.
        """
        data = self.model_dump(mode="python")
        for section, values in options.items():
            data[section] = {**data[section], **{k: v for k, v in values.items() if v is not None}}
        try:
            return Study.model_validate(data)
        except ValidationError as error:
            key, problem = first_problem(error, Study)
            raise InputError(f"option {key}: {problem}") from error


SHIPPED = Path(__file__).parents[1] / "studies"
"""The shipped studies; in a checkout, the folder ``studies`` itself."""


def study_place(name: str, folder: Path = Path("studies")) -> Path:
    """The path of ``--study NAME``, which may not exist: a .toml path, else in ``folder``, else a shipped study."""
    if name.endswith(".toml"):
        return Path(name)
    own, shipped = folder / f"{name}.toml", SHIPPED / f"{name}.toml"
    return shipped if not own.is_file() and shipped.is_file() else own


def known_studies(folder: Path = Path("studies"), inside: str = "") -> list[str]:
    """The study names in ``folder`` and among the shipped ones; ``inside``: only those in this subfolder
    ("mlperf/")."""
    return sorted({inside + path.stem for place in (folder, SHIPPED) for path in (place / inside).glob("*.toml")})


_OTHER_FILES = (".yaml", ".yml", ".json", ".py", ".sh")


def find_study(name: str, folder: Path = Path("studies")) -> Path:
    """The file of ``--study NAME``, see :func:`study_place`. Raises StudyError if it does not exist."""
    path = study_place(name, folder)
    if path.is_file():
        return path
    known = known_studies(folder, inside=name[: name.rfind("/") + 1])
    if not name.endswith(".toml") and (not known or Path(name).is_file() or Path(name).suffix in _OTHER_FILES):
        raise StudyError(Path(name), "", "is not a study: a study file ends in .toml; lora-tune init writes one")
    if name.endswith(".toml"):
        beside = sorted(str(other) for other in path.parent.glob("*.toml") if other.name != "pyproject.toml")
        near = difflib.get_close_matches(str(path), beside, n=1)
        hint = f"did you mean {near[0]}?" if near else f"study files there: {', '.join(beside) or 'none'}"
        raise StudyError(path, "", f"there is no such file; {hint}; lora-tune init writes one for your script")
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known studies: {', '.join(known) or 'none here'}"
    raise StudyError(path, "", f"there is no study {name!r}; {hint}")


def load_study(path: Path) -> Study:
    """Read and validate a study file. Raises StudyError with the file, the key and the remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(path, "", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StudyError(path, "", f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    check_goal(text, path)
    return parse_study(text, path)


def parse_study(text: str, path: Path) -> Study:
    """The study in ``text``; ``path`` names it in errors, and gives its default name and the folder of site
    profiles."""
    try:
        table = tomllib.loads(text.removeprefix("\ufeff"))  # Windows editors add a byte order mark
    except ValueError as error:  # an integer with too many digits raises a plain ValueError
        raise StudyError(path, "", f"is not valid TOML: {error}{line_shown(str(error), text)}") from error
    table.setdefault("name", path.stem)
    if isinstance(table.get("site"), dict):
        table["site"] = _with_profile(table["site"], path)
    try:
        study = Study.model_validate(table)
    except ValidationError as error:
        key, problem = first_problem(error, Study)
        raise StudyError(path, key, problem) from error
    _check_whole(study, path)
    return study


def _with_profile(site: dict[str, Any], path: Path) -> dict[str, Any]:
    """The site table merged over the profile file that it names, if any (a path relative to the study file)."""
    profile = site.get("profile")
    if profile is None:
        return site
    file = path.parent / str(profile)
    try:
        base = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        known = sorted(str(p.relative_to(path.parent)) for p in path.parent.glob("sites/*.toml"))
        raise StudyError(
            path, "site.profile", f"{file} cannot be read; known profiles: {', '.join(known) or 'none here'}"
        ) from error
    except UnicodeDecodeError as error:
        raise StudyError(file, "", f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except ValueError as error:
        raise StudyError(file, "", f"is not valid TOML: {error}") from error
    return {**base, **site}


def study_changes(before: Study, after: Study) -> list[str]:
    """Differences, one line per key: ``space.LR.high: 0.01 -> 0.02``."""
    old, new = _flat("", before.model_dump(mode="json")), _flat("", after.model_dump(mode="json"))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent")
    ]


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if not (isinstance(value, dict) and value):
        return {prefix: value}
    inner = ((f"{prefix}.{key}" if prefix else str(key), v) for key, v in value.items())
    return {path: leaf for key, v in inner for path, leaf in _flat(key, v).items()}


# The copy of a study that a sweep keeps omits secret values; these are read again from the study file.


def secrets_written_in(study: Study) -> list[str]:
    """The keys of secrets whose values are in the study's text."""
    return [key for key, _ in written_in(study.model_dump(mode="python"))]


def text_to_keep(text: str, study: Study, file: Path) -> str:
    """A study's text for the sweep's copy, without secret values. Raises StudyError, see without_values."""
    return without_values(text, study.model_dump(mode="python"), file)


def with_secrets_of(study: Study, file: Path) -> Study:
    """A study from a kept text, with secret values from its file if that exists."""
    data = study.model_dump(mode="python")
    if not file.is_file() or not any(secret.stored_without_value for _, secret in written_in(data)):
        return study
    _fill(data, load_study(file).model_dump(mode="python"))
    return Study.model_validate(data)


def _fill(kept: dict[str, Any], whole: dict[str, Any]) -> None:
    for key, value in kept.items():
        other = whole.get(key)
        if key == "secrets" and isinstance(other, dict):
            for name, source in value.items():
                if name in other and Secret.model_validate(source).stored_without_value:
                    value[name] = other[name]
        elif isinstance(value, dict) and isinstance(other, dict):
            _fill(value, other)


# The MLPerf benchmark of a study, and checks across sections.


def named_benchmark(study: Study) -> str | None:
    """The MLPerf benchmark that a study names, in its objective or its workload."""
    name = study.objective.benchmark or (study.workload.model_extra or {}).get("benchmark")
    return None if name is None else str(name)


def goal_of(study: Study) -> str:
    """The MLPerf benchmark whose target trials should reach; "" if the study has its own goal or none."""
    from lora_tune.mlperf.benchmark import LORA

    if not getattr(OBJECTIVES.load(study.objective.score), "has_target", True):
        return ""
    if (name := named_benchmark(study)) is not None:
        return name
    own = getattr(WORKLOADS.load(study.workload.kind), "needs_goal", False)
    return LORA if study.objective.target == LORA_TARGET and not (own or study.rising) else ""


def _check_whole(study: Study, path: Path) -> None:
    """Checks that involve more than one section."""
    space = study.search_space
    try:
        check_space(space)
    except SpaceError as error:
        raise StudyError(path, f"space.{error.key}", str(error)) from error
    budget = study.budget
    if budget.trials is None and budget.node_hours is None and budget.wall_hours is None:
        raise StudyError(path, "budget", "no end: give at least one of trials, node_hours and wall_hours")
    try:
        violations = closed_violations(study)
    except FormulaError as error:  # for other tuned values than the one point that check_space() computes
        raise StudyError(path, f"space.{error.name}", str(error)) from error
    for violation in violations:
        if violation.fatal:
            raise StudyError(path, f"space.{violation.name}", violation.sentence)
    _check_objective(study, path)
    if study.objective.score == "mlperf_score" and study.benchmark is None:
        raise StudyError(path, "objective.score", "mlperf_score needs objective.benchmark beside it")
    _check_search(study, path)


def _check_search(study: Study, path: Path) -> None:
    """Check the search settings against the other sections."""
    space, budget = study.search_space, study.budget
    sampler = SAMPLERS.load(study.search.sampler)
    if budget.stop_below is not None and not getattr(sampler, "knows_gain", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler does not know its expected gain'
        raise StudyError(path, "budget.stop_below", problem)
    auto = study.search.sampler == "auto"
    if budget.stop_below is not None and auto and space.varies_nodes and study.objective.score != "throughput":
        problem = "no search for a time knows its expected gain where NODES varies; remove it, or tune one size"
        raise StudyError(path, "budget.stop_below", problem)
    if study.search.probes and not getattr(sampler, "proposes_probes", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler does not propose them'
        raise StudyError(path, "search.probes", problem)
    _check_stated_rate(study, path)
    models = getattr(sampler, "objectives", None)
    if models is not None and (study.objective.score not in models or study.objective.second is not None):
        problem = f"{study.search.sampler} models {', '.join(models)} alone; use tpe"
        raise StudyError(path, "search.sampler", problem)
    if space.varies_nodes and not getattr(sampler, "several_node_counts", True):
        problem = f"{study.search.sampler} models trials of one size, and NODES varies here; use tpe"
        raise StudyError(path, "search.sampler", problem)
    tuned, conditions = space.distributions(), space.conditions
    for index, point in enumerate(study.search.enqueue):
        absent = conditions.absent(point)
        for key, value in point.items():
            if key not in tuned:
                raise StudyError(
                    path, f"search.enqueue.{index}.{key}", f"is not tuned; tuned are {', '.join(sorted(tuned))}"
                )
            if not within(tuned[key], value):
                raise StudyError(path, f"search.enqueue.{index}.{key}", f"{value!r} is not {range_text(tuned[key])}")
            if key in absent:
                problem = f"exists only where {conditions.describe(key)}; remove it from this point"
                raise StudyError(path, f"search.enqueue.{index}.{key}", problem)


def _check_stated_rate(study: Study, path: Path) -> None:
    """Check that search.full_fine_tuning_lr has an effect: a rate is tuned, and no published results exist."""
    problem = ""
    if study.search.full_fine_tuning_lr is None:
        return
    if study.benchmark is not None or study.objective.curves == "llama2_70b_lora":
        problem = "the search starts from published results here; remove it"
    elif not {name.upper() for name in study.search_space.distributions()} & {"LR", "LEARNING_RATE"}:
        problem = "no LR or LEARNING_RATE is tuned; remove it, or tune one"
    elif not getattr(SAMPLERS.load(study.search.sampler), "proposes_probes", False):
        problem = 'needs search.sampler = "auto" or "grey_box": this sampler has no use for it'
    if problem:
        raise StudyError(path, "search.full_fine_tuning_lr", problem)


def closed_violations(study: Study) -> list[Violation]:
    """Violations of MLPerf's closed division, including warnings; empty in the open division."""
    benchmark = study.benchmark
    if study.division == "open" or benchmark is None:
        return []
    from lora_tune.mlperf import gate

    space = study.search_space
    ends = {name: _ends(d) for name, d in space.distributions().items()}
    return gate.check_space(benchmark, ends, space.each_layout(), space.following(ends), space.each_end(ends))


def _ends(distribution: BaseDistribution) -> tuple[Value, ...]:
    """The lowest and highest value of a distribution, or its choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)  # type: ignore[arg-type]  # studies hold no None
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high


def _check_objective(study: Study, path: Path) -> None:
    """Check that the parts of the objective fit together."""
    settings = study.objective
    kinds = [OBJECTIVES.load(name) for name in (settings.score, settings.second) if name is not None]
    if settings.target is not None and getattr(kinds[0], "has_budget", False):
        problem = f'{settings.score} has no target; remove it, or write score = "time_to_target"'
        raise StudyError(path, "objective.target", problem)
    if settings.within and not getattr(kinds[0], "has_budget", False):
        problem = f"{settings.score} has no budget within a trial; it goes with best_value and final_value"
        raise StudyError(path, "objective.within_*", problem)
    if settings.second == settings.score:
        raise StudyError(path, "objective.second", f"is {settings.score} again; name another score, such as node_hours")
    space = study.search_space
    if settings.within_steps is not None and study.samples_a_step(space.resolve(space.corner())) is None:
        problem = "the log counts samples or epochs, and no GBS says how many a step has; use within_samples"
        raise StudyError(path, "objective.within_steps", problem)
