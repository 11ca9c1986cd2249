"""What a log must disclose from ruleset 6.1 on, derived from the variables that a trial runs with.

Training rules, Run results, and common.yaml of mlperf_logging's 6.1.0: the lowest numerical precision in linear
layers, attention and communication, the parallelism, the micro batch size, and the name of the config file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lora_tune.mlperf.knobs import announced

LINEAR = "lowest_numerical_precision_in_linear"
ATTENTION = "lowest_numerical_precision_in_attn"
COMMUNICATION = "lowest_numerical_precision_in_comm"
PARALLELISM = ("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism")

VARIABLES: Mapping[str, tuple[str, ...]] = {
    LINEAR: (
        "MLPERF_LINEAR_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_LINEAR",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_LINEAR",
    ),
    ATTENTION: (
        "MLPERF_ATTN_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_ATTN",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_ATTN",
    ),
    COMMUNICATION: (
        "MLPERF_COMM_PRECISION",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_COMM",
        "MLLOG_LOWEST_NUMERICAL_PRECISION_IN_COMM",
    ),
    "tensor_parallelism": ("MLLOG_TENSOR_PARALLELISM",),
    "pipeline_parallelism": ("MLLOG_PIPELINE_PARALLELISM",),
    "context_parallelism": ("MLLOG_CONTEXT_PARALLELISM",),
    "expert_parallelism": ("MLLOG_EXPERT_PARALLELISM",),
    "micro_batch_size": ("MLLOG_MICRO_BATCH_SIZE",),
    "config_filename": ("MLLOG_CONFIG_FILENAME", "CONFIG_FILENAME"),
}
"""MLLOG key -> the variables from which implementations print it: NVIDIA's (MLPERF_...) and AMD's (MLLOG_...)."""

WIDE = "bfloat16"
"""Precision where nothing lower is switched on: what the public implementations train in."""


def disclosures(
    benchmark: str, values: Mapping[str, object], config_filename: str, wide: str = WIDE
) -> dict[str, object]:
    """What a trial's log must disclose, by MLLOG key.

    values: every variable that the trial runs with, tuned ones and those of its base config. config_filename: of the
    config that a submission would hold. wide: the precision of what no variable lowers.
    """
    logged = announced(benchmark, values)
    return {
        **precisions(values, wide),
        **{key: _degree(logged.get(key)) for key in PARALLELISM},
        "micro_batch_size": _degree(logged.get("micro_batch_size")),
        "config_filename": config_filename,
    }


def precisions(values: Mapping[str, object], wide: str = WIDE) -> dict[str, str]:
    """The lowest precision in linear layers, attention and communication, as NVIDIA's and AMD's variables switch them.

    A healing step that raises the precision late changes nothing: the lowest one is asked for. Attention runs in FP8
    where FP8_DPA says so, and never lower. Communication is lower than bfloat16 where parameters are gathered in the
    low precision, and where dlrmv4's sparse all-to-all is set to.
    """
    four = _recipe(values, "FP4_RECIPE", {"mxfp4": "mxfp4"}, "nvfp4") if _on(values, "FP4") else None
    eight = "fp8" if _on(values, "FP8") else None
    gathered = (four or "nvfp4") if _on(values, "FP4_PARAM_GATHER") else None
    gathered = gathered or ("fp8" if _on(values, "FP8_PARAM_GATHER") and (four or eight) else None)
    sparse = {str(values[name]) for name in ("SPARSE_A2A_FWD", "SPARSE_A2A_BWD") if name in values}
    return {
        LINEAR: four or eight or wide,
        ATTENTION: "fp8" if _on(values, "FP8_DPA") and (four or eight) else wide,
        COMMUNICATION: gathered or ("fp16" if "fp16" in sparse else "fp32" if sparse == {"fp32"} else wide),
    }


def disclosure_exports(
    benchmark: str, values: Mapping[str, object], config_filename: str, reads: Collection[str]
) -> dict[str, object]:
    """The disclosures under the variables that an implementation reads; nothing for one that reads none of them.

    reads: names of the variables that its files read. A value that a script sets by itself is replaced: it was
    written for another configuration.
    """
    disclosed = disclosures(benchmark, values, config_filename)
    return {name: disclosed[key] for key, names in VARIABLES.items() for name in names if name in reads}


def _on(values: Mapping[str, object], name: str) -> bool:
    return str(values.get(name, "")).lower() in ("1", "true", "yes", "on")


def _recipe(values: Mapping[str, object], name: str, named: Mapping[str, str], otherwise: str) -> str:
    return named.get(str(values.get(name, "")).lower(), otherwise)


def _degree(value: object) -> int:
    """A degree of parallelism or a micro batch size; 1 where nothing sets it."""
    return int(value) if isinstance(value, int | float) and value >= 1 else 1
