"""Every kind that a study file can name, one registry for each key. Adding one: docs/extending.md."""

from __future__ import annotations

from lora_tune.base.registry import Registry

LAUNCHERS = Registry(
    "lora_tune.launchers",
    "launcher",
    {
        "local": "lora_tune.launchers.local:KIND",
        "slurm": "lora_tune.launchers.slurm.launcher:KIND",
        "simulated": "lora_tune.launchers.simulated.launcher:KIND",
        "outside": "lora_tune.launchers.outside:KIND",
    },
    needs=("submit", "poll", "cancel"),
)
"""``site.launcher``: a :class:`lora_tune.launchers.base.LauncherKind`."""


def on_this_machine(launcher: str) -> bool:
    """Whether a launcher's jobs run here and nowhere else, so that what is not here is missing. Raises InputError."""
    return bool(getattr(LAUNCHERS.load(launcher), "one_machine", False))


WORKLOADS = Registry(
    "lora_tune.workloads",
    "workload",
    {
        "mlperf": "lora_tune.workloads.mlperf:MlperfWorkload",
        "mlperf_docker": "lora_tune.workloads.docker:DockerWorkload",
        "command": "lora_tune.workloads.command:CommandWorkload",
        "surface": "lora_tune.launchers.simulated.workload:SurfaceWorkload",
    },
)
"""``workload.kind``: a class with a pydantic model ``Settings``, made of (study, settings). The trainers of
``lora_tune_recipes`` (peft, nemo, bridge) come by entry points, as anybody's do."""

SAMPLERS = Registry(
    "lora_tune.samplers",
    "sampler",
    {
        "auto": "lora_tune.search.samplers:AUTO",
        "tpe": "lora_tune.search.samplers:TPE",
        "random": "lora_tune.search.samplers:RANDOM",
        "requests": "lora_tune.search.samplers:REQUESTS",
        "gp": "lora_tune.search.samplers:GP",
        "cmaes": "lora_tune.search.samplers:CMAES",
        "grey_box": "lora_tune.search.samplers:GREY_BOX",
    },
    needs=("sample_relative", "sample_independent"),
)
"""``search.sampler``: a :class:`lora_tune.search.samplers.SamplerKind`."""

LOG_READERS = Registry(
    "lora_tune.log_readers",
    "log format",
    {
        "mllog": "lora_tune.logs.mllog:KIND",
        "hf_trainer": "lora_tune.logs.hf_trainer:KIND",
        "jsonl": "lora_tune.logs.jsonl:KIND",
        "regex": "lora_tune.logs.regex:KIND",
    },
    needs=("feed", "run"),
)
"""``workload.log.kind``: a :class:`lora_tune.logs.line_reader.ReaderKind`."""

OBJECTIVES = Registry(
    "lora_tune.objectives",
    "objective",
    {
        "time_to_target": "lora_tune.search.objectives.time_to_target:TimeToTarget",
        "mlperf_score": "lora_tune.search.objectives.time_to_target:MlperfScore",
        "throughput": "lora_tune.search.objectives.throughput:Throughput",
        "best_value": "lora_tune.search.objectives.metric_value:BestValue",
        "final_value": "lora_tune.search.objectives.metric_value:FinalValue",
        "node_hours": "lora_tune.search.objectives.time_to_target:NodeHours",
    },
    needs=("stop", "value", "ranked"),
)
"""``objective.score`` and ``second``: a class made of a study, see ``lora_tune.search.objectives.base.Objective``."""


def fault(error: BaseException) -> str:
    """Which kind that is not ours failed with ``error``, and where in its own code; "" where none did."""
    registries = (LAUNCHERS, WORKLOADS, SAMPLERS, LOG_READERS, OBJECTIVES)
    return next((words for registry in registries if (words := registry.fault(error))), "")
