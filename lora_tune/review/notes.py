"""What a reviewer reads beside a trial, below what people note in optuna-dashboard."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from zlib import crc32

from lora_tune.base.errors import InputError, LoraTuneError, RemarkChangedError
from lora_tune.base.paths import AttemptPaths
from lora_tune.base.text import about, counted, duration, visible
from lora_tune.config.spent import counts_node_hours, spent_name, spent_text
from lora_tune.config.study import Study
from lora_tune.review.stopping import account_text
from lora_tune.review.summary import (
    Overview,
    parameters_text,
    raced_text,
    recommended_text,
    time_interval,
    trial_name,
)
from lora_tune.search.objectives import objective_of
from lora_tune.search.pace import clock_text
from lora_tune.store.metrics import as_mapping
from lora_tune.store.port import SWEEP, Remark
from lora_tune.store.records import Attempt, StudyRecords, Trial, Verdict

FILES_SHOWN = 12
"""Files of one attempt that are offered; a trial program may write thousands."""

DIAGNOSIS = "diagnosis.txt"

WORKING = "is being worked out by all trials that have ended; it is here in a moment"


def plain(text: object) -> str:
    """Any text as Markdown that shows just that text: one line, no markup, no links, no HTML."""
    line = " ".join(visible(text).split())
    line = re.sub(r"([\\`*_{}\[\]<>()#|~$&!])", r"\\\1", line)
    return re.sub(r"(?i)(https?|www|ftp|mailto)([:.])", r"\1\\\2", line)


def attributes(study: Study, sweep: StudyRecords, trial: Trial, now: float) -> dict[str, float | str]:
    """What is known of the trial, named for people, with units; what is unknown is left out."""
    metrics, attempts, unit = as_mapping(trial.metrics), sweep.attempts_of(trial.number), study.progress_unit
    known: dict[str, float | str | None] = {
        "verdict": str(trial.verdict or trial.state),
        "reason": trial.sentence or None,
        "machine": clock_text(study, trial) or None,
        "with more seeds": raced_text(study, trial) or None,
        "why proposed": trial.why or None,
        "time to target (s)": trial.seconds,
        f"{unit} to target": trial.samples,
    }
    if trial.verdict is Verdict.REACHED and trial.seconds is not None and trial.samples is not None:
        low, high = time_interval(trial)
        known |= {"time to target, 90% low (s)": low, "time to target, 90% high (s)": high}
    known |= {label.format(unit=unit): metrics.get(name) for name, label in _METRICS.items()}
    known |= {
        "global batch size (samples)": trial.parameters.get("GBS"),
        **_spent(study, sum(a.node_hours(now) for a in attempts)),
        "attempts": len(attempts),
        "nodes": " ".join(sorted({n for a in attempts for n in a.nodes})) or None,
        "seed": trial.seed,
    }
    return {name: round_short(value) for name, value in known.items() if value is not None}


def _spent(study: Study, node_hours: float) -> dict[str, float]:
    return {"node-hours": node_hours} if counts_node_hours(study) else {"machine time (s)": 3600 * node_hours}


_METRICS = {
    "crossing_samples": "{unit} to target, estimated from the curve",
    "samples_per_second": "throughput ({unit}/s)",
    "seconds_per_eval": "eval (s)",
    "init_seconds": "start-up (s)",
    "peak_gib": "peak memory of a GPU (GiB)",
    "evals": "evals",
    "last_loss": "last eval",
    "last_samples": "last eval at ({unit})",
}
"""Metric -> its name for people. unit: what the study's log counts."""


def round_short(value: float | str) -> float | str:
    """Six significant digits are all that a table needs; whole numbers stay whole."""
    if isinstance(value, float):
        short = float(f"{value:.6g}")
        return int(short) if short.is_integer() and abs(short) < 1e15 else short
    return value


@dataclass(frozen=True, slots=True)
class Artifact:
    """A file to show beside a trial. id: stable, of hexadecimal digits and dashes. path: None: made on demand."""

    id: str
    name: str
    path: Path | None


