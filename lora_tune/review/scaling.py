"""What more nodes bring: the best throughput that a sweep measured on each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lora_tune.config.study import Study
from lora_tune.store.records import StudyRecords


@dataclass(frozen=True, slots=True)
class NodeScaling:
    """The best on one node count. efficiency: samples/s a GPU, relative to the smallest node count that was measured.

    Above 1 where more GPUs leave each more memory for a better micro batch. stopped: the best was stopped early, so
    its speed is an estimate.
    """

    nodes: int
    gpus: int
    samples_per_second: float
    efficiency: float
    trial: int
    stopped: bool = False


def scaling(study: Study, sweep: StudyRecords) -> list[NodeScaling]:
    """One entry a node count with a measured speed, by nodes; empty where the node count does not vary."""
    space = study.search_space
    if not space.varies_nodes:
        return []
    best: dict[int, tuple[bool, float, int]] = {}
    for trial in sweep.trials.values():
        speed = trial.metrics.samples_per_second
        if speed:
            nodes = space.node_count(trial.parameters)
            # A finished measurement counts more than an estimate.
            measured = (trial.verdict == "reached", float(speed), trial.number)
            best[nodes] = max(best.get(nodes, measured), measured)
    rows: list[NodeScaling] = []
    for nodes, (finished, speed, number) in sorted(best.items()):
        gpus = max(1, nodes * max(1, study.site.gpus_per_node))
        base = rows[0].samples_per_second / rows[0].gpus if rows else speed / gpus
        rows.append(NodeScaling(nodes, gpus, speed, speed / gpus / base, number, stopped=not finished))
    return rows


def table(study: Study, rows: Sequence[NodeScaling]) -> str:
    """The rows as aligned text, a line each under a heading; "" for none."""
    if not rows:
        return ""
    lines = [f"{'nodes':>8}{'GPUs':>8}{f'{study.progress_unit}/s':>12}{'per GPU':>10}   trial"]
    for row in rows:
        note = ", stopped early" if row.stopped else ""
        lines.append(
            f"{row.nodes:>8}{row.gpus:>8}{row.samples_per_second:>12.4g}{row.efficiency:>9.0%}   {row.trial}{note}"
        )
    return "\n".join(lines)
