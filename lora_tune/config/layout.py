"""Parallel layouts: how a trial's GPUs are divided, and the resulting batch size.

Arithmetic of NVIDIA's MLPerf implementation, v4.0 to v5.1: ``DP = GPUs / (TP * PP * CP)``, ``GBS = MINIBS * DP``. That
code floors, so a layout that does not divide would silently change the batch; only dividing layouts are offered.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel, ConfigDict, Field, model_validator

LAYOUT_VALUES = ("TP", "PP", "VP", "CP", "EP", "SP", "MBS", "MINIBS", "NODES")
"""Variables that a layout sets, besides the derived GBS."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """One parallel layout; degrees are plain counts.

    minibs: samples per data-parallel rank and optimizer step. mbs: samples per forward pass. vp: virtual pipeline
    stages per rank. ep: ranks among which experts of a mixture-of-experts model are divided; does not affect GBS. sp:
    sequence parallel (0 or 1). nodes: of the trial; 0: the site's.
    """

    tp: int
    pp: int = 1
    vp: int = 1
    cp: int = 1
    sp: int = 0
    mbs: int = 1
    minibs: int = 1
    nodes: int = 0
    ep: int = 1

    def __str__(self) -> str:
        text = f"tp{self.tp} pp{self.pp} cp{self.cp} minibs{self.minibs} mbs{self.mbs}"
        text += (f" sp{self.sp}" if self.sp else "") + (f" vp{self.vp}" if self.vp > 1 else "")
        text += f" ep{self.ep}" if self.ep > 1 else ""
        return text + (f" nodes{self.nodes}" if self.nodes else "")

    def dp(self, gpus: int) -> int:
        """Data-parallel ranks on ``gpus`` GPUs."""
        return gpus // (self.tp * self.pp * self.cp)

    def gbs(self, gpus: int) -> int:
        """Global batch size: samples per optimizer step."""
        return self.minibs * self.dp(gpus)


@functools.lru_cache(maxsize=4096)  # a study has a few hundred, used in every trial
def parse_layout(text: str) -> Layout:
    """The inverse of ``str(layout)``. Raises ValueError for any other text."""
    pairs = re.findall(r"(tp|pp|vp|cp|sp|minibs|mbs|ep|nodes)(\d+)", text)
    if "tp" not in dict(pairs) or " ".join(f"{k}{v}" for k, v in pairs) != text:
        raise ValueError(f"{text!r} is not a layout such as 'tp4 pp1 cp1 minibs4 mbs1'")
    return Layout(**{key: int(value) for key, value in pairs})


def with_minibs(text: str, site_gpus: int, gpus_per_node: int = 0) -> str:
    """A layout text with a global batch, such as "tp4 pp1 cp1 gbs8 mbs1", with the equivalent MINIBS instead.

    site_gpus, gpus_per_node: as for :meth:`LayoutAxes.enumerate`. Other texts, and a batch that the data-parallel ranks
    do not divide, are returned unchanged.
    """
    stated = re.search(r"\bgbs(\d+)\b", text)
    try:
        layout = parse_layout(re.sub(r"\bgbs\d+\b", "minibs1", text)) if stated else None
    except ValueError:
        return text
    if stated is None or layout is None or not layout.tp * layout.pp * layout.cp:
        return text
    ranks = layout.dp(layout.nodes * max(1, gpus_per_node) or site_gpus)
    if not ranks or int(stated[1]) % ranks:
        return text
    return str(replace(layout, minibs=int(stated[1]) // ranks))


def layout_of(parameters: Mapping[str, str | int | float | bool]) -> Layout:
    """The layout within resolved parameters; missing degrees count as 1."""
    degree = {k: int(parameters.get(k.upper(), 1)) for k in ("tp", "pp", "vp", "cp", "ep", "mbs", "minibs")}
    return Layout(**degree, sp=int(parameters.get("SP", 0)))


@dataclass(frozen=True, slots=True)
class LayoutTable:
    """The valid layouts, and the number of candidates that each rule removed."""

    layouts: tuple[Layout, ...]
    removed: dict[str, int]

    def why_empty(self) -> str:
        """The rules that removed all candidates, as text."""
        return "; ".join(f"{rule} (rules out {count})" for rule, count in self.removed.items()) or "an empty axis"


class LayoutAxes(BaseModel):
    """The axes over which layouts are enumerated. Give ``minibs`` to let GBS vary, or ``gbs`` to derive MINIBS."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tp: tuple[int, ...] = Field((1,), description="tensor-parallel degrees")
    pp: tuple[int, ...] = Field((1,), description="pipeline-parallel degrees")
    vp: tuple[int, ...] = Field((1,), description="virtual pipeline stages; 1 where PP is 1")
    cp: tuple[int, ...] = Field((1,), description="context-parallel degrees")
    ep: tuple[int, ...] = Field((1,), description="expert-parallel degrees; GPUs divide by PP x EP")
    sp: tuple[int, ...] = Field((0,), description="sequence parallel, 0 or 1; 1 needs TP >= 2")
    mbs: tuple[int, ...] = Field((1,), description="samples per forward pass")
    minibs: tuple[int, ...] = Field((), description="samples per data-parallel rank and step; leaves GBS free")
    gbs: tuple[int, ...] = Field((), description="allowed global batch sizes; MINIBS is derived where not given")
    nodes: tuple[int, ...] = Field((), description="node counts to choose from (NODES); without, the site's")
    kv_groups: int = Field(8, ge=1, description="key-value heads of the model: TP must divide them")
    all_to_all: bool = Field(False, description="CP_COMM_TYPE=a2a: TP x CP must divide kv_groups")
    experts: int | None = Field(None, ge=1, description="experts of the model: EP must divide them")
    layers: int | None = Field(
        None, ge=1, description="layers that the pipeline divides, embedding and loss included where they count as one"
    )

    @model_validator(mode="after")
    def _usable(self) -> LayoutAxes:
        if not self.minibs and not self.gbs:
            raise ValueError("give minibs (GBS then varies) or gbs (MINIBS is then derived)")
        for axis in ("tp", "pp", "vp", "cp", "ep", "mbs", "minibs", "gbs", "nodes"):
            if bad := [v for v in getattr(self, axis) if v < 1]:
                raise ValueError(f"{axis} holds {bad[0]}; degrees start at 1")
        if bad := [v for v in self.sp if v not in (0, 1)]:
            raise ValueError(f"sp holds {bad[0]}; only 0 and 1 are allowed")
        return self

    def enumerate(self, site_gpus: int, gpus_per_node: int = 0) -> LayoutTable:
        """Every layout of these axes on ``site_gpus`` GPUs, sorted, and the number that each rule removed.

        With the axis ``nodes`` a layout has ``nodes * gpus_per_node`` GPUs instead (CPU nodes count as one each).
        """
        layouts: set[Layout] = set()
        removed: Counter[str] = Counter()
        axes = (self.nodes or (0,), self.tp, self.pp, self.vp, self.cp, self.ep, self.sp, self.mbs)
        for nodes, tp, pp, vp, cp, ep, sp, mbs in itertools.product(*axes):
            gpus = nodes * max(1, gpus_per_node) or site_gpus
            ranks = tp * pp * cp
            if gpus % ranks:
                removed[f"{gpus} GPUs % (TP*PP*CP) = 0"] += 1
                continue
            dp = gpus // ranks
            minibs_choices = self.minibs or tuple({g // dp for g in self.gbs if g % dp == 0})
            if not minibs_choices:
                removed[f"GBS in {list(self.gbs)} divisible by DP"] += 1
            for minibs in minibs_choices:
                layout = Layout(tp=tp, pp=pp, vp=vp, cp=cp, ep=ep, sp=sp, mbs=mbs, minibs=minibs, nodes=nodes)
                if rule := self._broken_rule(layout, gpus):
                    removed[rule] += 1
                else:
                    layouts.add(layout)
        return LayoutTable(tuple(sorted(layouts)), dict(removed))

    def _broken_rule(self, layout: Layout, gpus: int) -> str | None:
        """The first rule that a dividing layout breaks, as text."""
        if self.kv_groups % layout.tp:
            return f"TP divides {self.kv_groups} (KV groups)"
        if self.all_to_all and self.kv_groups % (layout.tp * layout.cp):
            return f"TP*CP divides {self.kv_groups} (CP_COMM_TYPE=a2a)"
        if layout.minibs % layout.mbs:
            return "MINIBS % MBS = 0"
        if gpus % (layout.pp * layout.ep):  # Megatron-Core: expert data parallelism is GPUs / (PP x EP)
            return f"{gpus} GPUs % (PP*EP) = 0"
        if self.experts and self.experts % layout.ep:
            return f"EP divides {self.experts} (experts)"
        if layout.sp and layout.tp < 2:
            return "SP=1 needs TP >= 2"
        if layout.vp > 1 and layout.pp == 1:
            return "VP > 1 needs PP > 1"
        if layout.vp > 1 and (layout.minibs // layout.mbs) % layout.pp:
            return "(MINIBS/MBS) % PP = 0 where VP > 1"  # Megatron-Core's interleaved schedule
        if self.layers and self.layers % (layout.pp * layout.vp):
            return f"PP*VP divides {self.layers} (layers)"
        if self.gbs and layout.gbs(gpus) not in self.gbs:
            return f"GBS in {list(self.gbs)}"
        return None

    def values(self, layout: Layout) -> dict[str, str | int | float | bool]:
        """The layout as variables. SP, VP and EP are included only if their axis differs from the default."""
        values: dict[str, str | int | float | bool] = {
            "TP": layout.tp,
            "PP": layout.pp,
            "CP": layout.cp,
            "MINIBS": layout.minibs,
            "MBS": layout.mbs,
        }
        if self.sp != (0,):
            values["SP"] = layout.sp
        if self.vp != (1,):
            values["VP"] = layout.vp
        if self.ep != (1,):
            values["EP"] = layout.ep
        if self.nodes:
            values["NODES"] = layout.nodes
        return values


def config_file_name(system: str, nodes: int, gpus: int, layout: Layout, suffix: str = "") -> str:
    """Standard name of a config: ``config_<SYSTEM>_<NODES>x<GPUS>x<MINIBS>xtp<TP>pp<PP>cp<CP>[ep<EP>][_suffix].sh``.

    ``ep<EP>`` is included if EP > 1. Other characters than letters, digits, ``_`` and ``-`` in ``system`` and
    ``suffix`` are replaced, because the name becomes DGXSYSTEM.
    """
    clean = re.sub(r"[^A-Za-z0-9_-]+", "-", system).strip("-_") or "SYSTEM"
    tail = "_" + re.sub(r"[^A-Za-z0-9_-]+", "-", suffix) if suffix else ""
    experts = f"ep{layout.ep}" if layout.ep > 1 else ""
    return f"config_{clean}_{nodes}x{gpus}x{layout.minibs}xtp{layout.tp}pp{layout.pp}cp{layout.cp}{experts}{tail}.sh"