def artifacts(root: Path, attempt: Attempt) -> list[Artifact]:
    """The files in an attempt's own folder below ``root``, and the diagnosis of a failed one. No subfolders."""
    folder = (root / attempt.folder).resolve()
    files = []
    if folder.is_relative_to(root.resolve()) and folder.is_dir():
        names = sorted(p.name for p in folder.iterdir() if p.is_file() and not _internal(p))
        files = [Artifact(_identity(attempt, n), _shown(attempt, n), folder / n) for n in names[:FILES_SHOWN]]
    if attempt.failure:
        files.append(Artifact(_identity(attempt, DIAGNOSIS), _shown(attempt, DIAGNOSIS), None))
    return files


def _internal(path: Path) -> bool:
    """Whether a file is the launcher's own bookkeeping."""
    own = AttemptPaths(path.parent)
    return path.name.startswith(".") or path in (own.claim, own.started, own.ended)


def _identity(attempt: Attempt, name: str) -> str:
    return f"{attempt.trial:x}-{attempt.number:x}-{crc32(name.encode('utf-8', 'surrogateescape')):08x}"


def _shown(attempt: Attempt, name: str) -> str:
    return name if attempt.number == 0 else f"attempt-{attempt.number}-{name}"


def diagnosis(attempt: Attempt) -> str:
    """The diagnosis of a failed attempt as a text file."""
    return "\n".join(
        (
            f"trial {attempt.trial}, attempt {attempt.number}: {attempt.failure}",
            f"job {attempt.job_id or '?'} on {', '.join(attempt.nodes) or 'unknown nodes'}: {attempt.state}, "
            f"exit code {attempt.exit_code}",
            f"line:   {attempt.line}",
            f"remedy: {attempt.remedy}",
            "",
        )
    )


def trial_note(study: Study, sweep: StudyRecords, trial: Trial, files: Mapping[str, str], now: float) -> str:
    """The trial in Markdown. files: name -> address of each artifact."""
    head = f"## Trial {trial.number}: {plain(trial.verdict or trial.state)}"
    parts = [head, plain(trial.sentence)] if trial.sentence else [head]
    rows = [(name, value) for name, value in _summary(study, trial) if value]
    parts.append(_table(("", ""), [(plain(n), plain(v)) for n, v in rows]))
    parts.append("### Attempts\n\n" + _table(("", "job", "nodes", "ended as", "took", "diagnosis"), [
        _attempt_row(a, now) for a in sweep.attempts_of(trial.number)]))  # fmt: skip
    if files:
        parts.append("### Files\n\n" + "\n".join(f"- [{plain(name)}]({address})" for name, address in files.items()))
    tuned = [(plain(n), plain(_value(v)), "tuned" if n in trial.tuned else "") for n, v in trial.parameters.items()]
    parts.append("### Parameters\n\n" + _table(("name", "value", ""), tuned))
    return "\n\n".join(parts) + "\n"


def _summary(study: Study, trial: Trial) -> list[tuple[str, str]]:
    metrics = trial.metrics
    result = ""
    objective = objective_of(study)
    if trial.verdict is Verdict.REACHED and not objective.timed and trial.metrics.objective is not None:
        result = objective.text(trial.objective)
    elif trial.seconds is not None:
        low, high = time_interval(trial)
        result = f"{duration(trial.seconds)} (90% interval {duration(low)} to {duration(high)})"
    speed, seconds = metrics.samples_per_second, metrics.seconds_per_eval
    layout = " ".join(
        f"{n}={trial.parameters[n]}" for n in ("TP", "PP", "CP", "MBS", "MINIBS") if n in trial.parameters
    )
    return [
        ("Result", result),
        ("Machine", clock_text(study, trial)),
        (f"{study.progress_unit.capitalize()} to target", _samples(trial)),
        ("Throughput", f"{speed:.4g} {study.progress_unit}/s" if speed else ""),
        ("One eval", duration(seconds) if seconds else ""),
        ("Peak memory", f"{metrics.peak_gib:.4g} GiB of a GPU, as the log states it" if metrics.peak_gib else ""),
        ("Layout", layout),
        ("Global batch size", str(trial.parameters.get("GBS", ""))),
        (
            spent_name(study).capitalize(),
            spent_text(study, metrics.node_hours) if metrics.node_hours is not None else "",
        ),
        ("With more seeds", raced_text(study, trial)),
        ("Why proposed", trial.why),
    ]


