"""A folder of result files, scored by MLPerf's rules: compliance, convergence, olympic mean, RCP factor."""

from __future__ import annotations

import gzip
import io
import math
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

from lora_tune.base.errors import InputError
from lora_tune.mlperf import score
from lora_tune.mlperf.benchmark import Benchmark, find_benchmark
from lora_tune.mlperf.convergence import ConvergenceCheck, check_convergence
from lora_tune.mlperf.log_check import ParsedLog, complaints, parse, records, seed_complaint
from lora_tune.mlperf.rulesets import as_ruleset, benchmarks_of, newest_with, order, rulesets, rulesets_with

SHARED_KEYS = ("submission_benchmark", "submission_division", "global_batch_size")
"""Keys whose values all runs of a submission must share."""

UNFINISHED = 1e9
"""The RCP checker's progress of a run that did not converge."""

NO_RECORD = "holds no :::MLLOG line, so that nothing in it counts"

LONGEST_RECORD = 16_384
"""Longest record passed to the RCP checker, in characters; the longest in the public logs has 368."""

LOGS = (".txt", ".log", ".out")
"""File name endings of logs."""

OUTLIERS = 1
"""Runs left out at either end of an olympic mean, and runs that may fail."""


@dataclass(frozen=True, slots=True)
class ResultFile:
    """One result file.

    minutes: from run_start to run_stop; None if the log lacks one. complaints: the compliance checker's, in full.
    header_values: the log's values of the keys in ``SHARED_KEYS``, None for a missing key.
    """

    name: str
    minutes: float | None
    complaints: tuple[str, ...]
    header_values: tuple[object, ...] = (None,) * len(SHARED_KEYS)

    @property
    def counts(self) -> bool:
        """Whether the result summarizer uses the run's time."""
        return not self.complaints and self.minutes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A result folder as MLPerf's tools judge it under one ruleset.

    benchmark: in the logs, None if they name none or several. runs: of a submission, by the rules. convergence: the RCP
    checker's verdict. seeds: the seed checker's complaint, or "". unread: names of other files in the folder that may
    be misnamed result files. complies_with: the newest older ruleset with which the files comply; None if they comply
    with this one or the caller named it.
    """

    folder: Path
    ruleset: str
    benchmark: str | None
    runs: int | None
    files: tuple[ResultFile, ...]
    convergence: ConvergenceCheck
    seeds: str = ""
    unread: tuple[str, ...] = ()
    complies_with: str | None = None

    @property
    def compliant(self) -> bool:
        """Whether the package checker accepts the logs: all comply, or all but one of several."""
        broken = sum(bool(f.complaints) for f in self.files)
        return broken == 0 or broken <= OUTLIERS < len(self.files)

    @property
    def division(self) -> str | None:
        """The division in the logs; None if they name none or several."""
        named = {f.header_values[SHARED_KEYS.index("submission_division")] for f in self.files} - {None}
        return str(named.pop()) if len(named) == 1 else None

    @property
    def olympic_minutes(self) -> float | None:
        """The mean minutes that the result summarizer prints before scaling; None if it prints none."""
        minutes = [f.minutes for f in self.files if f.counts and f.minutes is not None]
        return olympic_of(minutes, len(self.files) - len(minutes))

    @property
    def factor(self) -> float:
        """RCP normalisation of the score, at least 1; the open division has none."""
        return 1.0 if self.division == "open" else self.convergence.factor

    @property
    def score_minutes(self) -> float | None:
        """The score: olympic minutes times the factor, which is applied only if the RCP check passes.

        None if the rules give none: too few files count, or the logs are of several benchmarks.
        """
        olympic = self.olympic_minutes
        if olympic is None or self.benchmark is None:
            return None
        return olympic * self.factor if self.convergence.passes else olympic


def olympic_of(values: Sequence[float], failed: int = 0) -> float | None:
    """Mean without the smallest and the largest, when ``failed`` more were slower than all; None if none is left.

    The same floating-point result as the result summarizer's.
    """
    if failed > OUTLIERS:
        return None
    ranked = sorted(values)
    kept = ranked[OUTLIERS : len(ranked) - (OUTLIERS - failed)]
    return sum(kept) / len(kept) if kept else None


def result_files(folder: Path) -> list[Path]:
    """``result_*.txt`` of a folder, in order of their numbers; ``.txt.gz`` if there is no plain one.

    Raises InputError if the folder cannot be read or holds none.
    """
    try:
        names = {path.name: path for path in folder.iterdir()}
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; name a folder that holds result_*.txt") from error
    files = [p for n, p in names.items() if n.startswith("result_") and n.endswith(".txt")]
    files += [
        p for n, p in names.items()
        if n.startswith("result_") and n.endswith(".txt.gz") and n.removesuffix(".gz") not in names
    ]  # fmt: skip
    if not files:
        raise InputError(f"{folder}: holds no result_*.txt; run lora_tune.confirm first, or name its folder")
    return sorted(files, key=lambda p: (len(plain := p.name.removesuffix(".gz")), plain))


def read_submission(folder: Path, ruleset: str | None = None) -> Submission:
    """Score a folder of result files, plain or gzipped, without writing into it.

    ruleset: a round such as "5.1"; None: the newest installed one that has the logs' benchmark. Raises InputError
    for an unknown ruleset or a folder without result files.
    """
    wanted = None if ruleset is None else as_ruleset(ruleset)
    texts, unreadable = _texts(result_files(folder))
    logs = {name: parse(text, wanted or rulesets()[-1]) for name, text in texts.items()}
    benchmark = _benchmark(list(logs.values()))
    used = wanted or (newest_with(benchmark) if benchmark and rulesets_with(benchmark) else rulesets()[-1])
    files = [_result(name, log, used) for name, log in logs.items()]
    files += [ResultFile(name, None, (why,)) for name, why in unreadable.items()]
    texts |= {name: [] for name in unreadable}  # the other checkers get a log without records, like an empty file
    with tempfile.TemporaryDirectory(prefix="lora-tune-score-") as scratch:
        for name, text in texts.items():
            # The RCP checker is slow on very long records and uses none of them.
            short = (record for record in text if len(record) <= LONGEST_RECORD)
            (Path(scratch) / name).write_text("\n".join(short) + "\n", encoding="latin-1")
        copies = [Path(scratch) / name for name in texts]
        convergence = check_convergence(Path(scratch), copies, benchmark or "", used)
        seeds = seed_complaint(copies, used) if copies else ""
    submission = Submission(
        folder=folder, ruleset=used, benchmark=benchmark, runs=runs_of(benchmark) if benchmark else None,
        files=tuple(files), convergence=convergence, seeds=seeds, unread=_unread(folder),
    )  # fmt: skip
    if wanted or submission.compliant or benchmark is None:
        return submission
    return replace(submission, complies_with=_older(list(logs.values()), benchmark, used))


def _unread(folder: Path) -> tuple[str, ...]:
    """Names of other logs and texts in a result folder, because a run under another file name does not count."""
    taken = {path.name for path in result_files(folder)}
    taken |= {f"{name}.gz" for name in taken}
    texts = (p.name for p in folder.iterdir() if p.is_file() and p.name.lower().removesuffix(".gz").endswith(LOGS))
    return tuple(sorted(name for name in texts if name not in taken))


def _older(logs: Sequence[ParsedLog], benchmark: str, ruleset: str) -> str | None:
    """The newest ruleset before this one with which every log complies."""
    before = [r for r in rulesets_with(benchmark) if order(r) < order(ruleset)]
    return next((r for r in reversed(before) if not any(complaints(log, r) for log in logs)), None)


def runs_of(benchmark: str) -> int | None:
    """Result files of a submission of a benchmark; None if mlperf_logging has no count."""
    from mlperf_logging.benchmark_meta import get_result_file_counts

    count = get_result_file_counts("training").get(benchmark)
    return None if count is None else int(count)


def _texts(files: Sequence[Path]) -> tuple[dict[str, list[str]], dict[str, str]]:
    """(records by plain file name, decoded as the checkers do; reason by name for files that cannot be read)."""
    texts, unreadable = {}, {}
    for path in files:
        name = path.name.removesuffix(".gz")
        try:
            if path.is_fifo():  # reading it may never end
                raise OSError("not a regular file")
            data = path.read_bytes()
            plain = io.BytesIO(gzip.decompress(data) if path.suffix == ".gz" else data)
        except (OSError, EOFError, ValueError, zlib.error) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            unreadable[name] = f"{path.name} cannot be read: {reason}"
        else:
            texts[name] = records(io.TextIOWrapper(plain, encoding="latin-1"))
    return texts, unreadable


def _benchmark(logs: Sequence[ParsedLog]) -> str | None:
    """The single benchmark in the logs; None if there are none or several."""
    named = {name for log in logs if isinstance(name := log.first("submission_benchmark"), str)}
    return named.pop() if len(named) == 1 else None


def _result(name: str, log: ParsedLog, ruleset: str) -> ResultFile:
    times = log.times()
    minutes = None if times is None else (times[1] - times[0]) / 60 / 1000
    if minutes is not None and not math.isfinite(minutes):
        minutes = None
    if not log.lines and not log.errors:
        return ResultFile(name, minutes, (NO_RECORD,))
    return ResultFile(name, minutes, complaints(log, ruleset), tuple(_plain(log.first(key)) for key in SHARED_KEYS))


def _plain(value: object) -> object:
    """A value that can be compared and hashed, whatever a log holds."""
    return value if value is None or isinstance(value, str | int | float) else repr(value)


def result_folders(folder: Path) -> list[Path]:
    """The folder if it holds result files, else the folders below it that do, by name; itself if none does.

    Links to folders are followed, as the package checker follows them; hidden folders are not.
    """
    holding = _holding(folder, frozenset())
    first = next(holding, folder)
    return [first] if first == folder else sorted([first, *holding])


def _holding(folder: Path, above: frozenset[Path]) -> Iterator[Path]:
    """Folders from this one down that hold result files or cannot be read. above: real paths of the parents."""
    real = Path(os.path.realpath(folder))
    if real in above:
        return
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        yield folder
        return
    if any(name.startswith("result_") and name.endswith((".txt", ".txt.gz")) for name in names):
        yield folder
    for name in names:
        if not name.startswith(".") and (folder / name).is_dir():
            yield from _holding(folder / name, above | {real})


# The verdict in sentences: the score, and each reason for a refusal.


LONGEST = 300
"""Longest quoted complaint, in characters."""

SHOWN = 12
"""Most different complaints that are quoted."""

REFUSED = "refused:"
"""Prefix of a sentence with a reason to refuse the folder."""


def score_interval(submission: Submission) -> tuple[float, float] | None:
    """90% confidence interval of the score that the mean of such runs gives, in minutes; None below three counted runs.

    Student's t on the runs' times, which scatter symmetrically; the RCP factor counts as exact.
    """
    from scipy.stats import t

    minutes = [f.minutes for f in submission.files if f.counts and f.minutes is not None]
    score, olympic = submission.score_minutes, submission.olympic_minutes
    if len(minutes) < 3 or score is None or not olympic:
        return None
    half = float(t.ppf(0.95, len(minutes) - 1)) * stdev(minutes) / math.sqrt(len(minutes)) * score / olympic
    return score - half, score + half


def mean_converged(submission: Submission) -> float | None:
    """The runs' olympic mean convergence, in the benchmark's unit."""
    needed = list(submission.convergence.converged)
    failed = sum(n >= UNFINISHED for n in needed)
    return olympic_of([n for n in needed if n < UNFINISHED], failed)


def passes(submission: Submission) -> bool:
    """Whether MLPerf would accept the folder."""
    return not any(reason.startswith(REFUSED) for reason in refusals(submission))


def sentences(submission: Submission) -> list[str]:
    """The verdict: the score, compliance, convergence, and each reason for a refusal."""
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
    """Whether the files comply, then each different complaint with its files."""
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


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{len(names)} files"


def brief(complaint: str) -> str:
    """The complaint and the failed test in one line; the checker's own text quotes the whole log line."""
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
    """Why the package checker would refuse the folder, and what to do; empty if it would not."""
    reasons = []
    if s.runs is not None and len(s.files) != s.runs:
        there = f"{len(s.files)} {'is' if len(s.files) == 1 else 'are'} there"
        reasons.append(f"{REFUSED} {s.benchmark} needs {s.runs} result files, {there}")
    reasons += [f"{REFUSED} the runs differ in {difference}" for difference in _differing(s)]
    for key in ("benchmark", "division"):
        if not any(isinstance(f.header_values[SHARED_KEYS.index(f"submission_{key}")], str) for f in s.files):
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
    """Keys that all runs must share and do not, with the files of each value."""
    differences = []
    for key, values in zip(SHARED_KEYS, zip(*(f.header_values for f in s.files), strict=True), strict=True):
        about: dict[object, list[str]] = {}
        for file, value in zip(s.files, values, strict=True):
            if file.header_values != (None,) * len(SHARED_KEYS):
                about.setdefault(value, []).append(file.name)
        if len(about) > 1:
            stated = (f"{'none' if value is None else value} ({_named(names)})" for value, names in about.items())
            differences.append(f"{key}: {', '.join(stated)}")
    return differences


