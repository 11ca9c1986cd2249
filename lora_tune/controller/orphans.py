"""Jobs of a sweep that no open trial wants, such as those of records that were lost since: found and ended."""

from __future__ import annotations

import math
from collections.abc import Collection

from lora_tune.base.errors import LauncherError
from lora_tune.base.paths import SweepPaths
from lora_tune.controller.event_log import EventLog
from lora_tune.launchers.base import Launcher, Surveys

SURVEY_SECONDS = 600.0
"""Between two looks for them."""


class Orphans:
    """Looks through the jobs that the launcher knows below the sweep's folder; where it knows none, nothing is done."""

    def __init__(self, launcher: Launcher, paths: SweepPaths, events: EventLog) -> None:
        self._launcher, self._paths, self._events = launcher, paths, events
        self.surveyed_at = -math.inf

    def doubt(self) -> None:
        """A job was lost: look at once."""
        self.surveyed_at = -math.inf

    def due(self, now: float) -> bool:
        """Whether it is time for a look, at ``now`` in epoch seconds."""
        return isinstance(self._launcher, Surveys) and now - self.surveyed_at >= SURVEY_SECONDS

    def cancel(self, open_names: Collection[str], now: float) -> None:
        """Cancel the sweep's jobs that are not among ``open_names``."""
        assert isinstance(self._launcher, Surveys), "asked only when due"
        self.surveyed_at = now
        try:
            for ticket in self._launcher.jobs_below(self._paths.trials.absolute()):
                if ticket.name not in open_names:
                    text = f"job {ticket.job_id} ({ticket.name}) belongs to no open trial of this sweep: cancelled"
                    self._events.note(text, "orphan", job=ticket.job_id)
                    self._launcher.cancel(ticket)
        except LauncherError as error:
            self._events.trouble("cluster", str(error))
