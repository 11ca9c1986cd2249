"""``python -m benchmarks.study_loading``: CPU seconds that each shipped study of the closed division takes to load.

The first line holds what is read once a process: the checker, its rules, and the reference points.
"""

from __future__ import annotations

import time
from pathlib import Path

from lora_tune.config.study import load_study

STUDIES = Path(__file__).resolve().parent.parent / "studies"


def main() -> None:
    """Print seconds and study, the slowest last; each is loaded twice and the second time counts."""
    files = [file for place in (STUDIES, STUDIES / "mlperf") for file in sorted(place.glob("*.toml"))]
    begin = time.process_time()
    closed = [file for file in files if load_study(file).division == "closed"]
    print(f"{time.process_time() - begin:6.2f} s  all {len(files)}, with what is read once")
    seconds = []
    for file in closed:
        begin = time.process_time()
        load_study(file)
        seconds.append((time.process_time() - begin, file.stem))
    for used, name in sorted(seconds):
        print(f"{used:6.2f} s  {name}")


if __name__ == "__main__":
    main()
