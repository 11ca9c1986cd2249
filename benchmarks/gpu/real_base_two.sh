#!/usr/bin/env bash
# Sweep, confirm and export on a real base with two GPUs:  bash benchmarks/gpu/real_base_two.sh FOLDER [packs|single]...
#
#   FOLDER  what benchmarks.gpu.real_base made (by default both stages)
#   packs   packs_h100x2 under real Slurm: one job with a pack on each GPU. single: single_h100x2, one trial a GPU
# Every command is bounded; OUT (default gpu_out) gets its output and the sweeps.
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
folder=$1
shift
stages=${*:-packs single}
set --
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"
export PYTHONPATH=$PEFT_PATH HF_HUB_OFFLINE=1
for stage in $stages; do
    study=${stage}_h100x2
    sed "s#^system = #model = \"$folder/base\"\ndata = \"$folder/text\"\n&#" "benchmarks/gpu/$study.toml" >"$LT/$study.toml"
    [ "$stage" = single ] || start_slurm
    for command in "${SECONDS_SWEEP:-240} sweep" "${SECONDS_CONFIRM:-120} confirm --top 2 --seeds 2" "30 export"; do
        # shellcheck disable=SC2086
        set -- $command
        echo "== $study $2 $(date +%T)"
        timeout "$1" python3 -m "lora_tune.$2" --study "$LT/$study.toml" "${@:3}" --output "$LT/sweeps/$study" 2>&1 |
            tee "$OUT/$study.$2.txt" | tail -n "${TAIL:-25}"
    done
    tar czf "$OUT/$study.tgz" -C "$LT/sweeps" "$study"
done