def _samples(trial: Trial) -> str:
    if trial.samples is None:
        return ""
    estimate = trial.metrics.crossing_samples
    return counted(trial.samples).split()[0] + (f", estimated from the curve: {about(estimate)}" if estimate else "")


def _attempt_row(attempt: Attempt, now: float) -> tuple[str, ...]:
    ended = f"{attempt.state}; {attempt.stop}" if attempt.stop else attempt.state
    took = (attempt.ended_at or now) - attempt.started_at if attempt.started_at else None
    why = ". ".join(p for p in (attempt.failure, attempt.line, attempt.remedy) if p)
    cells = (str(attempt.number), attempt.job_id, " ".join(attempt.nodes), ended, duration(took), why)
    return tuple(plain(c) for c in cells)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _value(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def steering_note(steer: str, number: int, *, open_: bool) -> str:
    """The lines to paste that steer a trial, or the sweep where number is SWEEP.

    steer: the command line that they begin with; "" gives none. open_: the trial has not ended.
    """
    if not steer:
        return ""
    again = [f"--enqueue --clone {number} --set NAME=VALUE"]
    trial = [f"--stop {number}", *again] if open_ else again
    sweep = ["--pause", "--resume", "--parallel 4", "--trials 40", "--enqueue --set NAME=VALUE"]
    lines = "\n".join(f"{steer} {options}" for options in (sweep if number == SWEEP else trial))
    return f"\n### Steer it from a terminal\n\n```\n{lines}\n```\n"


def study_note(study: Study, sweep: StudyRecords, overview: Overview, *, whole: bool = True) -> str:
    """The sweep in Markdown: the summary, what is recommended beside the best run, the failures.

    whole: what is recommended is known of all trials that have ended, and not of some yet.
    """
    parts = [f"## {plain(study.name)}", plain(study.description)] if study.description else [f"## {plain(study.name)}"]
    ended = ", ".join(f"{n} {objective_of(study).verdict_name(v)}" for v, n in overview.verdicts.items())
    rows = [("Trials", f"{overview.trials}: {ended or 'none ended'}"), ("Open", str(overview.open))]
    rows += [
        (spent_name(study).capitalize(), spent_text(study, overview.node_hours)),
        ("Saved by stopping early", f"about {spent_text(study, overview.saved)} of {spent_name(study)}"),
    ]
    if overview.stopping:
        rows += [("Stopping", account_text(overview.stopping))]
    rows += [("Study hash", sweep.digest)]
    if overview.best is not None:
        best = objective_of(study).text(overview.best.objective)
        rows = [("Best run", f"{best}, trial {overview.best.number}"), ("", parameters_text(overview.best)), *rows]
    if overview.nearest is not None:
        rows = [("Nearest", f"trial {overview.nearest.trial.number}: {overview.nearest.missing}"), *rows]
    if (recommended := overview.recommended) is not None:
        sentence = f"{recommended_text(study, recommended)}, {trial_name(recommended.trial)}"
        rows = [("Recommended", sentence), ("", parameters_text(recommended.trial)), *rows]
    if overview.warning:
        rows = [("Trouble", overview.warning), *rows]
    if not whole:
        rows = [("" if overview.recommended else "Recommended", WORKING), *rows]
    parts.append(_table(("", ""), [(plain(n), plain(v)) for n, v in rows]))
    if overview.failures:
        failures = [(plain(f.kind), str(f.attempts), plain(f.line), plain(f.remedy)) for f in overview.failures]
        parts.append("### Failures\n\n" + _table(("class", "attempts", "most frequent line", "remedy"), failures))
    return "\n\n".join(parts) + "\n"


# What is changed in optuna-dashboard's answers on their way to the browser, and the style that its page lacks.


Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]

