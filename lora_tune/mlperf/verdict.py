"""What a scored result folder amounts to, in sentences: what the score is, and what would be refused and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from lora_tune.mlperf.rulesets import benchmarks_of, rulesets_with
from lora_tune.mlperf.submission import OUTLIERS, TOLD, UNFINISHED, Submission, olympic_of

LONGEST = 300
"""Characters of a complaint that a sentence quotes."""

SHOWN = 12
"""Different complaints that are quoted."""

REFUSED = "refused:"
"""Begins a sentence that names a reason to refuse the folder."""


def score_interval(submission: Submission) -> tuple[float, float] | None:
    """Central 90% interval of the score of ten more such runs' mean, in minutes; None below three counted runs.

    Student's t on the runs' times, which scatter about evenly; the factor is taken as it is.
    """
    from scipy.stats import t

    minutes = [f.minutes for f in submission.files if f.counts and f.minutes is not None]
    score, olympic = submission.score_minutes, submission.olympic_minutes
    if len(minutes) < 3 or score is None or not olympic:
        return None
    half = float(t.ppf(0.95, len(minutes) - 1)) * stdev(minutes) / math.sqrt(len(minutes)) * score / olympic
    return score - half, score + half


def mean_converged(submission: Submission) -> float | None:
    """The runs' mean convergence without the fastest and the slowest, in the benchmark's unit."""
    needed = list(submission.convergence.converged)
    failed = sum(n >= UNFINISHED for n in needed)
    return olympic_of([n for n in needed if n < UNFINISHED], failed)


def passes(submission: Submission) -> bool:
    """Whether MLPerf would take the folder: nothing is refused."""
    return not any(reason.startswith(REFUSED) for reason in refusals(submission))


def sentences(submission: Submission) -> list[str]:
    """The verdict: the score, compliance, convergence, and each reason for which MLPerf would refuse the folder."""
    lines = [_score(submission), *_files(submission), _convergence(submission), *refusals(submission)]
    if submission.unread:
        lines.append(f"not read: {_named(submission.unread)}; a run counts as result_N.txt alone")
    return lines


def _score(s: Submission) -> str:
    score, olympic = s.score_minutes, s.olympic_minutes
    if s.benchmark is None:
        return "no score: the logs are not of one benchmark"
    if score is None or olympic is None:
        counted = sum(f.counts for f in s.files)
        return f"no score: {counted} of {len(s.files)} files count, and an olympic mean leaves out {2 * OUTLIERS}"
    sentence = f"score {score:.3f} min under {s.ruleset}: olympic mean {olympic:.3f} min"
    if s.factor > 1 and s.convergence.passes:
        sentence += f", times {s.factor:.4f} because it converges faster than the reference"
    interval = score_interval(s)
    return sentence + (f"; the mean of such runs, 90%: {interval[0]:.3f} to {interval[1]:.3f}" if interval else "")


def _files(s: Submission) -> list[str]:
    """Whether the files comply, then each different complaint with the files that it is about."""
    broken = [f for f in s.files if f.complaints]
    count = f"{len(s.files)} result file{'s' if len(s.files) != 1 else ''}"
    if not broken:
        return [f"{count}, {'all comply' if len(s.files) != 1 else 'which complies'} with {s.ruleset}"]
    about: dict[str, list[str]] = {}
    for file in broken:
        for complaint in file.complaints:
            about.setdefault(brief(complaint), []).append(file.name)
    lines = [f"{count}, {len(broken)} of them {'does' if len(broken) == 1 else 'do'} not comply with {s.ruleset}"]
    lines += [f"{_named(names)}: {text}" for text, names in list(about.items())[:SHOWN]]
    if len(about) > SHOWN:
        lines.append(f"and {len(about) - SHOWN} more complaints; the compliance checker of mlperf_logging lists all")
    return lines


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} files"


def brief(complaint: str) -> str:
    """The complaint and the test that failed in one line: the checker's own text quotes the whole log line."""
    lines = [line.strip() for line in complaint.splitlines() if line.strip()]
    kept = [line for line in lines if not line.startswith((":::MLL", "current ", "{", "}", '"'))]
    text = "; ".join(kept[:2])
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"


def _convergence(s: Submission) -> str:
    check = s.convergence
    if s.division == "open":
        return "open division: convergence and seeds are not checked, and nothing is scaled"
    verdict = "passed" if check.passes else "FAILED"
    sentence = f"RCP check {verdict}: {check.words}, factor {check.factor:.4f}"
    mean = mean_converged(s)
    return sentence if mean is None or check.batch is None else f"{sentence}; mean {mean:g} at GBS {check.batch:g}"


def refusals(s: Submission) -> list[str]:
    """Why the package checker would not take the folder, and what to do; empty when it would."""
    reasons = []
    if s.runs is not None and len(s.files) != s.runs:
        reasons.append(
            f"{REFUSED} {s.benchmark} needs {s.runs} result files, {len(s.files)} {_are(len(s.files))} there"
        )
    reasons += [f"{REFUSED} the runs differ in {difference}" for difference in _differing(s)]
    for key in ("benchmark", "division"):
        if not any(isinstance(f.said[TOLD.index(f"submission_{key}")], str) for f in s.files):
            reasons.append(f"{REFUSED} the logs name no {key}")
    if s.benchmark is not None and s.benchmark not in benchmarks_of(s.ruleset):
        having = ", ".join(rulesets_with(s.benchmark)) or "none installed"
        reasons.append(f"{REFUSED} {s.benchmark} is not in {s.ruleset}; rulesets with it: {having}")
    if not s.compliant:
        broken = sum(bool(f.complaints) for f in s.files)
        reasons.append(f"{REFUSED} {broken} files do not comply, {OUTLIERS} of a submission may")
    if s.complies_with:
        reasons.append(
            f"the files comply with {s.complies_with}: --ruleset {s.complies_with} scores them by that round"
        )
    if s.division != "open" and not s.convergence.passes:
        check = s.convergence
        fast = f"; the runs converge {check.factor:.3f} times as fast as the reference" if check.factor > 1 else ""
        reasons.append(f"{REFUSED} the RCP check fails: {check.words}{fast}")
    if s.division != "open" and s.seeds:
        reasons.append(f"{REFUSED} the seed check fails: {s.seeds}")
    return reasons


def _differing(s: Submission) -> list[str]:
    """What all runs must agree in and do not, with the files that say each value."""
    differences = []
    for key, values in zip(TOLD, zip(*(f.said for f in s.files), strict=True), strict=True):
        about: dict[object, list[str]] = {}
        for file, value in zip(s.files, values, strict=True):
            if file.said != (None,) * len(TOLD):
                about.setdefault(value, []).append(file.name)
        if len(about) > 1:
            stated = (f"{'none' if value is None else value} ({_named(names)})" for value, names in about.items())
            differences.append(f"{key}: {', '.join(stated)}")
    return differences
