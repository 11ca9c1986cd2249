"""Packs the text once. Every run of it leaves a line in ``preprocessed.log`` beside the data."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.small_lora import symbols

parser = argparse.ArgumentParser(prog="preprocess.py")
parser.add_argument("--max_length", type=int, required=True)
given = parser.parse_args()
folder = Path(os.environ["DATADIR"])
folder.mkdir(parents=True, exist_ok=True)
(folder / "packed.bin").write_bytes(symbols("train").astype("uint8").tobytes())
with (folder / "preprocessed.log").open("a") as log:
    log.write(f"{time.time()} job {os.environ.get('SLURM_JOB_ID', '')} {given.max_length}\n")
print("packed")
