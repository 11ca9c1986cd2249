"""Fuzzing of all text parsers: no crash, no hang, bounded memory.

``python -m benchmarks.fuzz --inputs 1000000`` mutates valid inputs (lines swapped, cut, joined, repeated; bytes
flipped, inserted, deleted; hostile pieces inserted), in these shares:

- 78% MLLOG logs, through the parser whole and in random pieces: both must give the same values
- 2% logs of every format through all readers, the failure scanner, the diagnosis and the redaction, likewise
- 18% answers of squeue, sacct and scontrol, through their parsers and the table of states
- 1.8% study files: a study, or an error message
- 0.2% config files: without damage to their quoting, bash must read back what was exported

Prints the counts, the slowest input, and the growth of memory; exits 1 with the input in hexadecimal if anything is
wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from lora_tune.base.errors import LoraTuneError
from lora_tune.base.host import MOST
from lora_tune.config.study import parse_study
from lora_tune.launchers.base import JobState, Ticket
from lora_tune.launchers.slurm import parse
from lora_tune.logs.failures import FailureScanner, diagnose, redact
from lora_tune.logs.lines import make_reader
from lora_tune.logs.mllog import MllogReader
from lora_tune.logs.run import LogReader
from lora_tune.workloads.config_file import render
from lora_tune.workloads.implementation import sourced

STUDIES = Path(__file__).resolve().parent.parent / "studies"
SLOW_SECONDS = 2.0
GROWTH_MIB = 256
MAX_WORD = 1000
"""Characters; a longer secret may be redacted in part, and further when redacted again."""

NOW = 1_700_000_000.0

READERS: dict[str, Callable[[], LogReader]] = {
    "mllog": lambda: make_reader("mllog"),
    "hf_trainer": lambda: make_reader("hf_trainer", clock=lambda: NOW, samples_per_epoch=3901),
    "jsonl": lambda: make_reader("jsonl", clock=lambda: NOW, global_batch_size=8),
    "regex": lambda: make_reader(
        "regex",
        clock=lambda: NOW,
        eval=r"step (?P<step>\d+).*val loss[:=] ?(?P<loss>\S+)",
        train=r"step (?P<step>\d+) loss (?P<loss>\S+)",
    ),
}
FAILURES = (
    b"0: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.",
    b"slurmstepd: error: *** JOB 1 ON n1 CANCELLED AT 2025-01-01T00:00:00 DUE TO TIME LIMIT ***",
    b"+ export HF_TOKEN=hf_abcdefghijklmnopqrstuvwx",
    b"Traceback (most recent call last):",
    b"[rank0]: ValueError: `val_check_interval` (192) must be less than or equal to the number of batches",
    b"git clone https://me:secret@host/x.git --password 'a b'",
    b"\x1b[31mKeyError: 'x'\x1b[0m",
)
HOSTILE = (
    b":::MLLOG ",
    b":::MLLOG {",
    b":::MLLOG",
    b"{",
    b"}}",
    b"{'",
    b"'}",
    b'"',
    b"\\",
    b"\n",
    b"\r",
    b"\x00",
    b"\xff\xfe",
    b"\x1b[",
    b"\x1b]",
    b"NaN",
    b"-Infinity",
    b"1e999",
    b"9" * 400,
    b"[" * 300,
    b"Error: ",
    b"token=",
    b"://",
    b"-----BEGIN PRIVATE KEY-----",
    b"a" * 5000,
    b"'loss': ",
    b"samples_count",
)


def golden() -> list[list[bytes]]:
    """One log of each format, as lines."""
    time_ms = 1_700_000_000_000
    mllog = []
    events = [("init_start", None, {}), ("global_batch_size", 8, {}), ("train_samples", 3901, {}), ("seed", 1, {})]
    events += [("init_stop", None, {}), ("run_start", None, {}), ("block_start", None, {"samples_count": 0})]
    for samples in (1536, 1920, 2304):
        events += [
            ("train_loss", 1.4, {"samples_count": samples, "lr": 4e-4}),
            ("tracked_stats", {"throughput": 2.1, "train_step_time": 3.8}, {"step": samples}),
            ("tracked_stats", {"train_loss": 1.3}, {"samples_count": samples + 8, "step": 200}),
            ("block_stop", None, {"samples_count": samples}),
            ("eval_start", None, {"samples_count": samples}),
            ("eval_accuracy", 0.93, {"samples_count": samples}),
            ("eval_stop", None, {"samples_count": samples}),
        ]
    events += [("run_stop", None, {"samples_count": 2304, "status": "success"})]
    for key, value, metadata in events:
        time_ms += 1000
        record = {"namespace": "", "time_ms": time_ms, "event_type": "POINT_IN_TIME", "key": key, "value": value}
        record["metadata"] = {"file": "/workspace/ft-llm/custom_callbacks.py", "lineno": 181, **metadata}
        mllog.append(b"0: :::MLLOG " + json.dumps(record).encode())
    trainer = [f"{{'loss': {2 - k / 10}, 'grad_norm': 0.3, 'epoch': {k / 10}}}".encode() for k in range(8)]
    trainer += [b"{'eval_loss': 0.93, 'eval_runtime': 4.1, 'epoch': 0.5}"]
    trainer += [b"{'train_runtime': 2577.75, 'train_samples_per_second': 95.339, 'train_loss': 1.0, 'epoch': 0.9}"]
    lines = [json.dumps({"step": k, "train_loss": 1.0, "eval_loss": 0.9, "seconds": k}).encode() for k in range(8)]
    words = [f"step {k} loss 1.{k} | step {k} lr 1e-4 val loss: 0.9{k}".encode() for k in range(8)]
    return [mllog, trainer, lines, words]


def mutate(chance: random.Random, logs: list[list[bytes]]) -> bytes:
    """One damaged log of a few lines."""
    lines = list(chance.choice(logs))
    begin = chance.randrange(len(lines))
    lines = lines[begin : begin + chance.randrange(1, 8)]
    lines += chance.choices(FAILURES, k=chance.randrange(3))
    if chance.random() < 0.3:
        chance.shuffle(lines)
    if chance.random() < 0.2:
        lines += chance.choices(lines, k=2)
    return damaged(chance, bytearray(chance.choice((b"\n", b"\n", b"\r\n", b"", b"\n7: ")).join(lines)))


def damaged(chance: random.Random, log: bytearray) -> bytes:
    """Apply up to five mutations."""
    for _ in range(chance.randrange(6)):
        at = chance.randrange(len(log) + 1)
        kind = chance.random()
        if kind < 0.4:
            log[at:at] = chance.choice(HOSTILE)
        elif kind < 0.6:
            del log[at : at + chance.randrange(1, 80)]
        elif kind < 0.8 and at < len(log):
            log[at] ^= 1 << chance.randrange(8)
        else:
            log[at:at] = chance.randbytes(chance.randrange(1, 12))
    return bytes(log)


def pieces(chance: random.Random, log: bytes) -> list[bytes]:
    edges = sorted(chance.randrange(len(log) + 1) for _ in range(chance.randrange(4)))
    return [log[begin:end] for begin, end in zip([0, *edges], [*edges, len(log)], strict=True)]


def check(chance: random.Random, log: bytes) -> str:
    """Run one input through all readers; return the problem, or ""."""
    split = pieces(chance, log)
    for kind, make in READERS.items():
        whole, cut = make(), make()
        whole.feed(log)
        for piece in split:
            cut.feed(piece)
        if repr(whole.run()) != repr(cut.run()):
            return f"{kind}: pieces of {[len(piece) for piece in split]} bytes give other facts"
    one, other = FailureScanner(), FailureScanner()
    one.feed(log)
    for piece in split:
        other.feed(piece)
    if one.hits() != other.hits() or one.last_line() != other.last_line():
        return f"scanner: pieces of {[len(piece) for piece in split]} bytes give other failures"
    found = diagnose(one, exit_code=1)
    if not found.kind or "\n" in found.line:
        return f"diagnose: {found}"
    shown = redact(log.decode(errors="replace"))
    if redact(shown) == shown or max(map(len, shown.split())) > MAX_WORD:
        return ""
    return f"redact: not the same when done twice: {shown}"


def check_mllog(chance: random.Random, log: bytes) -> str:
    """The MLLOG parser, whole and in pieces."""
    whole, cut = MllogReader(), MllogReader()
    whole.feed(log)
    split = pieces(chance, log)
    for piece in split:
        cut.feed(piece)
    same = repr(whole.runs()) == repr(cut.runs())
    return "" if same else f"mllog: pieces of {[len(piece) for piece in split]} bytes give other facts"


def slurm_answers() -> list[list[bytes]]:
    """Output of squeue, sacct and scontrol for a few jobs."""
    values = {"JobID": "17", "Name": "s-0001-0", "RestartCnt": "0", "exit_code": "256", "NodeList": "n[1-3,07]"}
    times = {"SubmitTime": "1700000000", "StartTime": "1700000005", "EndTime": "N/A", "Comment": "mine"}
    squeue, sacct = [], []
    for number, state in enumerate(parse.STATES):
        fields = {**values, **times, "JobID": str(number), "State": state, "Reason": "None"}
        line = "".join(fields.get(name, "").ljust(width) for name, width in parse._SQUEUE.items())
        squeue.append(line.encode())
        sacct.append(f"{number}|{state} by 0|0:9|1:0|1700000000|1700000005|Unknown|n[1-2]|mine|s-0001-0".encode())
    detail = b"JobId=17 JobName=s ExitCode=0:0 DerivedExitCode=3:0 NodeList=n[1-2]"
    return [squeue, sacct, [detail] * 4]


def check_slurm(_: random.Random, answer: bytes) -> str:
    """Run each answer through every parser."""
    text = answer.decode(errors="replace")
    parse.detail_exit_code(text)
    parse.output_rows(text)
    for row in (*parse.squeue_rows(text), *parse.sacct_rows(text)):
        status = parse.status(row, NOW)
        if not isinstance(status.state, JobState) or len(status.nodes) > MOST:
            return f"slurm: {row}"
        job = Ticket(name=row.name, folder=Path(row.output), token=row.comment, job_id=row.job_id, submitted_at=NOW)
        parse.find([row], job)
    return ""


def study_files() -> list[list[bytes]]:
    return [file.read_bytes().splitlines() for file in sorted(STUDIES.glob("*.toml"))]


def check_study(_: random.Random, text: bytes) -> str:
    """A study, or an error that names the file."""
    with contextlib.suppress(LoraTuneError):
        parse_study(text.decode(errors="replace"), STUDIES / "fuzz.toml")
    return ""


def check_config(_: random.Random, text: bytes) -> str:
    """bash must read the value that was written, and execute nothing."""
    value = text.decode(errors="replace").replace("\0", "")
    shown = render({"VALUE": value, "LR": 4e-4}, comments=(value,))
    found = sourced(shown)
    return "" if found.get("VALUE") == value and found.get("LR") == "0.0004" else f"config: {found}"


def whole_file(chance: random.Random, files: list[list[bytes]]) -> bytes:
    """One damaged file with all of its lines."""
    return damaged(chance, bytearray(b"\n".join(chance.choice(files))))


def targets() -> dict[str, tuple[float, Callable[[random.Random], bytes], Callable[[random.Random, bytes], str]]]:
    """Share of the inputs, generator of an input, and its check, by name."""
    logs, answers, studies = golden(), slurm_answers(), study_files()
    return {
        "MLLOG parser": (0.78, lambda c: mutate(c, logs[:1]), check_mllog),
        "all readers": (0.02, lambda c: mutate(c, logs), check),
        "Slurm's answers": (0.18, lambda c: mutate(c, answers), check_slurm),
        "study files": (0.018, lambda c: whole_file(c, studies), check_study),
        "config files": (0.002, lambda c: mutate(c, studies)[:2000], check_config),
    }


def main() -> int:
    arguments = argparse.ArgumentParser(description="damaged input through everything that reads text")
    arguments.add_argument("--inputs", type=int, default=100_000)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--minutes", type=float, default=60.0, help="stop after so long, with what was done by then")
    options = arguments.parse_args()
    chance, found = random.Random(options.seed), targets()
    names, shares = list(found), [share for share, _, _ in found.values()]
    slowest, fed, start, before, done = (0.0, ""), 0, time.monotonic(), 0, Counter[str]()
    for number in range(options.inputs):
        if number % 100 == 0 and time.monotonic() - start > options.minutes * 60:
            break
        (name,) = chance.choices(names, shares)
        _, make, test = found[name]
        text = make(chance)
        begin = time.process_time()
        try:
            wrong = test(chance, text)
        except Exception as error:  # noqa: BLE001  # any error is reported with its input
            wrong = f"{type(error).__name__}: {error}"
        spent = time.process_time() - begin
        slowest, fed = max(slowest, (spent, name)), fed + len(text)
        if wrong or spent > SLOW_SECONDS:
            print(f"input {number}, {name}, {spent:.2f} s: {wrong or 'too slow'}\n{text.hex()}")
            return 1
        done[name] += 1
        if number == min(1000, options.inputs // 2):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{datetime.date.today()}, {os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}")
    kinds = ", ".join(f"{count:,} {name}" for name, count in done.items())
    spent = time.monotonic() - start
    print(f"{sum(done.values()):,} inputs, {fed / 1e6:.0f} MB, seed {options.seed}, in {spent:.0f} s: {kinds}")
    print(
        f"crashes 0, differences 0, slowest input {slowest[0] * 1000:.1f} ms of CPU ({slowest[1]}), "
        f"memory grew by {growth:.1f} MiB"
    )
    return 1 if growth > GROWTH_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
