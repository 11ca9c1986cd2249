"""``python -m benchmarks.report``: report, status and dashboard of a sweep of 2,000 trials with 20 evals each (mean).

Prints seconds and megabytes against the limits (report: under 10 s and 3 MB), a plain loop that calibrates the machine,
the date and the machine type. ``--size``: only the size of the report.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lora_tune.cli import dashboard, report
from lora_tune.cli.options import load_review
from lora_tune.cli.web_server import Application
from tests.builders import stored, study_of, sweep_of

TRIALS, EVALS = 2000, 30


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall-clock seconds of a call, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def ask(application: Application, path: str) -> bytes:
    """The body of one request's response."""
    request = {
        "REQUEST_METHOD": "GET", "PATH_INFO": path, "QUERY_STRING": "", "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80", "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(), "wsgi.errors": io.StringIO(),
    }  # fmt: skip
    return b"".join(application(request, lambda *_: None))


def main() -> None:
    """Build the sweep, time everything, print."""
    processor = platform.processor() or platform.machine()
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {processor}, Python {platform.python_version()}")
    print(f"a sweep of {TRIALS} trials with up to {EVALS} evals each")
    calibration, _ = timed(lambda: sum(i * i for i in range(10_000_000)))
    study = study_of()
    sweep = sweep_of(study, trials=TRIALS, evals=EVALS, running=4)
    if sys.argv[1:] == ["--size"]:
        page = report.report_html(study, sweep, time.time())
        print(f"report.html: {len(page.encode()) / 1e6:.2f} MB; bar: 3 MB")
        return
    points = sum(len(evals) for evals in sweep.evals.values())
    print(f"{points} evals in all, {points / TRIALS:.1f} a trial (stopped and infeasible trials have fewer)")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        seconds, database = timed(lambda: stored(root, sweep, study))
        print(f"(made in {seconds:.0f} s: {database.stat().st_size / 1e6:.1f} MB of SQLite, Optuna's tables included)")
        loading, review = timed(lambda: load_review("built", root, None))
        writing, _ = timed(lambda: report.write_report(review.study, review.sweep, root / "report.html"))
        size = (root / "report.html").stat().st_size / 1e6
        opening, application = timed(lambda: dashboard.application(review, None))
        first, body = timed(lambda: ask(application, "/api/studies/1"))
        second, _ = timed(lambda: ask(application, "/api/studies/1"))
        assert len(json.loads(body)["trials"]) == TRIALS
    print(f"calibration: 10 million squares summed in {calibration:.2f} s")
    rows = (
        ("load from the database", loading, ""),
        ("write report.html", writing, f"{size:.1f} MB; bars: 10 s, 3 MB"),
        ("open the dashboard", opening, ""),
        ("its first list of all trials", first, f"{len(body) / 1e6:.1f} MB"),
        ("the next", second, ""),
    )
    for name, took, more in rows:
        print(f"{name:<30} {took:6.2f} s  = {took / calibration:5.1f} x the calibration  {more}")


if __name__ == "__main__":
    main()
