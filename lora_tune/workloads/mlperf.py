"""Checks before any trial of ``run.sub`` runs: what is missing, and what a study ignores."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from lora_tune.base.errors import Finding, LoraTuneError, SetupError, free_space, good, problem, warning
from lora_tune.base.paths import SweepPaths
from lora_tune.config.holding import holding
from lora_tune.config.layout import LAYOUT_VALUES, layout_of
from lora_tune.config.parameters import SWITCHES, FloatParameter, IntParameter
from lora_tune.config.space import Space
from lora_tune.config.study import goal_of
from lora_tune.mlperf.benchmark import LORA, benchmark_names
from lora_tune.mlperf.gate import as_value
from lora_tune.workloads.base import PLACE_ALIASES, PYXIS, Start, misplaced, missing_paths, required, some_proposal
from lora_tune.workloads.base_config import EVALS, BaseConfig, computed_from, equal, fitting_configs
from lora_tune.workloads.config_file import render, value_text
from lora_tune.workloads.implementation import launch_scripts, spelled
from lora_tune.workloads.record import names_of, spellings, usual_name
from lora_tune.workloads.run_sub import RunSubWorkload
from lora_tune.workloads.script_needs import path_warnings, requested_nodes, script_warnings, source_files
from lora_tune.workloads.training_files import (
    FREE_GB,
    MOUNTED,
    bandwidth,
    container,
    data,
    docker_image,
    model,
    mounted,
)
from lora_tune.workloads.walltime import base_walltime

_LIMITS = ("WALLTIME_RUNANDTIME", "WALLTIME")
_READONLY = re.compile(r": ([A-Za-z_]\w*): readonly variable$")
_ELSEWHERE = (
    "no file reads LR, LEARNING_RATE or MAX_STEPS, so the training code lies in the container, and only that can tell "
    'which variables have an effect; workload.reads = "container" says so'
)


def check(workload: RunSubWorkload) -> list[str]:
    """A sentence for each possible problem. Raises SetupError for certain ones."""
    implementation = workload.implementation
    same_machine(workload)
    known = workload.known_places()
    for names in required(implementation.reads - implementation.defaults):
        if not any(known.get(name) for name in names):
            canonical = next(n for n, others in PLACE_ALIASES.items() if set(names) & {n, *others})
            key = {"CONT": "container", "DATADIR": "data", "MODEL": "model"}.get(canonical, f"environment.{canonical}")
            raise SetupError(
                f"{names[0]} is not set, and {implementation.folder} needs it; set site.{key}, or export {names[0]}"
            )
    job = workload.job(some_proposal(workload.study), Path("/tmp/check"))
    places = {name: known[name] for names in required(implementation.reads) for name in names if known.get(name)}
    takes_changes(workload)
    elsewhere = (
        [f"{implementation.folder}: {_ELSEWHERE}"]
        if implementation.in_container and workload.settings.reads is None
        else []
    )
    return [
        *other_benchmark(workload),
        *about_base(workload),
        *_not_swept(workload),
        *other_scripts(workload),
        *elsewhere,
        *misplaced(places, implementation.folder),
        *missing_paths(places),
        *script_warnings(implementation.folder / workload.settings.script, job.environment),
    ]


def _not_swept(workload: RunSubWorkload) -> list[str]:
    """A sentence about the switches that no file reads."""
    unread = workload.unread_switches()
    if not unread:
        return []
    tree = workload.implementation
    remedy = '; workload.reads = "container" sweeps them all the same' if tree.in_container else ""
    return [f"no file in {tree.folder} reads {', '.join(unread)}: these are not swept, and stay as they are{remedy}"]


def other_scripts(workload: RunSubWorkload) -> list[str]:
    """A sentence if the study names no script, and the folder holds others that start the same training."""
    folder, script = workload.implementation.folder, workload.settings.script
    if "script" in workload.settings.model_fields_set:
        return []
    others = [name for name in launch_scripts(folder) if name != script and _STARTS.search(_text(folder / name))]
    if not others:
        return []
    return [
        f"trials run {script}, and {folder} also holds {', '.join(others)}; "
        f'workload.script = "{others[0]}" runs that instead'
    ]


_STARTS = re.compile(r"run_and_time|\bsrun\b")


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def other_benchmark(workload: RunSubWorkload) -> list[str]:
    """A sentence if the folder belongs to another benchmark, by the layout of MLPerf's result repositories."""
    goal, parts = goal_of(workload.study), workload.implementation.folder.parts
    place = parts[parts.index("implementations") - 1] if "implementations" in parts else ""
    if not goal or place == goal or place not in benchmark_names():
        return []
    return [
        f"{workload.implementation.folder} lies among the implementations of {place}, and the target "
        f'{workload.study.objective.target:g} is that of {goal}; workload.benchmark = "{place}" takes the other\'s'
    ]


