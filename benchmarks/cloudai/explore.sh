#!/usr/bin/env bash
# CloudAI explores fio's options with our agent, on its standalone system: bash benchmarks/cloudai/explore.sh FOLDER
# Needs the commands cloudai, in whose environment lora_tune is installed too, and fio. The steps: FOLDER/results/*/Tests.fio/0/trajectory.csv.
set -euo pipefail
[ $# = 1 ] || { echo "usage: bash benchmarks/cloudai/explore.sh FOLDER" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" && cd "$1"
time cloudai run --system-config "$here/system.toml" --tests-dir "$here/test" --test-scenario "$here/scenario.toml"
cat results/*/Tests.fio/0/trajectory.csv
