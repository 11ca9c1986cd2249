"""A campaign: several studies of one machine, swept one after another under one budget of node-hours."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, ValidationError

from lora_tune.base.errors import StudyError
from lora_tune.config.problems import first_problem
from lora_tune.config.section import Section
from lora_tune.config.study import Study, load_study


class SweepTable(Section):
    """One sweep of a campaign."""

    study: str = Field(description="study file, relative to this file")
    share: float = Field(1, gt=0, description="its part of the node-hours that are left when it begins")


class CampaignBudget(Section):
    """What all sweeps of a campaign may spend together."""

    node_hours: float = Field(gt=0, description="node-hours of all sweeps together")


class CampaignTable(Section):
    """A campaign's file. Load it with :func:`load_campaign`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$", description="folder under sweeps/")
    description: str = Field("", description="a line for people")
    budget: CampaignBudget
    sweeps: tuple[SweepTable, ...] = Field(min_length=1, description="the sweeps, in their order")


@dataclass(frozen=True, slots=True)
class Member:
    """One sweep of a campaign: its study, the file of it, and its share of what is left when it begins."""

    study: Study
    file: Path
    share: float


@dataclass(frozen=True, slots=True)
class Campaign:
    """Sweeps in their order, and the node-hours that they may spend together."""

    name: str
    description: str
    node_hours: float
    members: tuple[Member, ...]


def is_campaign(path: Path) -> bool:
    """Whether a study file names sweeps instead of being one; False for what cannot be read as TOML."""
    try:
        return "sweeps" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return False


def load_campaign(path: Path) -> Campaign:
    """The campaign in a file, with all of its studies. Raises StudyError naming the file, the key and the remedy."""
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    table.setdefault("name", path.stem)
    try:
        read = CampaignTable.model_validate(table)
    except ValidationError as error:
        raise StudyError(path, *first_problem(error, CampaignTable)) from error
    files = [path.parent / sweep.study for sweep in read.sweeps]
    members = tuple(Member(load_study(file), file, s.share) for file, s in zip(files, read.sweeps, strict=True))
    _check(members, path)
    return Campaign(read.name, read.description, read.budget.node_hours, members)


def _check(members: Sequence[Member], path: Path) -> None:
    """Sweeps of one campaign have names of their own and run on one machine: else their hours are not one budget."""
    names = [member.study.name for member in members]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise StudyError(path, "sweeps", f"two studies are called {twice}; give one of them another name")
    systems = sorted({member.study.site.system for member in members})
    if len(systems) > 1:
        problem = f"node-hours of {' and '.join(systems)} do not make one budget; write a campaign for each machine"
        raise StudyError(path, "sweeps", problem)


def allotments(campaign: Campaign, spent: Sequence[float], ended: Sequence[bool]) -> list[float]:
    """Node-hours of each sweep: its share of what the ones before it leave, and no more than its own study allows.

    What a sweep leaves, those behind it get; of one that has not ended all that is allotted to it counts as spent.

    Parameters
    ----------
    campaign : Campaign
    spent : Sequence[float]
        Node-hours that each sweep has used.
    ended : Sequence[bool]
        Whether each sweep is over.

    Returns
    -------
    list[float]
        Node-hours, 0 where nothing is left.
    """
    hours: list[float] = []
    left = campaign.node_hours
    for number, member in enumerate(campaign.members):
        own = member.study.budget.node_hours
        part = max(0.0, left) * member.share / sum(m.share for m in campaign.members[number:])
        hours.append(part if own is None else min(own, part))
        left -= spent[number] if ended[number] else max(spent[number], hours[-1])
    return hours
