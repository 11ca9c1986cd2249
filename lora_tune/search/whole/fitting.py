"""What readings say of a piece's scales and of each parameter's part in it, by the evidence times a wide belief."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from lora_tune.search.grey_box.gaussian import Data, condition, log_evidence
from lora_tune.search.whole.piece import Piece, PieceFrame, Readings, Relevance, Scale

Step = tuple[int, int]
"""Powers of ``SCALE_STEP``: of the amplitude and of the noise."""

PARTS = (0.0, 0.5, 1.0, 2.0)
"""How much of a parameter a piece may see: nothing, a gentle dependence, the usual one, a sharp one."""
SURPRISE = 1.5
"""ln of the odds against a parameter driving a piece that its name does not suggest."""
SIMPLER = 0.3
"""ln of the odds against each other departure from the usual relevance."""
LENGTH_STEP, LENGTH_STEPS = 1.6, 3
"""Factor by which the length of the residual is moved, and how often at most in each direction."""
SCALE_STEP = 2.0
"""Factor between neighbouring scales: what lies between them is told by their shares."""
AMPLITUDES, NOISES = range(-5, 4), range(-6, 5)
"""Powers of ``SCALE_STEP``, of the usual amplitude and of the usual noise, that are thought possible."""
SIDES: tuple[Step, ...] = ((0, 0), (-2, 2))
"""Where the likeliest scales are looked for: as usual, and where configurations differ little and runs scatter."""
WIDTH = 0.7
"""Width of the belief in ln(scale) about what is usual."""
TAIL = 3.0
"""Degrees of freedom of that belief (Student's t): scripts may be quiet or wild by orders of magnitude."""
LEAST_SHARE = 0.1
"""Scales that are less likely than this, compared with the likeliest, are left out."""

AMPLITUDE: tuple[Step, ...] = ((-1, 0), (1, 0))
BOTH: tuple[Step, ...] = (*AMPLITUDE, (0, -1), (0, 1), (-1, 1), (1, -1), (1, 1), (-1, -1))
"""Steps to neighbouring scales, of the amplitude alone and of both."""
FEWEST = 3
"""Readings that are more than bounds before parts are tested."""


@dataclass(frozen=True, kw_only=True)
class PieceQuestion:
    """What is asked of a piece: its data, the level at the centre and whether it is bent, and what names suggest.

    stated: parameters whose role the study says, which are not tested.
    """

    frame: PieceFrame
    data: Data
    level: float
    bent: bool
    guessed: frozenset[str]
    stated: frozenset[str]

    @property
    def togethers(self) -> tuple[bool, ...]:
        """Whether two numbers may have to move together: with and without, where there are two."""
        return (True, False) if self.bent and int(self.frame.numbers.sum()) > 1 else (True,)

    def evidence(self, r: Relevance, scale: Scale) -> float:
        """ln of the evidence times the belief, up to a constant."""
        scales = _likely(scale.amplitude / r.usual) + _likely(scale.noise_scale) - 0.5 * math.log(r.length) ** 2
        told = log_evidence(self.data, self.frame.prior(r, scale, self.level, self.bent))
        return told + scales - _odds(r.of, self.guessed)


def learn_piece(
    frame: PieceFrame, readings: Readings, known: Relevance, guessed: frozenset[str], *, bent: bool,
    stated: frozenset[str] = frozenset(),
) -> Piece:  # fmt: skip
    """The piece after ``readings``; scales and parts are fitted anew when readings grew by an eighth.

    stated: parameters whose role the study says, which are not tested.
    """
    exact = readings.y[~readings.below]
    level = float(np.median(exact)) if len(exact) else float(readings.y.max(initial=0.0))
    data = frame.data(readings)
    asked = PieceQuestion(frame=frame, data=data, level=level, bent=bent, guessed=guessed, stated=stated)
    if len(exact) and len(readings.y) > 1.12 * known.fitted_at:
        known = fitted(asked, known)
    posteriors = tuple(condition(data, frame.prior(known, scale, level, bent)) for scale in known.scales)
    return Piece(frame=frame, posteriors=posteriors, relevance=known)


def fitted(question: PieceQuestion, known: Relevance) -> Relevance:
    """Scales and parts of better evidence, one after the other; of the scales all that data leave.

    What a parameter does passes for noise while it has no part, so that parts are looked for at the usual noise, too.
    """
    sides = [replace(known, scales=_scales(question, known))]
    if int((~question.data.below).sum()) >= FEWEST:
        usual = replace(known, scales=(Scale(amplitude=known.usual),))
        parts = [_parts(question, first) for first in (*sides, usual)]
        sides = [replace(r, scales=_scales(question, r)) for r in parts]
    best = max(sides, key=lambda r: question.evidence(r, r.scales[0]))
    return replace(best, fitted_at=len(question.data.y))


def _scales(question: PieceQuestion, r: Relevance) -> tuple[Scale, ...]:
    """The scales that data leave, the likeliest first, without and with numbers that have to move together.

    Each counts by its evidence, which is how well it forecast every run by those before it: an interaction is believed
    as far as runs show it, and what is not known widens what is believed.
    """
    found = [pair for together in question.togethers for pair in _left(question, r, together)]
    peak = max(evidence for evidence, _ in found)
    kept = [(math.exp(e - peak), scale) for e, scale in found if e >= peak + math.log(LEAST_SHARE)]
    total = sum(share for share, _ in kept)
    return tuple(sorted((replace(s, share=w / total) for w, s in kept), key=lambda scale: -scale.share))


def _left(question: PieceQuestion, r: Relevance, together: bool) -> list[tuple[float, Scale]]:
    """Every noise that is possible, each with its likeliest amplitude and its evidence.

    The peak is looked for from two sides: either configurations differ or runs scatter, and between the two the
    evidence of a few dozen runs has a valley.
    """

    def scale(step: Step) -> Scale:
        amplitude = r.usual * SCALE_STEP ** step[0]
        return Scale(amplitude=amplitude, noise_scale=SCALE_STEP ** step[1], together=together)

    @cache
    def evidence(step: Step) -> float:
        return question.evidence(r, scale(step))

    def climbed(step: Step, moves: Sequence[Step]) -> Step:
        while evidence(best := max(_moved(step, moves), key=evidence)) > evidence(step):
            step = best
        return step

    peak = max((climbed(step, BOTH) for step in SIDES), key=evidence)
    kept = [peak]
    for way in (-1, 1):
        at = peak
        while near := _moved(at, ((0, way),)):
            at = climbed(near[0], AMPLITUDE)
            if evidence(at) < evidence(peak) + math.log(LEAST_SHARE):
                break
            kept.append(at)
    return [(evidence(step), scale(step)) for step in kept]


def _moved(step: Step, moves: Sequence[Step]) -> list[Step]:
    near = [(step[0] + a, step[1] + n) for a, n in moves]
    return [(a, n) for a, n in near if a in AMPLITUDES and n in NOISES]


def _parts(question: PieceQuestion, best: Relevance) -> Relevance:
    """The length of the residual, and what of each parameter counts, at the likeliest scale."""
    scale = best.scales[0]
    reached = question.evidence(best, scale)
    for factor in (LENGTH_STEP, 1 / LENGTH_STEP):
        for _ in range(LENGTH_STEPS):
            trial = replace(best, length=best.length * factor)
            if (evidence := question.evidence(trial, scale)) <= reached + 1e-6:
                break
            best, reached = trial, evidence
    # Twice: what stood in for another parameter in the first round is not needed once that one counts.
    for _ in range(2):
        before = best
        for name in (n for n in best.of if n not in question.stated):
            for part in PARTS:
                trial = replace(best, of={**best.of, name: part})
                if part != best.of[name] and (evidence := question.evidence(trial, scale)) > reached + 1e-6:
                    best, reached = trial, evidence
        if best is before:
            break
    return best


def _likely(ratio: float) -> float:
    """ln of the belief in a scale of ``ratio`` times the usual one."""
    return -0.5 * (TAIL + 1) * math.log1p((math.log(ratio) / WIDTH) ** 2 / TAIL)


def _odds(of: Mapping[str, float], guessed: frozenset[str]) -> float:
    """ln of the odds against these parts before data."""
    odds = 0.0
    for name, part in of.items():
        if (part > 0) != (name in guessed):
            odds += SURPRISE
        elif part not in (0.0, 1.0):
            odds += SIMPLER
    return odds
