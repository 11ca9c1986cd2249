#!/usr/bin/env bash
# Figures of packs on a real base, part by part:  bash benchmarks/gpu/real_base_figures.sh FOLDER [PART...]
#
#   FOLDER  what benchmarks.gpu.real_base made: base and text (GGUF and MANUALS, where set, are made into it first)
#   PART    passes, single, start, trials, paces, priors (all by default); each ends within SECONDS_PART (default 240), prints
#           one JSON line a figure, and needs no other one. OUT: folder for the table of priors, default gpu_out
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}" # named, or it would inherit our parts
export PYTHONPATH=$PEFT_PATH HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
folder=$1
shift
[ -z "${GGUF:-}" ] || python3 -m benchmarks.gpu.real_base "$folder" --gguf "$GGUF" --manuals "$MANUALS"
seconds=${SECONDS_PART:-240}
for part in "${@:-passes single start trials paces priors}"; do
    # shellcheck disable=SC2086
    timeout $((seconds + 120)) python3 -m benchmarks.gpu.real_base_figures "$folder" $part --seconds "$seconds" --out "$OUT/priors.npz"
done
