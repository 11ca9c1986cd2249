"""A study: one TOML file, validated whole, frozen and hashed."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from lora_tune.base.errors import InputError, StudyError
from lora_tune.base.format import number
from lora_tune.base.kinds import LOG_READERS, SAMPLERS, WORKLOADS
from lora_tune.config.objective import Objective, check_goal, check_objective, filled_in
from lora_tune.config.secrets import with_secrets_apart
from lora_tune.config.section import Section
from lora_tune.config.site import Site
from lora_tune.config.space import Parameter, Space, SpaceError, Value, as_parameter

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

    from lora_tune.logs.run import Eval
    from lora_tune.mlperf.benchmark import Benchmark
    from lora_tune.mlperf.gate import Violation


class WorkloadTable(BaseModel):
    """What runs. ``kind`` names the workload; the other keys are that workload's own."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _secrets_apart(cls, table: Any) -> Any:
        return with_secrets_apart(table) if isinstance(table, dict) else table

    kind: str = Field(description="peft, nemo, bridge, mlperf, mlperf_docker, command or surface")
    stop_at_target: bool | None = Field(
        None,
        description="a trial whose log shows training beyond the target is asked to end (SIGTERM, which the script may "
        "catch); false: it trains to its own end [true; false for MLPerf's submissions]",
    )


class Search(Section):
    """How trials are proposed."""

    sampler: Annotated[str, AfterValidator(SAMPLERS.known)] = Field(
        "portfolio", description="who proposes: portfolio, tpe, random, gp, cmaes, grey_box, or one that was added"
    )
    seed: int = Field(0, ge=0, description="seed of the sampler and, with the trial number, of each trial")
    startup_trials: int = Field(5, ge=0, description="random proposals before TPE's model is used")
    probes: bool = Field(
        False,
        description="portfolio and grey_box may propose short runs that end once their layout's speed is measured",
    )
    enqueue: tuple[dict[str, Value], ...] = Field((), description="points tried first, tuned values by name")


class Pruning(Section):
    """When a running trial is stopped."""

    rule: Literal["stall", "none"] = Field("stall", description="stop stalled and diverging eval curves, or nothing")
    false_prune_rate: float = Field(
        0.01,
        gt=0,
        lt=0.5,
        description="share of good runs that may be stopped by error; n references support no less than 1/(n+1)",
    )
    references: int = Field(
        8, ge=3, description="good runs that end before others are compared with them; more support a smaller rate"
    )
    audit: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of condemned trials that go on to their end, so that the sweep measures its own false-prune "
        "rate; left out: 0.05 where the budget allows 50 trials or more, else 0",
    )
    no_verdict_before: float = Field(0, ge=0, description="samples before which nothing is stopped but NaN")
    cap: bool = Field(True, description="stop a run that can no longer beat the best one")
    cap_risk: float = Field(0.01, gt=0, lt=0.5, description="accepted chance that a capped run would have won")


DEFAULT_AUDIT = 0.05
"""Share of condemned trials that go on where trials are cheap."""

CHEAP_TRIALS = 50
"""Trials within the budget from which on one of them is cheap."""


class Budget(Section):
    """Where the sweep ends. At least one of trials, node_hours and wall_hours is needed."""

    trials: int | None = Field(None, ge=1, description="proposals, retries not counted")
    node_hours: float | None = Field(None, gt=0, description="node-hours of all attempts together")
    wall_hours: float | None = Field(None, gt=0, description="hours since the sweep began")
    stop_below: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="end when the next node-hour is expected to improve the score by less than this share "
        "(0.002: 0.2%); needs sampler portfolio or grey_box, and a limit beside it",
    )
    parallel: int = Field(1, ge=1, description="trials at one time")
    trial_minutes: float = Field(60, gt=0, description="time limit of one trial, start-up included")
    attempts: int = Field(3, ge=1, description="attempts of one trial when the machine fails it")
    price_per_node_hour: float | None = Field(None, ge=0, description="money shown beside node-hours")