def same_machine(workload: RunSubWorkload) -> None:
    """Raise SetupError if the base config is for another number of nodes or GPUs than the study."""
    base, space = workload.base, workload.study.search_space
    if base is None:
        return
    for variable, key, planned in (
        ("DGXNNODES", "nodes", space.nodes),
        ("DGXNGPU", "gpus_per_node", space.gpus_per_node),
    ):
        base_value = base.values.get(variable)
        if base_value and not equal(base_value, planned) and not (variable == "DGXNNODES" and space.varies_nodes):
            raise SetupError(
                f"{base.file} is for {variable}={base_value}, and the study for {planned}; "
                f"set site.{key} = {base_value}, or name another config in workload.base"
            )


def takes_changes(workload: RunSubWorkload) -> None:
    """Raise SetupError if a variable that trials change is ``readonly`` in the base config."""
    proposal, base = some_proposal(workload.study), workload.base
    if base is None or workload.is_base(proposal):
        return
    exported = {name: value_text(value) for name, value in workload.exports(proposal).items()}
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / workload.file_name(proposal)
        config.write_text(render(exported, before=workload.sources()), encoding="utf-8")
        try:
            exports = source_files([config]).values
            kept = [f"{name}={exports[name]}" for name, value in exported.items() if exports.get(name, value) != value]
        except SetupError as error:  # under set -e, or in POSIX mode, assigning to a readonly variable ends the shell
            if not (readonly := _READONLY.search(str(error))) or readonly[1] not in exported:
                raise
            kept = [f"{readonly[1]}={base.values.get(readonly[1], '')}"]
    if kept:
        raise SetupError(
            f"{base.file} keeps {', '.join(kept)} whatever a trial's config exports after it; remove its readonly or "
            "declare -r, or take these variables out of [space]"
        )


def about_base(workload: RunSubWorkload) -> list[str]:
    """Remarks on the config that trials build on, or on one that they ignore."""
    base = workload.base
    if base is None:
        remarks = (_left_out(workload), _other_architecture(workload), _sequence_parallel_without_tensor(workload))
        return [*filter(None, remarks)]
    start = workload.start()
    assert start is not None
    sentences = [
        f"{base.file} sources {Path(file).name} from its own folder, where it is not: {file} is taken"
        for file in base.beside
    ]
    sentences += [
        f"{base.file} sources {name}, which is not beside it, nor in one other place of the folder: bash goes on "
        "without it, and so does every trial"
        for name in base.absent
    ]
    sentences += _ignored(workload, base)
    if start.outside:
        sentences.append(f"trial 0 is {start.why}")
    sentences += _widening(workload.study.search_space, start)
    schedule = _other_schedule(workload, base)
    others = (
        _shorter_limit(workload, base), _left_behind(workload, base), _other_architecture(workload),
        _sequence_parallel_without_tensor(workload),
    )  # fmt: skip
    sentences += filter(None, (schedule, *others))
    return sentences + _by_the_rules(workload, base, evals=not schedule)


