"""The stopping rule: diverged, out of reach by arithmetic, or worse than runs that become the best. Pure functions.

A run is stopped by evidence from other runs, never by an extrapolation of its own curve: loss curves with a step decay,
a plateau or a second descent look hopeless before they recover. docs/statistics.md has the guarantee and measurements.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lora_tune.base.text import counted
from lora_tune.curves.comparison import (
    FEWEST,
    IN_A_ROW,
    LATELY,
    ComparedRun,
    Comparison,
    allowed,
    broke_off,
    compare,
    compared_run,
)
from lora_tune.curves.points import Points, first_reached, usable_samples
from lora_tune.curves.published import CONTINUE, PUBLISHED_STEP, Envelope, StallVerdict, every, outside
from lora_tune.logs.run import Eval

BLOW_UP = 10.0
"""A blow-up is a loss above the first evals by this many times their distance to the target."""

BLOW_UP_SIZE = 5.0
"""A blow-up is also this many times as large as the first evals and the target, because a run that begins near its
target has almost no distance to it, and may rise far before it falls."""

EARLY = 0.1
"""A run's initial level is the highest of this share of its evals, at least three, as a single one may be luck."""

OUT_OF_REACH = 5.0
"""Stop a run that must fall this many times as far as it or any similar run ever fell in as much training.

Applies in the second half of training, when the run has a record of as much training as is left: its first evals may
be on a peak that the others did not have.

Runs unlike the references may fall further than these: public FP4 runs 4.6 times as far, when they change precision.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence for judging a run, and the strictness.

    finished: runs that were not stopped, best first, of any task. count: how many of the best a run is compared with.
    rate: most runs among the best that may be stopped in their whole life, as a share; if ``count`` runs cannot support
    it, the share that they support is kept.
    published: a calibrated envelope that applies to the run instead of them; None: there is none. published_from:
    samples before which it does not apply (a run that may yet change its precision). shown: for each good run of the
    study, the value of :func:`~lora_tune.curves.published.shown_by`. no_verdict_before: samples before which only
    divergence stops a run. unit: display name of the unit of samples.
    """

    finished: Sequence[ComparedRun] = ()
    count: int = FEWEST
    rate: float = 0.01
    published: Envelope | None = None
    published_from: float = 0.0
    shown: Sequence[float] = ()
    no_verdict_before: float = 0.0
    unit: str = "samples"


def verdict(
    evals: Sequence[Eval], target: float, evidence: Evidence, *, length: float | None = None, task: Hashable = ()
) -> StallVerdict:
    """Whether to stop the run with the evals ``evals`` so far (lower is better; negate rising metrics).

    target: minus infinity for none. length: samples at which its training ends by itself. task: runs of other tasks
    are no evidence. Accepts any evals and never raises. A run that has reached the target or its own end is never
    stopped.
    """
    if not evals or first_reached(evals, target) is not None:
        return CONTINUE
    run = compared_run(evals, length=length, task=task)
    at = max((e.samples for e in evals if usable_samples(e.samples)), default=0.0)
    if not at or (length is not None and at >= length * (1 - 1e-9)):
        return CONTINUE
    alike = [r for r in evidence.finished if r.task == task]
    level = target if math.isfinite(target) else min((r.lowest for r in alike), default=target)
    reached = [r for r in alike if math.isfinite(r.stop(level))]
    if why := _diverged(evals, run, level, reached, evidence.unit):
        return StallVerdict(True, f"diverged: {why}", "diverged")
    if at < evidence.no_verdict_before:
        return CONTINUE
    late = run.curve.samples >= evidence.no_verdict_before
    run = replace(run, curve=Points(run.curve.samples[late], run.curve.loss[late]))
    if evidence.published is not None:
        return _outside_published(run, target, evidence.published, evidence)
    compared = compare(run, alike, target=target, rate=evidence.rate, count=evidence.count)
    if compared.outside:
        return _worse_than_the_best(compared, evidence)
    return _out_of_reach(run, target, reached, evidence.unit) if math.isfinite(target) else CONTINUE


def _worse_than_the_best(compared: Comparison, evidence: Evidence) -> StallVerdict:
    count, rank = compared.references, allowed(evidence.rate, compared.references)
    at = compared.at if compared.at < 10 else float(round(compared.at))  # may be between two evals
    most = f"all but {rank - 1} of them" if rank > 1 else "any of them"
    return StallVerdict(
        True,
        f"stalled: further above the best {count} of {compared.finished} finished runs at "
        f"{counted(at, evidence.unit)} than {most}; of the runs that come among the "
        f"best {count + 1}, at most {100 * rank / (count + 1):.1f}% look like this",
        "stalled",
    )


