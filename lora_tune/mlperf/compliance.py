"""The verdict of ``mlperf_logging``'s own checkers on a result folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lora_tune.base.errors import InputError
from lora_tune.mlperf.score import BENCHMARK, RULESET, RUNS


@dataclass(frozen=True, slots=True)
class Compliance:
    """What the checkers say of a folder.

    files: result file -> the compliance checker's complaints, empty when it passes.
    rcp_passes, rcp_words, factor: the RCP checker's verdict, its words and its normalisation of the score.
    sentence: the whole in one line.
    """

    files: Mapping[str, tuple[str, ...]]
    rcp_passes: bool
    rcp_words: str
    factor: float
    sentence: str

    @property
    def passes(self) -> bool:
        """Whether ten files are there, all comply but at most one, and the RCP check passes."""
        broken = sum(bool(words) for words in self.files.values())
        return len(self.files) == RUNS and broken <= 1 and self.rcp_passes


def run_compliance(folder: Path, ruleset: str = RULESET) -> Compliance:
    """Run the compliance checker on each ``result_*.txt`` of ``folder`` and the RCP checker on all of them.

    Writes nothing. Raises InputError when the folder holds no result file.
    """
    results = sorted(folder.glob("result_*.txt"), key=lambda p: (len(p.name), p.name))
    if not results:
        raise InputError(f"{folder}: holds no result_*.txt; run lora_tune.confirm first, or name its folder")
    files = {path.name: _complaints(path, ruleset) for path in results}
    passes, words, factor = _rcp(folder, ruleset)
    broken = [name for name, complaints in files.items() if complaints]
    count = f"{len(files)} of {RUNS} result files" if len(files) != RUNS else f"{RUNS} result files"
    clean = "all comply" if not broken else f"{', '.join(broken)} {'does' if len(broken) == 1 else 'do'} not comply"
    sentence = f"{count}, {clean}; RCP check {'passed' if passes else 'FAILED'}: {words}, score factor {factor:.4f}"
    return Compliance(files, passes, words, factor, sentence)


class _Heard(logging.Handler):
    """Keeps warnings of the root logger, through which the checkers speak."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().strip())


@contextmanager
def _heard() -> Iterator[list[str]]:
    """What is said to the root logger meanwhile; its own handlers hear nothing of it, and none is installed."""
    root, ear = logging.getLogger(), _Heard()
    before = root.handlers[:]
    root.handlers[:] = [ear]
    try:
        yield ear.messages
    finally:
        root.handlers[:] = before


def _complaints(path: Path, ruleset: str) -> tuple[str, ...]:
    from mlperf_logging.compliance_checker import mlp_compliance

    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    with _heard() as messages:
        try:
            valid = checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        finally:
            mlp_compliance.enqueued_configs.clear()
    return () if valid else tuple(messages) or ("the compliance checker refused it without words",)


def _rcp(folder: Path, ruleset: str) -> tuple[bool, str, float]:
    """The RCP checker's verdict, words and factor; files of another benchmark are refused before it is asked."""
    from mlperf_logging.rcp_checker import rcp_checker

    names = [str(p) for p in sorted(folder.glob("result_*.txt"))]
    with _heard():
        benchmark = rcp_checker.get_submission_epochs(names, ruleset, False)[2]
    if benchmark != BENCHMARK:
        return False, f"the logs name the benchmark {benchmark}, not {BENCHMARK}, or mix several", 1.0
    with _heard():
        passes, words, factor = rcp_checker.check_directory(
            str(folder), "training", ruleset, verbose=False, bert_train_samples=False, rcp_pass="pruned_rcps"
        )
    return bool(passes), str(words), float(factor)