class Study(Section):
    """A whole study. Load it with :func:`load_study`; it never changes afterwards."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="folder under sweeps/ and job prefix")
    description: str = Field("", description="a line for people")
    division: Literal["open", "closed"] = Field("open", description="closed: MLPerf's rules are enforced")
    workload: WorkloadTable
    site: Site = Field(default_factory=lambda: Site.model_validate({}))
    space: dict[str, Parameter] = Field(description="what may vary: LR = { type, low, high } and so on")
    objective: Objective = Field(default_factory=Objective)
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
        """The benchmark's own target where the study names one and no target; the score that a lone metric means."""
        if not isinstance(table, dict) or not isinstance(table.get("objective", {}), dict):
            return table
        return {**table, "objective": filled_in(table.get("objective", {}), table.get("workload"))}

    @property
    def benchmark(self) -> Benchmark | None:
        """The MLPerf benchmark whose rules and score apply, under the study's ruleset; None where it is of none.

        Raises InputError for a ruleset that does not have it.
        """
        from lora_tune.mlperf.registry import LORA, find_benchmark

        name = self.objective.benchmark or (self.workload.model_extra or {}).get("benchmark")
        if name is None and self.objective.curves != LORA and self.division == "open":
            return None
        return find_benchmark(str(name or LORA), self.objective.ruleset)

    @property
    def rising(self) -> bool:
        """Whether more is better; evals are then kept as what they lack of :attr:`ceiling`."""
        return self.objective.direction == "maximize"

    @property
    def ceiling(self) -> float:
        """What rising evals are counted down from: 1 for a share that has a target, as an accuracy; else 0."""
        target = self.objective.target
        return 1.0 if target is not None and 0 < target < 1 else 0.0

    @property
    def target(self) -> float:
        """What evals, as they are kept, end a run at or below; -inf where no target does."""
        if self.objective.target is None:
            return -math.inf
        return self.ceiling - self.objective.target if self.rising else self.objective.target

    @property
    def stops_at_target(self) -> bool:
        """Whether a trial that trains on beyond the target is asked to end."""
        given = self.workload.stop_at_target
        return getattr(WORKLOADS.load(self.workload.kind), "stops_at_target", True) if given is None else given

    @property
    def measure(self) -> str:
        """What evals are, for people."""
        return self.objective.metric or ("eval accuracy" if self.rising else "eval loss")

    @property
    def goal(self) -> str:
        """What a run is to reach, for people, as the study says it."""
        return self.measure if self.objective.target is None else f"{self.measure} {self.objective.target:g}"

    def shown(self, loss: float) -> float:
        """An eval, as it is kept, as the log printed it."""
        return round(self.ceiling - loss, 12) if self.rising else loss

    def eval_words(self, point: Eval) -> str:
        """An eval for people: "eval loss 0.4832 at 640 samples"."""
        return f"{self.measure} {number(self.shown(point.loss))} at {point.samples:g} {self.progress_unit}"

    @property
    def progress_unit(self) -> str:
        """What the log counts in, as far as its settings tell: samples, steps or epochs."""
        kind, settings = self._log()
        counts = getattr(LOG_READERS.load(kind), "counts", None)
        return str(counts(settings)) if counts else "samples"

    def samples_a_step(self, parameters: Mapping[str, Value]) -> float | None:
        """Samples of one optimizer step as the log counts them; None where neither log nor trial says it."""
        kind, settings = self._log()
        known = getattr(LOG_READERS.load(kind), "settings", None) or {}
        batch = settings.get("global_batch_size", 1.0) if "global_batch_size" in known else "GBS"
        found = parameters.get(batch) if isinstance(batch, str) else batch
        return float(found) if isinstance(found, int | float) else None

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
        """The share of condemned trials that go on to their end (``pruning.audit``, or its default)."""
        if self.pruning.audit is not None:
            return self.pruning.audit
        return DEFAULT_AUDIT if self._affordable_trials() >= CHEAP_TRIALS else 0.0

    def _affordable_trials(self) -> float:
        """Trials that the budget allows at least, each taken to use its whole time limit."""
        budget, minutes = self.budget, self.budget.trial_minutes
        limits = [float(budget.trials)] if budget.trials is not None else []
        if budget.node_hours is not None:
            limits.append(budget.node_hours * 60 / (minutes * self.site.nodes))
        if budget.wall_hours is not None:
            limits.append(budget.wall_hours * 60 / minutes * budget.parallel)
        return min(limits, default=0.0)

    @property
    def digest(self) -> str:
        """Twelve hex digits of SHA-256 over the validated content; comments and order of tables do not count."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def job_name(self, trial: int, attempt: int) -> str:
        """The name of an attempt's job, unique among the jobs of this study."""
        return f"{self.name}-{trial:04d}-{attempt}"

    def trial_seed(self, number: int) -> int:
        """The seed of trial ``number``."""
        return self.search.seed * 1000 + number + 1

    def with_options(self, options: Mapping[str, Mapping[str, Any]]) -> Study:
        """A copy with command-line options laid over sections, validated again.

        ``options`` is ``{"budget": {"trials": 4}, ...}``; None values are left out. Raises InputError.
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
"""The studies that come with the package; in a checkout, the folder ``studies`` itself."""


def study_place(name: str, folder: Path = Path("studies")) -> Path:
    """Where the file of ``--study NAME`` is or would be: a path that ends in .toml, in ``folder``, or a shipped one."""
    if name.endswith(".toml"):
        return Path(name)
    own, shipped = folder / f"{name}.toml", SHIPPED / f"{name}.toml"
    return shipped if not own.is_file() and shipped.is_file() else own


def known_studies(folder: Path = Path("studies")) -> list[str]:
    """The names that ``--study`` takes here."""
    return sorted({path.stem for place in (folder, SHIPPED) for path in place.glob("*.toml")})


def find_study(name: str, folder: Path = Path("studies")) -> Path:
    """The file of ``--study NAME``, see :func:`study_place`. Raises StudyError where there is none."""
    path = study_place(name, folder)
    if path.is_file():
        return path
    if name.endswith(".toml"):
        beside = sorted(str(other) for other in path.parent.glob("*.toml") if other.name != "pyproject.toml")
        near = difflib.get_close_matches(str(path), beside, n=1)
        hint = f"did you mean {near[0]}?" if near else f"study files there: {', '.join(beside) or 'none'}"
        raise StudyError(path, "", f"there is no such file; {hint}; lora-tune init writes one for your script")
    known = known_studies(folder)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known studies: {', '.join(known) or 'none here'}"
    raise StudyError(path, "", f"there is no study {name!r}; {hint}")


def load_study(path: Path) -> Study:
    """Read, validate and freeze a study file. Raises StudyError naming the file, the key and the remedy."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise StudyError(path, "", f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise StudyError(path, "", f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    check_goal(text, path)
    return parse_study(text, path)


