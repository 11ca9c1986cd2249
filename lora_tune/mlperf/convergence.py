"""Reference convergence points (RCPs) and the check against them, through ``mlperf_logging``.

The package's checker is imported on first use, because that takes about a second. Batch sizes are global, in
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_tune.curves.family import Family
from lora_tune.curves.published import Envelope
from lora_tune.mlperf.log_check import captured_log
from lora_tune.mlperf.rulesets import convergence_file, known_to_checkers

if TYPE_CHECKING:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker


PASS = "pruned_rcps"
"""The reference points for submissions: those that converge no slower than the interpolation of others."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference convergence at a batch size, in the benchmark's unit.

    mean: faster submissions are scaled back to it. fastest: a mean below this fails the check (5% one-sided t-test
    against the reference runs). words: which reference points the checker used.
    """

    mean: float
    fastest: float
    words: str


@dataclass(frozen=True, slots=True)
class ConvergenceCheck:
    """The RCP checker's verdict on a result folder: whether it passes, its message, its normalisation of the score.

    batch: the runs' global batch size, None if the logs do not agree on one. converged: progress of each run at the
    target, in the benchmark's unit, 1e9 if it did not converge; empty if the logs are not of one submission.
    """

    passes: bool
    words: str
    factor: float
    batch: float | None = None
    converged: tuple[float, ...] = ()


@cache
def reference(benchmark: str, batch: int, ruleset: str) -> Reference | None:
    """The reference convergence at a batch size; None above the largest point, or if the benchmark has none."""
    if not convergence_file(ruleset, benchmark).is_file():
        return None
    checker = _checker(benchmark, ruleset)
    points = checker.pruned_rcp_data.values()
    below = [point for point in points if point["BS"] < batch]
    above = [point for point in points if point["BS"] >= batch]
    if not above:
        return None
    record: Any = min(above, key=_batch)
    if record["BS"] == batch:
        phrase = "RCP found"
    elif not below:
        phrase = "below the smallest RCP, compared with it"
    else:
        record, phrase = (
            checker._create_interp_rcp(batch, max(below, key=_batch), record)[1],
            "interpolated between RCPs",
        )
    mean = float(record["RCP Mean"])
    return Reference(mean, _fastest(checker, record, mean), phrase)


def _batch(point: dict[str, Any]) -> float:
    return float(point["BS"])


def _fastest(checker: RCP_Checker, record: dict[str, Any], mean: float) -> float:
    """The smallest mean that the check accepts, from the checker's own verdict.

    Only the verdict applies the special rule of 405B from 5.0 on (one eval interval less).
    """
    submission = dict(record)
    with captured_log():
        checker._eval_submission_record(submission, [mean, mean, mean], "")
    return float(mean / submission["Max Speedup"])


@cache
def batch_sizes(benchmark: str, ruleset: str) -> tuple[int, ...]:
    """The global batch sizes that have their own reference convergence point, ascending."""
    file = convergence_file(ruleset, benchmark)
    if not file.is_file():
        return ()
    return tuple(sorted({int(record["BS"]) for record in json.loads(file.read_text(encoding="utf-8")).values()}))


def reference_runs(benchmark: str, ruleset: str) -> int:
    """The fewest runs of a benchmark's reference points, twice the runs of a submission."""
    records = json.loads(convergence_file(ruleset, benchmark).read_text(encoding="utf-8")).values()
    return min(len(runs) for record in records for key, runs in record.items() if key.lower().endswith("to converge"))


@cache
def _checker(benchmark: str, ruleset: str) -> RCP_Checker:
    from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

    with captured_log(), convergence_file(ruleset, benchmark).open(encoding="utf-8") as points:
        return RCP_Checker("training", known_to_checkers(ruleset), benchmark, verbose=False, rcp_file=points)