def _diverged(evals: Sequence[Eval], run: ComparedRun, target: float, good: Sequence[ComparedRun], unit: str) -> str:
    """How the run has diverged, "" if it has not, or if it or a ``good`` run recovered from the same.

    NaN weights never recover, so a metric that was NaN and became a number again is merely undefined at times, and a
    gap of about that length is tolerated. A metric that never was a number may not be defined yet: only references can
    tell.
    """
    if broke_off(evals, max(c.hole for c in (run, *good))):
        return f"eval loss is not finite since {counted(run.curve.samples[-1], unit)}"
    curve = run.curve
    if len(curve.samples) and blown_up(curve, target) and not any(came_back(r, target) for r in good):
        return f"eval loss {curve.loss[-1]:.4g} after a best of {curve.loss.min():.4g}"
    return ""


def blown_up(curve: Points, target: float) -> bool:
    """Whether the latest evals, at least two, lie ``BLOW_UP`` times the way to the target above the first ones."""
    late = max(IN_A_ROW, int((curve.samples >= LATELY * curve.samples[-1]).sum()))
    before, lately = curve.loss[:-late], curve.loss[-late:]
    if len(before) < IN_A_ROW:
        return False
    first = float(before[: max(3, int(EARLY * len(curve.loss)))].max())
    way = max(first - float(curve.loss.min()), abs(first - target))
    size = max(abs(first), abs(target))
    return float(lately.min()) > max(first + BLOW_UP * way, BLOW_UP_SIZE * size)


def came_back(good: ComparedRun, target: float) -> bool:
    """Whether a run blew up and still reached the target, as when an error peaks before its second descent."""
    before = good.curve.samples < good.stop(target)
    samples, loss = good.curve.samples[before], good.curve.loss[before]
    if len(loss) == len(good.curve.loss) or not loss.max(initial=-math.inf) > BLOW_UP_SIZE * abs(target):
        return False
    return any(blown_up(Points(samples[:n], loss[:n]), target) for n in range(1 + IN_A_ROW, len(loss) + 1))


def _outside_published(run: ComparedRun, target: float, envelope: Envelope, evidence: Evidence) -> StallVerdict:
    """The verdict by the public runs, shifted to the good runs of this study."""
    known = any(r.blank for r in evidence.finished if r.task == run.task)
    if run.blank >= _two_evals_in(envelope, evidence.published_from) and not len(run.curve.samples) and not known:
        blank = counted(run.blank, evidence.unit)
        return StallVerdict(True, f"stalled: no number by {blank} ({envelope.family.name})", "stalled")
    curve = every(run.curve, PUBLISHED_STEP, evidence.published_from)
    return outside(curve, target, envelope, evidence.rate, evidence.shown)


def _two_evals_in(envelope: Envelope, begin: float) -> float:
    """Samples by which a run has had two evals in the range of the public curves."""
    return max(begin, math.exp(envelope.family.log_samples[0])) + (IN_A_ROW - 1) * PUBLISHED_STEP


def for_rising_metric(sentence: str, kept: float, shown: float) -> str:
    """A verdict on a rising metric, which is compared negated, with "above" and "below" exchanged.

    kept, shown: the target as compared, and as displayed.
    """
    text = sentence.replace(f" above {kept:g} with", f" below {shown:g} with")
    return re.sub(r"\babove\b", "below", text).replace(" fell more ", " rose more ")


def _out_of_reach(run: ComparedRun, target: float, references: Sequence[ComparedRun], unit: str) -> StallVerdict:
    """The verdict without enough references to compare with: no similar run fell so far in so little training."""
    if run.length is None or not len(run.curve.samples):
        return CONTINUE
    now = float(run.curve.samples[-1])
    left, needed = run.length - now, float(run.curve.loss.min()) - target
    references = [r for r in references if _alike(r, run) and r.curve.samples[0] <= now]
    if len(references) < FEWEST or left > now:
        return CONTINUE
    fall = max(furthest_fall(r.curve, left) for r in (run, *references))
    if not fall > 0 or needed <= OUT_OF_REACH * fall:
        return CONTINUE
    to_go = counted(left, unit)
    why = f"{needed:.4g} above {target:g} with {to_go} to go, in which no good run fell more than {fall:.4g}"
    return StallVerdict(True, f"stalled: {why}", "stalled")


def _alike(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether two runs have similar lengths, within a factor of 1.4."""
    return bool(one.length and other.length and abs(math.log2(one.length / other.length)) <= 0.5)


def furthest_fall(curve: Points, stretch: float) -> float:
    """The largest fall of a curve's best loss so far within any ``stretch`` samples."""
    best = np.minimum.accumulate(curve.loss)
    ends = np.searchsorted(curve.samples, curve.samples + stretch * (1 + 1e-9), side="right") - 1
    return float((best - best[ends]).max(initial=0.0))