STYLE = b"""<style>
a:not([class]) { color: #2196f3; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; }
table:not([class]) { border-spacing: 0; }
table:not([class]) :is(th, td) { padding: 2px 14px 2px 0; text-align: left; vertical-align: top; }
main, main div { min-width: 0; }
@media (max-width: 600px) {
  main div:has(> .MuiDivider-vertical) { flex-direction: column; }
  main div:has(> .MuiDivider-vertical) > :first-child { width: 100%; max-height: 25vh; flex-shrink: 0; }
  main div:has(> .MuiDivider-vertical) > :last-child { width: 100%; }
  table:not([class]) { display: block; overflow-x: auto; }
}
[aria-label="delete study"], [aria-label="rename study"] { display: none; }
</style>
"""
"""Notes are Markdown, which optuna-dashboard leaves to the browser: links are seen on dark too, commands wrap, tables
have room, and a trial's page is as wide as the window: on a phone the list of trials stands above the trial. And no
buttons for what is refused."""

_END_OF_HEAD = b"</head>"


def rewritten(
    application: Application,
    environ: dict[str, Any],
    start_response: Callable[..., Any],
    change: Callable[[bytes], bytes],
) -> list[bytes]:
    """What ``application`` answers, the body of a success as ``change`` makes it."""
    started: list[Any] = []
    body = b"".join(application(environ, lambda *arguments: started.append(arguments)))
    status, headers, *rest = started[0]
    if not status.startswith("200"):
        start_response(status, headers, *rest)
        return [body]
    body = change(body)
    kept = [(name, value) for name, value in headers if name.lower() != "content-length"]
    start_response(status, [*kept, ("Content-Length", str(len(body)))], *rest)
    return [body]


def with_style(application: Application) -> Application:
    """``application`` with STYLE at the end of each page's head."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "GET" or not environ["PATH_INFO"].startswith("/dashboard"):
            return application(environ, start_response)
        return rewritten(application, environ, start_response, _styled)

    return answer


def _styled(page: bytes) -> bytes:
    return page.replace(_END_OF_HEAD, STYLE + _END_OF_HEAD, 1)


LONGEST = 100_000
"""Bytes of a request that writes a note."""

LINE = "*Write above this line, with #tags if you like. Below it stands what the records say, made anew each time.*"

_STUDY_DETAIL = re.compile(r"/api/studies/\d+/?")
_NOTE = re.compile(r"/api/studies/\d+(?:/(?P<trial>[0-9]{1,18}))?/note")
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_TAG = re.compile(r"(?<!\S)#([^\W\d][\w-]*)")


class RemarkStore(Protocol):
    """Where people's remarks lie. Methods raise StoreError."""

    def latest(self) -> Mapping[int, Remark]: ...

    def write(self, trial: int, version: int, text: str, who: str) -> None:
        """Raises RemarkChangedError where somebody was quicker."""
        ...


class Facts(Protocol):
    """What the records say, in Markdown; SWEEP stands for the sweep itself."""

    def note(self, number: int) -> str: ...

    def number_of(self, trial_id: int) -> int | None:
        """A trial's number by Optuna's own id; None where there is no such trial."""
        ...


def is_note(path: str, method: str) -> bool:
    """Whether a request writes a note, the one thing that may be changed."""
    return method == "PUT" and _NOTE.fullmatch(path) is not None


def whole(remark: Remark | None, facts: str) -> dict[str, Any]:
    """A note as optuna-dashboard reads it: people's text, the line, the facts. Pure."""
    text = f"{remark.text}\n\n" if remark else ""
    # optuna-dashboard takes 0 for "no note"; there is always one, so that versions are counted from 1.
    return {"version": 1 + (remark.version if remark else 0), "body": f"{text}{LINE}\n\n{facts}"}


