"""How long partitions and reservations let a job run. Slurm takes a job that asks for more, unless it enforces that.

Such a job waits for ever (``PartitionTimeLimit``, ``Reservation``), so it is said before. Pure functions.
"""

from __future__ import annotations

from lora_tune.base.sbatch_options import sbatch_options
from lora_tune.config.tables import Site
from lora_tune.workloads.walltime import minutes_of

LIMITS = ("sinfo", "--all", "--noheader", "--format=%P|%l")
"""Each partition with its limit; the default one carries a ``*``."""

REMEDY = "lower budget.trial_minutes, or take a partition that allows more (sinfo --format='%P %l')"

RESERVATION_REMEDY = "lower budget.trial_minutes, or take site.reservation out (scontrol show reservation)"


def beyond_limit(shown: str, site: Site, minutes: float) -> str:
    """That no partition of the site lets a job run for ``minutes``, a sentence; "" where one does.

    minutes: 0 where the job names no limit. shown: what ``LIMITS`` prints.
    """
    named = [option.value for option in sbatch_options(site.sbatch_args) if option.name == "partition"]
    names = set((named[-1] if named else site.partition or "").split(",")) - {""}
    rows = [line.split("|") for line in shown.splitlines() if line.count("|") == 1]
    limits = {name: text for name, text in rows if (name.strip(" *") in names if names else "*" in name)}
    known = [minutes_of(text.strip()) for text in limits.values()]
    if not minutes or not known or any(limit is None or limit >= minutes for limit in known):
        return ""
    allowed = ", ".join(f"{name.strip(' *')}: {text.strip()}" for name, text in limits.items())
    return f"a trial asks for {minutes:g} minutes, and its partition allows less ({allowed})"


def reservation(site: Site) -> tuple[str, ...]:
    """The question about the site's reservation."""
    return ("scontrol", "--oneliner", "show", "reservation", site.reservation or "")


def beyond_reservation(shown: str, minutes: float, now: float) -> str:
    """That each of the reservations ends before a job of ``minutes`` could, a sentence; "" where one does not.

    shown: what ``reservation`` prints, with times in epoch seconds. now: epoch seconds.
    """
    rows = [dict(word.partition("=")[::2] for word in line.split() if "=" in word) for line in shown.splitlines()]
    left = []
    for row in rows:
        begin, end = row.get("StartTime", ""), row.get("EndTime", "")
        if not (begin.isdigit() and end.isdigit()) or "FLEX" in row.get("Flags", ""):
            return ""
        left.append((int(end) - max(now, int(begin))) / 60)
    if not minutes or not left or max(left) >= minutes:
        return ""
    name = rows[left.index(max(left))].get("ReservationName", "")
    return f"a trial asks for {minutes:g} minutes, and the reservation {name} ends in {max(0.0, max(left)):.0f}"


def by_qos(site: Site) -> bool:
    """Whether a quality of service is asked for, which may allow more than the partition."""
    return bool(site.qos) or any(word.startswith(("--qos", "-q")) for word in site.sbatch_args)