# Forecast of a submission before all of its runs are there.


def converged_runs(s: Submission) -> list[tuple[float, float]]:
    """(minutes, progress) of the runs that converged; progress is in the benchmark's unit."""
    pairs = zip(s.files, s.convergence.converged, strict=False)
    return [(f.minutes, needed) for f, needed in pairs if f.minutes is not None and needed < UNFINISHED]


def chance(s: Submission, nodes: int, borrowed: Sequence[Submission] = ()) -> list[str]:
    """Forecast of a whole submission of these runs and new ones like them, in sentences.

    The runs must not come from a search: a search selects lucky runs, and the forecast does not correct for that.
    nodes: per run, for the cost in node-hours. borrowed: runs of other submitters, whose configuration may be adopted.
    Raises InputError if the logs do not share one benchmark and batch, or no run converged.
    """
    runs, batch = converged_runs(s), s.convergence.batch
    if s.benchmark is None or batch is None or not runs:
        raise InputError(f"{s.folder}: no chance can be said: {s.convergence.words or 'no run converged'}")
    benchmark = find_benchmark(s.benchmark, s.ruleset)
    minutes, samples = [m for m, _ in runs], [n for _, n in runs]
    failed = sum(n >= UNFINISHED for n in s.convergence.converged)
    expected = score.predict(benchmark, minutes, samples, int(batch), unconverged=failed)
    bars = [reason for reason in refusals(s) if "result files" not in reason and "RCP check" not in reason]
    lines = [expected.sentence, _against(benchmark, mean(samples), int(batch))]
    lines += [f"P(all checks) is 0 as these logs are: {bars[0].removeprefix(REFUSED).strip()}"] if bars else []
    lines += _further(benchmark, s, minutes, samples, int(batch), nodes)
    return lines + [
        _with_their_hyperparameters(benchmark, other, minutes, samples, int(batch), expected.minutes)
        for other in borrowed
    ]


