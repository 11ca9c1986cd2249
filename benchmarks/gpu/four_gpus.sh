#!/usr/bin/env bash
# Four GPUs, stage by stage:  bash benchmarks/gpu/four_gpus.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   probes   layouts and precisions of the whole 70B shape, in order of interest (SECONDS_PROBES, default 500)
#   sweep    a study under real Slurm (STUDY, default nemo_h200x4; TRIALS)
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    probes)
        start_worker lora_tune.recipes.nemo.trial
        # shellcheck disable=SC2086
        timeout 570 python3 -m benchmarks.gpu.probes --gpus 4 --llama "${LLAMA:-70b}" --total "${SECONDS_PROBES:-500}" --out "$OUT/probes.json" ${ONLY:+--only $ONLY}
        ;;
    sweep)
        start_slurm
        start_worker lora_tune.recipes.nemo.trial
        study=${STUDY:-nemo_h200x4}
        timeout "${SECONDS_SWEEP:-540}" python3 -m lora_tune.sweep --study "$study" ${TRIALS:+--trials "$TRIALS"} \
            --output "$LT/sweeps/$study" 2>&1 | tee "$OUT/sweep.txt"
        tar czf "$OUT/sweep.tgz" -C "$LT/sweeps" "$study"
        ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
cp "$LT/worker.log" "$OUT/worker.log" 2>/dev/null
[ ! -d "$OUT/logs" ] || { tar czf "$OUT/logs.tgz" -C "$OUT" logs && rm -r "$OUT/logs"; }