_ARCHITECTURES = {"h": ("Hopper", r"H(?:100|200|800|20)(?!\d)"), "b": ("Blackwell", r"B[123]00(?!\d)")}
"""First letter of GPU_ARCH -> the architecture, and a pattern of its systems' names."""


def _other_architecture(workload: RunSubWorkload) -> str:
    """A remark if trials use another architecture's tables than the machine's: v5.0 and v5.1 default to Blackwell's."""
    base, system = workload.base, workload.study.site.system.upper()
    stated = str(workload.beneath.value("GPU_ARCH") or "").lower()[:1]
    system_arch = next((letter for letter, (_, names) in _ARCHITECTURES.items() if re.search(names, system)), stated)
    if stated not in _ARCHITECTURES or stated == system_arch or "GPU_ARCH" in workload.study.space:
        return ""
    by = (
        base.file
        if base is not None and "GPU_ARCH" in base.values
        else f"the default in {workload.implementation.folder}"
    )
    where = "in it" if base is not None else "in the config that trials source, or name that in workload.base"
    return (
        f"GPU_ARCH is {workload.beneath.value('GPU_ARCH')} by {by}, {_ARCHITECTURES[stated][0]}'s, and the system is "
        f"{system}, a {_ARCHITECTURES[system_arch][0]}; export GPU_ARCH={system_arch} {where}"
    )


def _sequence_parallel_without_tensor(workload: RunSubWorkload) -> str:
    """A remark if SP is on with TP 1: Megatron-Core rejects it, and only NeMo 1 (v4.0, v4.1) turns it off itself."""
    each = workload.study.search_space.each_layout()
    layouts = [known for values in each if (known := {n: v for n, v in values.items() if n in LAYOUT_VALUES})]
    records = {"trial 0": workload.beneath} if workload.base is not None else {}
    records |= {f"a trial with {layout_of(values)}": workload.record(values) for values in layouts}
    on = [who for who, record in records.items() if record.layout.sp and record.layout.tp == 1]
    if not on:
        return ""
    others = f" and {len(on) - 1} others" if len(on) > 1 else ""
    name = next((n for n in spellings(workload.settings.benchmark, "SP") if n in workload.beneath), "SP")
    return (
        f"{on[0]}{others} has {name} on with TP=1: sequence parallel needs TP >= 2, and Megatron-Core ends the run "
        f"(NeMo 1, v4.0 and v4.1, turns it off by itself); export {name}=0, or give the layout the axis sp = [0, 1]"
    )


def _ignored(workload: RunSubWorkload, base: BaseConfig) -> list[str]:
    """A sentence for each variable that the config exports under another round's name, which no file here reads."""
    tree, own = workload.implementation, workload.beneath
    read_as = {name: tree.spelling(spellings(own.benchmark, name)) for name in sorted(own.unread)}
    return [
        f"{base.file} exports {name}={base.values[name]}, which no file in {tree.folder} reads, so that it has no "
        f"effect: {read} is what is read; export it under that name"
        for name, read in read_as.items()
        if read not in base.values
    ]


def _widening(space: Space, start: Start) -> list[str]:
    """A sentence for each parameter whose range grows so that it contains the config's value."""
    wider, sentences = holding(space, start.tuned or {}).parameters, []
    for name, parameter in space.parameters.items():
        grown, base_value = wider[name], f"{start.name} sets {name}={start.parameters.get(name)}"
        if grown == parameter or getattr(parameter, "role", None) in SWITCHES:
            continue
        if not isinstance(parameter, IntParameter | FloatParameter):
            sentences.append(
                f"{start.name} is at {(start.tuned or {})[name]}, which space.{name} does not offer: it is one choice "
                "more, so that the search learns from trial 0"
            )
            continue
        assert isinstance(grown, IntParameter | FloatParameter)
        if (grown.low, grown.high) != (parameter.low, parameter.high):
            base_value += (
                f", outside {parameter.low:g} to {parameter.high:g}: the range is now {grown.low:g} to {grown.high:g}"
            )
        if isinstance(parameter, IntParameter) and isinstance(grown, IntParameter) and grown.step != parameter.step:
            base_value += f", between steps of {parameter.step}: the step is now {grown.step}"
        sentences.append(f"{base_value}, so that the search learns from trial 0")
    return sentences