def _against(benchmark: Benchmark, needed: float, batch: int) -> str:
    """Samples to target compared with the reference convergence point."""
    reference = benchmark.reference(batch)
    if reference is None:
        return f"no reference convergence point at or above GBS {batch}: the RCP check fails"
    return (
        f"the runs converge at {needed:.6g}, the reference at {reference.mean:.6g} ({reference.words}); a mean of "
        f"{reference.fastest:.6g} or more passes, and one below {reference.mean:.6g} is scaled back"
    )


def _further(
    benchmark: Benchmark, s: Submission, minutes: Sequence[float], samples: Sequence[float], batch: int, nodes: int
) -> list[str]:
    """How many runs are missing, and how much a further node-hour would narrow the interval."""
    cost = mean(minutes) / 60 * nodes
    lacking = benchmark.runs - len(s.files)
    lines = (
        [f"{lacking} more of {benchmark.runs} runs are needed: {lacking * cost:.3g} node-hours"] if lacking > 0 else []
    )
    more = min(max(1, round(1 / cost)), MOST_MORE)
    now, later = score.interval_after_more_runs(benchmark, minutes, samples, batch, more)
    what = "a further node-hour is" if cost <= 1 else f"{cost:.3g} further node-hours are"
    if math.isfinite(now) and math.isfinite(later):
        lines.append(
            f"{what} {more} run{'s' if more > 1 else ''}: the 90% interval, {now:.2f} min wide, would be {later:.2f}"
        )
    return lines


MOST_MORE = 20
"""Most further runs in a forecast."""


def _with_their_hyperparameters(
    benchmark: Benchmark, other: Submission, minutes: Sequence[float], samples: Sequence[float], batch: int, own: float
) -> str:
    """Forecast with another submitter's hyperparameters at this machine's pace."""
    theirs = [needed for _, needed in converged_runs(other)]
    if other.benchmark != benchmark.name or other.convergence.batch != batch or not theirs:
        of = f"{other.benchmark or 'no one benchmark'} at GBS {other.convergence.batch or '?'}"
        return f"{other.folder}: not to be compared: its logs are of {of}, these of {benchmark.name} at GBS {batch}"
    expected = score.predict(benchmark, minutes, samples, batch, borrowed=theirs)
    gain = 100 * (expected.minutes / own - 1)
    return (
        f"with the hyperparameters of {other.folder} ({len(theirs)} runs) at this machine's pace: "
        f"{expected.minutes:.2f} min (90%: {expected.low:.2f} to {expected.high:.2f}), {gain:+.1f}%; the checks of "
        f"convergence pass with probability {expected.passes:.0%}"
    )
