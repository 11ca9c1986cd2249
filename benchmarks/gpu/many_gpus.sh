#!/usr/bin/env bash
# All GPUs of one host, stage by stage:  bash benchmarks/gpu/many_gpus.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the sweep's trials adapt (about 1 minute, on one GPU)
#   probes   layouts and precisions of the whole 70B shape, in order of interest (SECONDS_PROBES, default 500; ONLY)
#   sweep    a study under real Slurm (STUDY, default nemo_h200x4 on four GPUs and h200x8 on eight; TRIALS)
#   confirm  more seeds of the sweep's leading configs (SEEDS, default 3)
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
study=${STUDY:-nemo_h200x4}
[ "$GPUS" -lt 8 ] || study=${STUDY:-h200x8}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base)
        [ -f "$LT/base/config.json" ] || timeout 180 python3 -m benchmarks.gpu.make_base "$LT/base" | tee "$OUT/base.json"
        ;;
    probes)
        start_worker lora_tune.recipes.nemo.trial
        # shellcheck disable=SC2086
        timeout 570 python3 -m benchmarks.gpu.probes --gpus "$GPUS" --llama "${LLAMA:-70b}" --batch "${BATCH:-$GPUS}" \
            --total "${SECONDS_PROBES:-500}" --out "$OUT/probes.json" ${ONLY:+--only $ONLY}
        ;;
    sweep | confirm)
        start_slurm
        start_worker lora_tune.recipes.nemo.trial
        what=(lora_tune.sweep --study "$study" ${TRIALS:+--trials "$TRIALS"})
        [ "$stage" = sweep ] || what=(lora_tune.confirm --study "$study" --seeds "${SEEDS:-3}")
        timeout "${SECONDS_SWEEP:-540}" python3 -m "${what[@]}" --output "$LT/sweeps/$study" 2>&1 | tee "$OUT/$stage.txt"
        tar czf "$OUT/sweep.tgz" -C "$LT/sweeps" "$study"
        ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
cp "$LT/worker.log" "$OUT/worker.log" 2>/dev/null
[ ! -d "$OUT/logs" ] || { tar czf "$OUT/logs.tgz" -C "$OUT" logs && rm -r "$OUT/logs"; }
