"""torchrun's arguments, checked, and its rendezvous; then the script."""

from __future__ import annotations

import argparse
import os
import runpy
import sys

sys.path.insert(0, os.environ["STANDIN_ROOT"])
from tests.standins.failures import TEXTS, applies

parser = argparse.ArgumentParser(prog="torchrun")
for name, kind in (("nnodes", int), ("nproc-per-node", int), ("rdzv-id", str), ("rdzv-endpoint", str)):
    parser.add_argument(f"--{name}", type=kind, required=True)
parser.add_argument("--rdzv-backend", choices=["c10d"], required=True)
parser.add_argument("script")
parser.add_argument("arguments", nargs=argparse.REMAINDER)
given = parser.parse_args()
host, _, port = given.rdzv_endpoint.partition(":")
if not (host and port.isdigit()):
    parser.error(f"--rdzv-endpoint {given.rdzv_endpoint} is not HOST:PORT")
if os.environ.get("SLURM_PROCID", "0") != "0":
    sys.exit(0)
print(f"rendezvous at {given.rdzv_endpoint}, {given.nnodes} nodes", flush=True)
if applies("rendezvous"):
    print(TEXTS["rendezvous"])
    sys.exit(1)
os.environ["WORLD_SIZE"] = str(given.nnodes * given.nproc_per_node)
sys.argv = [given.script, *given.arguments]
runpy.run_path(given.script, run_name="__main__")
