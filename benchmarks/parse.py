"""Parsing speed over all public logs, relative to mlperf_logging's parser in the same process.

``python -m benchmarks.parse`` unpacks the logs into a temporary folder, then both parsers read the same plain files in
turn: mlperf_logging's makes a list of decoded lines, ours a RunLog per file. Prints the medians of their times and of
the ratios, and the speed on 1 GB of mostly irrelevant text, with and without the failure scanner.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mlperf_logging.compliance_checker.mlp_parser import parse_file

from lora_tune.logs.failures import FailureScanner
from lora_tune.logs.follower import LogTail
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader, RunLog
from lora_tune.mlperf.rulesets import rulesets


def machine() -> str:
    return f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def unpack(logs: Path, folder: Path) -> list[Path]:
    """Unpack every public log."""
    files = []
    for number, packed in enumerate(sorted(logs.rglob("*.txt.gz"))):
        file = folder / f"{number}.txt"
        file.write_bytes(gzip.decompress(packed.read_bytes()))
        files.append(file)
    return files


def ours(files: list[Path]) -> int:
    evals = 0
    for file in files:
        tail = LogTail(file, MllogReader)
        tail.poll()
        evals += len(tail.reader.run().evals)
    return evals


def theirs(files: list[Path]) -> int:
    evals = 0
    for file in files:
        lines, _ = parse_file(str(file), ruleset=rulesets()[-1])
        evals += sum(line.key == "eval_accuracy" for line in lines)
    return evals


def seconds(work: Callable[[list[Path]], int], files: list[Path]) -> tuple[float, int]:
    begin = time.process_time()
    result = work(files)
    return time.process_time() - begin, result


def compare(files: list[Path], repetitions: int) -> None:
    pairs = []
    for _ in range(repetitions):
        (us, our_evals), (them, their_evals) = seconds(ours, files), seconds(theirs, files)
        assert our_evals == their_evals, (our_evals, their_evals)
        pairs.append((us, them))
    size = sum(file.stat().st_size for file in files)
    us, them = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratios = sorted(them / us for us, them in pairs)
    print(f"{len(files)} logs, {size / 1e6:.1f} MB, {our_evals} evals; medians of {repetitions}, CPU time")
    print(f"mlperf_logging.parse_file  {them:.3f} s")
    print(f"LogTail + MllogReader      {us:.3f} s")
    print(f"ratio                      {statistics.median(ratios):.1f}x (from {ratios[0]:.1f} to {ratios[-1]:.1f})")


def garbage(folder: Path, files: list[Path], size: int) -> Path:
    """Make a log of ``size`` bytes: one real log, with typical other output between its lines."""
    chatter = b"".join(line for file in files[::50] for line in file.open("rb") if b":::MLLOG" not in line)
    real = files[0].read_bytes().splitlines(keepends=True)
    path = folder / "garbage.log"
    every = size // len(real)
    with path.open("wb") as out:
        for line in real:
            out.write(line)
            for _ in range(max(1, every // len(chatter))):
                out.write(chatter)
    return path


class Both:
    """The reader and the failure scanner with which the driver follows a log."""

    def __init__(self) -> None:
        self.reader, self.scanner = MllogReader(), FailureScanner()

    def feed(self, chunk: bytes) -> None:
        self.reader.feed(chunk)
        self.scanner.feed(chunk)

    def run(self) -> RunLog:
        return self.reader.run()


def tail_speed(path: Path, make_reader: Callable[[], LogReader], what: str) -> None:
    begin = time.process_time()
    tail = LogTail(path, make_reader)
    while tail.poll():
        pass
    spent = time.process_time() - begin
    size, evals = path.stat().st_size, len(tail.reader.run().evals)
    print(f"{what} over {size / 1e9:.2f} GB, mostly garbage: {size / 1e6 / spent:.0f} MB/s, {evals} evals found")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    default = os.environ.get("LORA_TUNE_MLPERF", str(Path(__file__).resolve().parents[2] / "shared" / "mlperf"))
    arguments.add_argument("--mlperf", type=Path, default=Path(default), help="folder of the public results")
    arguments.add_argument("--repetitions", type=int, default=7)
    options = arguments.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as name:
        files = unpack(options.mlperf / "logs", Path(name))
        compare(files, options.repetitions)
        log = garbage(Path(name), files, 1_000_000_000)
        tail_speed(log, MllogReader, "LogTail + MllogReader")
        tail_speed(log, Both, "the same with FailureScanner")


if __name__ == "__main__":
    main()
