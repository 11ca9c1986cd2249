"""The longest tick on a log of several gigabytes without time stamps, in processor seconds.

``python -m benchmarks.long_log [--gb 4] [--ticks 300]`` writes a log of that size (lines of training losses, evals and
other output); a new driver adopts it, and then reads it tick by tick, up to the limit of a tick. The first tick, which
estimates the arrival of unread lines, is the longest. ``--ticks 0``: to the end of the log.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from lora_tune.logs.follower import LogFollower, ReadBudget
from lora_tune.logs.lines import make_reader

LINES = 8000
"""Lines per block, about half a megabyte; the log is a sequence of blocks with consecutive steps."""


def block(number: int) -> bytes:
    """Lines of one block: one training loss in ten lines, an eval at the end."""
    chatter = b"INFO dataloader worker 3: shard 17 of 128 prefetched, queue 0.93 full, no errors\n" * 9
    steps = range(number * LINES // 10, (number + 1) * LINES // 10)
    text = b"".join(b'{"step": %d, "train_loss": 1.25}\n' % step + chatter for step in steps)
    return text + b'{"step": %d, "eval_loss": 1.1}\n' % steps[-1]


def write(log: Path, size: int) -> None:
    """Write a log of at least ``size`` bytes."""
    with log.open("wb") as file:
        for number in itertools.count():
            if file.tell() >= size:
                return
            file.write(block(number))


def ticks(log: Path) -> Iterator[tuple[float, int]]:
    """Processor seconds and bytes read of each tick; the first one adopts the log."""
    begun = time.time() - 3600
    before, followed = time.process_time(), None
    while True:
        if followed is None:
            followed = LogFollower(log, lambda: make_reader("jsonl", clock=time.time), time.time(), begun=begun)
        read = followed.poll(time.time(), drain=True, limit=ReadBudget(1).allows(stamped=followed.stamped))
        followed.run()
        now = time.process_time()
        yield now - before, read
        if not followed.unread:
            return
        before = now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--ticks", type=int, default=300)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "job.log"
        write(log, 1)
        list(ticks(log))  # imports and compilation happen once and are not measured
        write(log, int(options.gb * 1e9))
        spent = list(itertools.islice(ticks(log), options.ticks or None))
    first, longest = spent[0][0], max(seconds for seconds, _ in spent)
    read = sum(count for _, count in spent)
    print(
        f"{options.gb:g} GB: {len(spent)} ticks read {read / 1e9:.2f} GB; the first took {first:.2f} s of processor, "
        f"the longest {longest:.2f} s, all {sum(seconds for seconds, _ in spent):.0f} s"
    )


if __name__ == "__main__":
    main()