def _left_behind(workload: RunSubWorkload, base: BaseConfig) -> str:
    """A remark on values that the base config computes from variables that trials change, and that stay unchanged."""
    proposal, implementation = some_proposal(workload.study), workload.implementation
    exports = workload.effective({**proposal.parameters, **workload.eval_exports(proposal)})
    changed = {n for n in spelled(exports, implementation) if n in base.values}
    others = {n: other for n in sorted(changed) if (other := _another(base.values[n]))}

    def kept(values: Mapping[str, str]) -> dict[str, str]:
        base_value = computed_from(implementation.folder, base, workload.settings.before, values)
        return {n: v for n, v in sorted(base_value.items()) if n not in {*changed, *_LIMITS, "DGXSYSTEM"}}

    if not (left := kept(others)):
        return ""
    by = {name: ", ".join(f"{n}={v}" for n, v in kept({name: other}).items()) for name, other in others.items()}
    stale = "; ".join(f"{names} from {name}" for name, names in by.items() if names) or ", ".join(left)
    first = next(iter(left))
    return (
        f"{base.file} computes {stale}, which trials change behind it: what it computed stays the same in every trial; "
        f'where it should follow, state it in [space]: {first} = {{ type = "derived", formula = "..." }}'
    )


def _another(text: str) -> str:
    """Another value of the same kind; "" for a text without a known one."""
    value = as_value(text)
    if isinstance(value, str):
        return {"true": "False", "false": "True"}.get(text.lower(), "")
    return str(64 * value or 64)


def _by_the_rules(workload: RunSubWorkload, base: BaseConfig, *, evals: bool) -> list[str]:
    """Violations of MLPerf's rules by the base config; in the open division only that it cannot win or converge.

    evals: check its eval schedule, too.
    """
    from lora_tune.mlperf.gate import INTERVAL_NAMES, SKIP_NAMES, check_space

    start, closed, benchmark = workload.start(), workload.study.division == "closed", workload.benchmark
    if start is None or base.values.keys().isdisjoint(("MINIBS", *names_of("GBS", benchmark.name))):
        return []  # the batch is set inside the container
    record = workload.beneath.with_batch()
    named = {usual_name(n, benchmark.name): (n, value) for n, value in record.items()}
    own = {
        usual: v for usual, (n, v) in named.items() if n in base.values or usual in start.parameters or usual == "GBS"
    }
    # pretrain.py of v5.1 logs the steps of the decay less those of the warm-up.
    decay, warmup = record.number("OPT_LR_DECAY_STEPS"), record.number("WARMUP_STEPS")
    announced = {**own, "OPT_LR_DECAY_STEPS": round(decay - warmup)} if decay and warmup else own
    kept = {v.name for v in check_space(benchmark, {}, [announced])}
    violations = (v for v in check_space(benchmark, {}, [own]) if v.name in kept and (closed or not v.fatal))
    apart = () if evals else INTERVAL_NAMES + SKIP_NAMES
    where = "" if closed else " under the rules of MLPerf's closed division"
    return [f"{base.file}{where}: {v.sentence}" for v in violations if v.name not in apart]


def _shorter_limit(workload: RunSubWorkload, base: BaseConfig) -> str:
    """A remark if the default time limit of trials, trial 0 included, is shorter than the base config's."""
    budget = workload.study.budget
    variable, minutes = base_walltime(base.values)
    if "trial_minutes" in budget.model_fields_set or minutes <= budget.trial_minutes:
        return ""
    return (
        f"{base.file} gives a run {variable}={base.values[variable]}, and a trial is ended after "
        f"{budget.trial_minutes:g} minutes, since the study does not say budget.trial_minutes; state it"
    )