def own_part(body: str, facts: str) -> str:
    """What of an edited note is people's own: all above the line; without the line, all but the facts. Pure."""
    above, separator, _ = body.partition(LINE)
    if not separator:
        above = body.partition(facts.partition("\n")[0])[0] if facts.strip() else body
    return above.strip()


def tags(text: str) -> list[str]:
    """The words of a text that begin with #, each once. Pure."""
    return list(dict.fromkeys(_TAG.findall(text)))


def with_notes(
    application: Application, facts: Facts, remarks: RemarkStore, visitor: Callable[[Mapping[str, Any]], str]
) -> Application:
    """``application`` with a note for each trial in the answers that list trials, and with what people write kept.

    visitor: who sends a request.
    """

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, method = environ["PATH_INFO"], environ["REQUEST_METHOD"]
        if is_note(path, method):
            return _write(environ, start_response, facts, remarks, visitor(environ))
        if method != "GET" or not _STUDY_DETAIL.fullmatch(path):
            return application(environ, start_response)

        def noted(body: bytes) -> bytes:
            return json.dumps(_noted(json.loads(body), facts, remarks.latest())).encode()

        return rewritten(application, environ, start_response, noted)

    return answer


def _noted(detail: dict[str, Any], facts: Facts, remarks: Mapping[int, Remark]) -> dict[str, Any]:
    """The answer with notes, and people's tags as an attribute of their trials."""
    tagged = False
    for trial in (*detail["trials"], *detail["best_trials"]):
        remark = remarks.get(trial["number"])
        trial["note"] = whole(remark, facts.note(trial["number"]))
        if remark and (own_tags := tags(remark.text)):
            trial["user_attrs"].append({"key": "tags", "value": " ".join(own_tags)})
            tagged = True
    if tagged:
        detail["union_user_attrs"].append({"key": "tags", "sortable": False})
    detail["note"] = whole(remarks.get(SWEEP), facts.note(SWEEP))
    return detail


def _write(
    environ: Mapping[str, Any], start_response: Callable[..., Any], facts: Facts, remarks: RemarkStore, who: str
) -> Iterable[bytes]:
    """Keep what somebody, ``who``, has written, or say why not."""
    try:
        number, version, body = _note_request(environ, facts)
    except InputError as error:
        return _reply(start_response, "400 Bad Request", str(error))
    try:
        remarks.write(number, version - 1, own_part(body, facts.note(number)), who)
    except RemarkChangedError as error:
        now = whole(remarks.latest().get(number), facts.note(number))
        return _reply(start_response, "409 Conflict", str(error), note=now)
    except LoraTuneError as error:
        return _reply(start_response, "503 Service Unavailable", str(error))
    start_response("204 No Content", [])
    return []


def _note_request(environ: Mapping[str, Any], facts: Facts) -> tuple[int, int, str]:
    """(trial's number, version, body) of a request. Raises InputError."""
    match = _NOTE.fullmatch(environ["PATH_INFO"])
    assert match is not None
    length = environ.get("CONTENT_LENGTH") or "0"
    if not length.isdigit() or int(length) > LONGEST:
        raise InputError(f"a note has at most {LONGEST} bytes")
    number = SWEEP if match["trial"] is None else facts.number_of(int(match["trial"]))
    try:
        request = json.loads(environ["wsgi.input"].read(int(length)))
        version, body = request["version"], request["body"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("a note is written as JSON with version and body") from error
    if number is None or type(version) is not int or type(body) is not str:
        raise InputError("there is no such trial" if number is None else "version is an integer, body a text")
    if _UNSTORABLE.search(body):
        raise InputError("a note cannot hold the character NUL, nor half of a surrogate pair")
    return number, version, body


def _reply(start_response: Callable[..., Any], status: str, reason: str, **more: Any) -> list[bytes]:
    body = json.dumps({"reason": reason, **more}).encode()
    start_response(status, [("Content-Type", "application/json"), ("Content-Length", str(len(body)))])
    return [body]
