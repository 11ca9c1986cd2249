"""Start-up cost of each command: ``python -m benchmarks.start_up``, processor seconds of ``--help``.

Prints for every command the minimum of ``--repetitions`` runs, minus that of a bare interpreter, so that other load on
the machine has little effect.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import subprocess
import sys

from lora_tune.__main__ import COMMANDS


def cost(program: str) -> float:
    """Processor seconds of an interpreter that runs ``program``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--repetitions", type=int, default=5)
    options = arguments.parse_args()
    load = os.getloadavg()[0]
    print(f"{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, load {load:.1f}")

    def least(program: str) -> float:
        return min(cost(program) for _ in range(options.repetitions))

    bare, library = least("pass"), least("import sqlalchemy")
    print(f"bare interpreter {bare:.2f} s; SQLAlchemy alone {library - bare:.2f} s more")
    for command in COMMANDS:
        program = f"from lora_tune.__main__ import main; main([{command!r}, '--help'])"
        print(f"{command:12s} {least(program) - bare:.2f} s", flush=True)


if __name__ == "__main__":
    main()