def _left_out(workload: RunSubWorkload) -> str:
    """A remark on the configs of this system that the study ignores."""
    site = workload.study.site
    configs = fitting_configs(workload.implementation.folder, site.system, site.nodes, site.gpus_per_node)
    if not configs:
        return ""
    shown = ", ".join(configs[:4]) + (f" and {len(configs) - 4} more" if len(configs) > 4 else "")
    return (
        f"no trial uses what the configs of such a machine set ({shown}); "
        f'workload.base = "{Path(configs[0]).name}" makes that one trial 0, and all others change it'
    )


def _other_schedule(workload: RunSubWorkload, base: BaseConfig) -> str:
    """A remark if the base config's eval schedule differs from that of all other trials.

    Values that the config leaves open do not count, because the training may compute the same, as v5.1's does.
    """
    proposal = some_proposal(workload.study)
    evals = {spelling for name in EVALS for spelling in names_of(name)}
    changed = {n: v for n, v in workload.exports(proposal).items() if n in evals}
    known = {n: workload.beneath.value(usual_name(n)) for n in changed}
    apart = {n: v for n, v in known.items() if v is not None and value_text(v) != value_text(changed[n])}
    if not apart or workload.beneath.gbs != workload.gbs(proposal):
        return ""
    differences = ", ".join(f"{n}={v} there and {changed[n]} in every other trial" for n, v in apart.items())
    return f"{base.file} evaluates otherwise than the rules or the study say: {differences}"


# ``doctor``'s findings on an MLPerf implementation: folder, base config, and whether it reads the study's parameters.


def findings(workload: RunSubWorkload, paths: SweepPaths) -> Iterator[Finding]:
    """The implementation, the container, data and model, and the NCCL test of the last run."""
    yield from _implementation(workload, paths.attempt(0, 0).folder)
    known, site = workload.known_places(), workload.study.site
    yield from _container(workload, known, paths.attempt(0, 0).folder)
    benchmark = workload.study.benchmark
    if benchmark is not None and benchmark.name != LORA:
        yield from (mounted(name, known.get(name)) for name in _mounted_names(workload))
    else:
        yield from _data_and_model(known, paths)
    if workload.engine == PYXIS:  # run_with_docker.sh runs no NCCL test
        folders = [folder for folder in (paths.root, site.log_folder) if folder and folder.is_dir()]
        yield bandwidth(folders, site.system, site.nodes)


def _container(workload: RunSubWorkload, known: Mapping[str, str], trial: Path) -> Iterator[Finding]:
    """The container, and each path that jobs would not find. trial: a trial's own folder."""
    dropped = []
    with contextlib.suppress(LoraTuneError):  # a missing folder is reported above
        dropped = misplaced(known, workload.implementation.folder if workload.engine == PYXIS else trial)
    for sentence in dropped:
        what, _, fix = sentence.rpartition("; ")
        yield problem(what, "every trial would look for it there", fix)
    if not any(sentence.startswith("CONT") for sentence in dropped):
        yield (container if workload.engine == PYXIS else docker_image)(known.get("CONT"))


def _mounted_names(workload: RunSubWorkload) -> list[str]:
    """The mount variables that the folder's files read without a default."""
    try:
        tree = workload.implementation
    except LoraTuneError:  # reported above
        return []
    return [name for name in MOUNTED if name in tree.reads - tree.defaults]


def _places_judged(workload: RunSubWorkload) -> list[str]:
    """Variables of places with findings of their own, to be reported once."""
    benchmark = workload.study.benchmark
    if benchmark is not None and benchmark.name != LORA:
        return ["CONT", *PLACE_ALIASES["CONT"], *_mounted_names(workload)]
    return [
        name for canonical, others in PLACE_ALIASES.items() if canonical != "TOKENIZER" for name in (canonical, *others)
    ]