def parse_study(text: str, path: Path) -> Study:
    """The study in ``text``; ``path`` names it in errors, gives its default name and the place of site profiles."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(path, "", f"is not valid TOML: {error}{_line_shown(str(error), text)}") from error
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


def _line_shown(problem: str, text: str) -> str:
    """The line that a TOML error names, with what most often is wrong in it."""
    found, lines = re.search(r"at line (\d+)", problem), text.splitlines()
    if found is None or not 0 < int(found[1]) <= len(lines):
        return ""
    return f"; the line reads `{lines[int(found[1]) - 1].strip()[:100]}` (texts stand in quotes, a table stands once)"


def _with_profile(site: dict[str, Any], path: Path) -> dict[str, Any]:
    """The site table laid over the profile file that it names, if any (a path relative to the study file)."""
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
    except tomllib.TOMLDecodeError as error:
        raise StudyError(file, "", f"is not valid TOML: {error}") from error
    except UnicodeDecodeError as error:
        raise StudyError(file, "", f"is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return {**base, **site}


def _check_whole(study: Study, path: Path) -> None:
    """The checks that need more than one section."""
    space = study.search_space
    try:
        space.check()
    except SpaceError as error:
        raise StudyError(path, f"space.{error.key}", str(error)) from error
    budget = study.budget
    if budget.trials is None and budget.node_hours is None and budget.wall_hours is None:
        raise StudyError(path, "budget", "no end: give at least one of trials, node_hours and wall_hours")
    for violation in closed_violations(study):
        if violation.fatal:
            raise StudyError(path, f"space.{violation.name}", violation.sentence)
    check_objective(study, path)
    if study.objective.score == "mlperf_score" and study.benchmark is None:
        raise StudyError(path, "objective.score", "mlperf_score needs objective.benchmark beside it")
    _check_search(study, path)


def _check_search(study: Study, path: Path) -> None:
    """What the search needs of the other sections."""
    space, budget = study.search_space, study.budget
    sampler = SAMPLERS.load(study.search.sampler)
    if budget.stop_below is not None and not getattr(sampler, "knows_gain", False):
        problem = 'needs search.sampler = "portfolio" or "grey_box": this sampler does not know its expected gain'
        raise StudyError(path, "budget.stop_below", problem)
    if study.search.probes and not getattr(sampler, "proposes_probes", False):
        problem = 'needs search.sampler = "portfolio" or "grey_box": this sampler does not propose them'
        raise StudyError(path, "search.probes", problem)
    models = getattr(sampler, "objectives", None)
    if models is not None and (study.objective.score not in models or study.objective.second is not None):
        problem = f"{study.search.sampler} models {', '.join(models)} alone; use tpe"
        raise StudyError(path, "search.sampler", problem)
    if space.varies_nodes and not getattr(sampler, "several_node_counts", True):
        problem = f"{study.search.sampler} models trials of one size, and NODES varies here; use tpe"
        raise StudyError(path, "search.sampler", problem)
    tuned = space.distributions()
    for index, point in enumerate(study.search.enqueue):
        for key, value in point.items():
            if key not in tuned:
                raise StudyError(
                    path, f"search.enqueue.{index}.{key}", f"is not tuned; tuned are {', '.join(sorted(tuned))}"
                )
            if not within(tuned[key], value):
                raise StudyError(path, f"search.enqueue.{index}.{key}", f"{value!r} is not {range_words(tuned[key])}")


def range_words(distribution: BaseDistribution) -> str:
    """What a distribution can propose, for people."""
    if choices := getattr(distribution, "choices", None):
        return f"one of {', '.join(map(repr, choices))}"
    low, high = getattr(distribution, "low", -math.inf), getattr(distribution, "high", math.inf)
    step = getattr(distribution, "step", None)
    return f"within {low:g} to {high:g}" + (f" in steps of {step:g}" if step not in (None, 1) else "")


def within(distribution: BaseDistribution, value: Value) -> bool:
    """Whether a distribution can propose ``value``."""
    try:
        return distribution._contains(distribution.to_internal_repr(value))
    except ValueError:  # no choice of a categorical
        return False


def closed_violations(study: Study) -> list[Violation]:
    """What the study breaks of MLPerf's closed division, where it says that it keeps it; warnings among them."""
    benchmark = study.benchmark
    if study.division == "open" or benchmark is None:
        return []
    from lora_tune.mlperf.gate import check_space

    space = study.search_space
    return check_space(benchmark, {name: _ends(d) for name, d in space.distributions().items()}, space.each_layout())


