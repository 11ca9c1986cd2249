"""The JSON schema of a study file: pydantic's, plus the file's defaults and short forms."""

from __future__ import annotations

from typing import Any

from lora_tune.base.registry import LAUNCHERS, LOG_READERS, OBJECTIVES, SAMPLERS, WORKLOADS
from lora_tune.config.study import Study

DIALECT = "https://json-schema.org/draft/2020-12/schema"

_SCALARS = [{"type": kind} for kind in ("string", "number", "boolean")]


def study_schema() -> dict[str, Any]:
    """The schema, draft 2020-12.

    The name defaults to the file's; a bare value under ``[space]`` is a fixed parameter. Kinds that plug-ins may extend
    are listed as examples, which editors offer, and not as an enumeration.
    """
    schema = Study.model_json_schema()
    schema["$schema"], schema["title"] = DIALECT, "A study of lora_tune"
    schema["required"] = [key for key in schema["required"] if key != "name"]
    space = schema["properties"]["space"]
    space["additionalProperties"] = {"anyOf": [space["additionalProperties"], *_SCALARS]}
    offered = {
        ("Site", "launcher"): LAUNCHERS,
        ("Search", "sampler"): SAMPLERS,
        ("WorkloadTable", "kind"): WORKLOADS,
        ("ObjectiveSettings", "score"): OBJECTIVES,
    }
    for (table, key), registry in offered.items():
        schema["$defs"][table]["properties"][key]["examples"] = list(registry.names())
    log = {"type": "object", "properties": {"kind": {"type": "string", "examples": list(LOG_READERS.names())}}}
    schema["$defs"]["WorkloadTable"]["properties"]["log"] = log
    return schema