def _data_and_model(known: Mapping[str, str], paths: SweepPaths) -> Iterator[Finding]:
    """Data and model of Llama-2-70B LoRA."""
    yield from data(known.get("DATADIR"))
    yield from model(known.get("MODEL"))
    place = Path(known.get("MODEL") or paths.root)
    if not place.is_dir():
        yield free_space(place, FREE_GB, "preparing data and model takes that much")


def _warnings(remarks: Iterable[str], why: str) -> Iterator[Finding]:
    """A warning for each remark, split at its last "; " into problem and remedy."""
    for remark in remarks:
        what, _, fix = remark.rpartition("; ")
        yield warning(what, why, fix)


def _implementation(workload: RunSubWorkload, trial: Path) -> Iterator[Finding]:
    """The implementation's folder, and whether it reads every parameter of the study. trial: a trial's own folder."""
    try:
        implementation = workload.implementation
    except LoraTuneError as error:
        script = workload.settings.script
        yield problem(str(error), f"its {script} is what a trial runs", "see above, or correct workload.implementation")
        return
    shared = f"; every config sources {', '.join(implementation.common)}" if implementation.common else ""
    yield good(f"implementation {implementation.folder}, {len(implementation.reads)} variables read{shared}")
    yield from _warnings(other_benchmark(workload), "a run that meets another benchmark's target is refused at its end")
    yield from _warnings(other_scripts(workload), "a script changed for this machine starts training otherwise")
    yield from _base(workload)
    if implementation.in_container:
        yield warning(
            "the training code is not in this folder: no file here reads LR, LEARNING_RATE or MAX_STEPS",
            "which variables have an effect, only the container can tell",
            'nothing to do where the names are right; workload.reads = "folder" if the code is here',
        )
    try:
        job = workload.job(some_proposal(workload.study), trial)
        unread = workload.unread_switches()
        if not implementation.in_container:
            yield good(f"it reads all of {', '.join(n for n in workload.study.space if n not in unread)}")
        if unread:
            yield warning(
                f"no file in it reads {', '.join(unread)}",
                "these are not swept, and stay as they are",
                "nothing to do; or remove them from [space]",
            )
        nodes = requested_nodes(implementation.folder / Path(job.argv[-1]).name)
        if nodes and workload.study.site.nodelist is None:
            yield problem(
                f"{Path(job.argv[-1]).name} asks for the nodes {nodes} by name",
                "they are another cluster's, or too many for a trial",
                "name yours in site.nodelist, which overrides that line",
            )
        launched = implementation.folder / Path(job.argv[-1]).name
        for remark in (*path_warnings(job), *script_warnings(launched, {*job.environment, *_places_judged(workload)})):
            what, _, fix = remark.rpartition("; ")
            yield problem(what, "every trial would run into it", fix)
    except LoraTuneError as error:
        yield problem(str(error), "tuning a knob that nothing reads measures noise", "correct the study's [space]")


def _base(workload: RunSubWorkload) -> Iterator[Finding]:
    """The base config that trials start from, or the configs that they ignore."""
    why, fix = "what makes a machine fast stands in its own config", "set workload.base"
    if workload.base is not None:
        why, fix = "trial 0 is that config, and all others are compared with it", "correct it, or name another"
    try:
        same_machine(workload)
        remarks = about_base(workload)
    except LoraTuneError as error:
        yield problem(str(error), why, "correct workload.base or the site")
        return
    if workload.base is not None:
        yield good(f"trial 0 is {workload.base.file} as it stands; all others change it")
    for remark in remarks:
        yield warning(remark, why, f"nothing to do if that is intended; otherwise {fix}")


class MlperfWorkload(RunSubWorkload):
    """Trials of ``run.sub``, with checks before they run."""

    def check(self) -> list[str]:
        """Check the implementation's folder, the base config, container, data and model.

        Raises SetupError if one is missing; returns a sentence for each that is not visible on this machine.
        """
        return check(self)

    def findings(self, paths: SweepPaths) -> Iterator[Finding]:
        """The implementation, its base config, whether every parameter of the study is read, container, data, model."""
        return findings(self, paths)
