"""What a study says of an MLPerf implementation's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from lora_tune.mlperf.benchmark import LORA, check_name


class MlperfSettings(BaseModel):
    """Keys of ``[workload]`` for ``kind = "mlperf"``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    implementation: Path | None = Field(
        None, description="the implementation's folder; LORA_TUNE_IMPLEMENTATION when absent"
    )
    base: str | None = Field(
        None, description="the machine's own config in it, e.g. config_DGXH100_1x8x4xtp4pp1cp1.sh: trial 0 as it stands"
    )
    benchmark: Annotated[str, AfterValidator(check_name)] = Field(
        LORA, description="MLPerf benchmark whose rules the evals and the closed division follow"
    )
    script: str = Field("run.sub", description="the batch script in it")
    before: tuple[str, ...] = Field((), description="files in it to source before the config, e.g. env.sh")
    common: tuple[str, ...] = Field((), description="config files to source after config_common.sh, beside it")
    reads: Literal["folder", "container"] | tuple[str, ...] | None = Field(
        None,
        description='where the training code lies: "folder", or "container" (any variable may then have an effect), or '
        "names that it reads beside those found in the folder [found out]",
    )
    suffix: str = Field("", description="ends the config's name, before .sh [what ends the base's, e.g. fp4]")
    first_eval: int | None = Field(None, ge=1, description="samples before the first eval; open division only")
    eval_every: int | None = Field(None, ge=1, description="samples between evals; open division only")
    compliance: bool = Field(False, description="let run.sub call the compliance checker after each run")