def _ends(distribution: BaseDistribution) -> tuple[Value, ...]:
    """The lowest and the highest value that a distribution proposes, or its choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return tuple(distribution.choices)  # type: ignore[arg-type]  # studies hold no None
    assert isinstance(distribution, FloatDistribution | IntDistribution)
    return distribution.low, distribution.high


def study_changes(before: Study, after: Study) -> list[str]:
    """What differs, one line a key: ``space.LR.high: 0.01 -> 0.02``. Empty when nothing that counts differs."""
    old, new = _flat("", before.model_dump(mode="json")), _flat("", after.model_dump(mode="json"))
    return [
        f"{key}: {old.get(key, 'absent')} -> {new.get(key, 'absent')}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key, "absent") != new.get(key, "absent")
    ]


def _flat(prefix: str, value: Any) -> dict[str, Any]:
    if isinstance(value, dict) and value:
        found: dict[str, Any] = {}
        for key, inner in value.items():
            found |= _flat(f"{prefix}.{key}" if prefix else str(key), inner)
        return found
    return {prefix: value}


def first_problem(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """The key path and a one-line problem with its remedy, of the first of pydantic's findings on ``model``."""
    # A misspelt key is often the cause of the missing one.
    first = min(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    parts = [str(p) for p in first["loc"] if p not in ("float", "int", "categorical", "layout", "derived", "fixed")]
    key = ".".join(parts)
    message = str(first["msg"]).removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "unknown key; see the study-file reference for the allowed ones"
        if near := _allowed_near(parts, model):
            message = f"unknown key; {near}"
    elif first["type"] == "missing":
        message = f"is missing; add it{_meant(parts, model)}"
    elif first["type"] in ("union_tag_not_found", "union_tag_invalid"):
        message = "needs type = one of float, int, categorical, layout, derived, fixed"
    elif words := _PLAIN_WORDS.get(first["type"]):
        message = words.format(**first.get("ctx", {})) + _what_came(first["input"])
        if first["type"] in ("tuple_type", "list_type") and isinstance(first["input"], str):
            message += f"; write {json.dumps(first['input'].split())}"
    return key, message.replace("\n", " ")


_PLAIN_WORDS = {
    "greater_than": "must be above {gt:g}",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than": "must be below {lt:g}",
    "less_than_equal": "must be at most {le:g}",
    "literal_error": "must be {expected}",
    "finite_number": "must be a finite number",
    "string_pattern_mismatch": "must be of the form {pattern}",
    "too_short": "must have at least {min_length} entry",
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type",), "must be text"),
    **dict.fromkeys(("tuple_type", "list_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "must be a table"),
}
"""Pydantic's type of a finding -> what is allowed."""


def _what_came(value: object) -> str:
    """The refused value, where it is short enough for a line."""
    shown = repr(value)
    return f", not {shown}" if isinstance(value, str | int | float) and len(shown) <= 80 else ""


def _meant(parts: list[str], model: type[BaseModel]) -> str:
    """What a missing key is for, as the model describes it."""
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    field = model.model_fields.get(parts[-1]) if parts else None
    return f": {field.description}" if field is not None and field.description else ""


def _allowed_near(parts: list[str], model: type[BaseModel]) -> str:
    """The allowed keys of the section in which an unknown key stands, the nearest first."""
    for part in parts[:-1]:
        inner = model.model_fields.get(part)
        if inner is None or not (isinstance(inner.annotation, type) and issubclass(inner.annotation, BaseModel)):
            return ""
        model = inner.annotation
    near = difflib.get_close_matches(parts[-1], model.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"allowed are {', '.join(model.model_fields)}"
