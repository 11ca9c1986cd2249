"""What the sweeps of MLPerf implementations have in common here: curves of the small training, not MLPerf's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster import Cluster
from tests.recipes_e2e.rig import Rig


def mlperf_rig(
    folder: Path, cluster: Cluster, recipe: str, *, target: float, environment: dict[str, str], **given: Any
) -> Rig:
    """A rig whose implementation is the stand-in's folder; a target and a score in the small training's losses."""
    rig = Rig(
        folder, cluster, recipe, environment={"STANDIN_TARGET": str(target), **environment}, target=target, **given
    )
    text = rig.file.read_text().replace('kind = "mlperf"\n', f'kind = "mlperf"\nimplementation = "{rig.recipe}"\n')
    for line in ('score = "mlperf_score"\n', 'estimator = "curve"\n', 'curves = "llama2_70b_lora"\n'):
        text = text.replace(line, "")
    rig.file.write_text(text)
    return rig