def check_convergence(folder: Path, files: Sequence[Path], benchmark: str, ruleset: str) -> ConvergenceCheck:
    """The RCP checker's verdict on ``folder``, which holds the plain-text result files ``files``.

    The folder's name must not contain ``*?[``, because the checker uses it as a glob pattern.
    """
    from mlperf_logging.rcp_checker import rcp_checker

    spoken = known_to_checkers(ruleset)
    if benchmark and not convergence_file(ruleset, benchmark).is_file():
        return ConvergenceCheck(False, f"{benchmark} has no reference convergence points in {ruleset}", 1.0)
    with captured_log() as messages, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of the mean of no runs
        try:
            batch, needed, named = rcp_checker.get_submission_epochs([str(f) for f in files], spoken, False)
            if named is None:
                return ConvergenceCheck(False, _why(messages), 1.0)
            if named != benchmark:
                return ConvergenceCheck(False, "the logs name several benchmarks", 1.0)
            with convergence_file(ruleset, benchmark).open(encoding="utf-8") as points:
                passes, verdict, factor = rcp_checker.check_directory(
                    str(folder), "training", spoken, verbose=False, bert_train_samples=False, rcp_file=points,
                    rcp_pass=PASS,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # the checker may fail on any malformed log; that is its verdict
            return ConvergenceCheck(False, f"the RCP checker fails: {type(error).__name__}: {error}", 1.0)
    measured = (float(batch) if batch != -1 else None, tuple(float(n) for n in needed or ()))
    if not math.isfinite(factor):
        return ConvergenceCheck(False, _without_mean(benchmark, len(measured[1]), str(verdict)), 1.0, *measured)
    return ConvergenceCheck(bool(passes), str(verdict), float(factor), *measured)


def _without_mean(benchmark: str, runs: int, verdict: str) -> str:
    """Why the checker has no mean to scale by: too few runs without the fastest and the slowest, or a mean of 0."""
    from mlperf_logging.rcp_checker.rcp_checker import submission_runs

    required = submission_runs["training"][benchmark]
    if runs < required:
        return f"too few runs for the RCP check: {runs} of the {required} that the rules ask for"
    return f"{verdict}, but the runs' mean convergence is 0"


def _why(messages: Sequence[str]) -> str:
    """Why the logs are not of one submission: the checker's last message about it."""
    about = [m for m in messages if "do not match" in m]
    return about[-1].rstrip(".") if about else "no log names a benchmark"


# Curve families shipped by global batch size: Llama-2-70B LoRA on GovReport (MLPerf), calibrated on public runs.


CALIBRATION = Path(__file__).resolve().parent / "data" / "llama2_70b_lora.json"

SMALLEST_GBS, LARGEST_GBS = 8, 128
"""Range of batch sizes of the public runs."""


@cache
def published(gbs: float) -> Envelope | None:
    """The median curve and envelope of good MLPerf Llama-2-70B LoRA runs at ``gbs``; None outside 8 to 128.

    The shape fits any target near 0.925. Figures, method and runs: docs/statistics.md.
    """
    return envelope(json.loads(CALIBRATION.read_text()), gbs)


@cache
def crossing_family(gbs: float) -> Family | None:
    """The family of :func:`published` at batch sizes with enough submissions to estimate crossings by it; else None.

    Elsewhere the shape is interpolated between batch sizes: accurate enough to detect bad runs, but crossings estimated
    by it are 1 to 3% early.
    """
    calibration = json.loads(CALIBRATION.read_text())
    curve = published(gbs)
    return curve.family if curve is not None and gbs in calibration["estimated_at"] else None


def envelope(calibration: Mapping[str, Any], gbs: float) -> Envelope | None:
    """The envelope at ``gbs`` of a calibration (the JSON of ``benchmarks.calibrate_curves``); None outside its range.

    ``loss = target + slope(gbs) * ln(samples / crossing(gbs))`` with ``slope`` linear and ``ln(crossing)`` quadratic
    in ``g = ln(gbs / 8)``, valid from ``ln(samples / crossing) = noise.at[0]`` on.
    """
    if not SMALLEST_GBS <= gbs <= LARGEST_GBS:
        return None
    g = math.log(gbs / 8)
    slope = calibration["slope"][0] + calibration["slope"][1] * g
    crossing = sum(c * g**power for power, c in enumerate(calibration["log_crossing"]))
    at = calibration["noise"]["at"]
    persistent = math.exp(calibration["seed_gbs_power"] * g)
    family = Family(
        log_samples=tuple(crossing + x for x in at),
        loss=tuple(calibration["target"] + slope * x for x in at),
        noise=tuple(sd * math.exp(calibration["noise"]["gbs_power"] * g) for sd in calibration["noise"]["sd"]),
        seed=calibration["seed"] * persistent, wander=calibration["wander"] * persistent,
        spread=calibration["spread"], drift=0.0, huber_above=calibration["huber_above"],
        name=f"public runs, GBS {gbs:g}",
    )  # fmt: skip
    return Envelope(family=family, thresholds=tuple((rate, excess) for rate, excess in calibration["thresholds"]))
