"""``sweeps/NAME/report.html``: one self-contained file that says what a sweep found."""

from __future__ import annotations

from pathlib import Path

from lora_tune.records import Sweep
from lora_tune.study import Study


def write_report(study: Study, sweep: Sweep, path: Path) -> None:
    """Write the report of ``sweep`` to ``path``."""
    path.write_text(f"<!doctype html><title>{study.name}</title><p>{len(sweep.trials)} trials", encoding="utf-8")
