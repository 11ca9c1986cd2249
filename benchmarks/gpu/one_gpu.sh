#!/usr/bin/env bash
# One GPU, stage by stage:  bash benchmarks/gpu/one_gpu.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the trials adapt (about 1 minute)
#   curves   eval curves over learning rates: which target separates good from bad
#   probes   throughput variants of an 8-layer slice of the 70B shape
#   sweep    the study under real Slurm (STUDY, default nemo_h100x1; TRIALS; WORKER, what its trials import)
#   tables   whole eval curves of thousands of adapters (TOKENS of a pass: memory); small needs the base
# A warm worker serves all of them, and stays for the next call while the machine does.
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
BASE=$LT/base
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base) [ -f "$BASE/config.json" ] || timeout 180 python3 -m benchmarks.gpu.make_base "$BASE" | tee "$OUT/base.json" ;;
    curves)
        start_worker lora_tune.recipes.nemo.trial
        timeout 400 python3 -m benchmarks.gpu.curves --base "$BASE" --total 300 --out "$OUT/curves.json"
        ;;
    probes)
        start_worker lora_tune.recipes.nemo.trial
        timeout 560 python3 -m benchmarks.gpu.probes --llama 70b_slice8 --total "${SECONDS_PROBES:-300}" --out "$OUT/probes.json"
        ;;
    sweep)
        start_slurm
        start_worker "${WORKER:-lora_tune.recipes.nemo.trial}"
        study=${STUDY:-nemo_h100x1}
        timeout "${SECONDS_SWEEP:-540}" python3 -m lora_tune.sweep --study "$study" ${TRIALS:+--trials "$TRIALS"} \
            --output "$LT/sweeps/$study" 2>&1 | tee "$OUT/sweep.txt"
        tar czf "$OUT/sweep.tgz" -C "$LT/sweeps" "$study"
        ;;
    tables)
        for grid in tiny small; do
            timeout 300 python3 -m lora_tune.recipes.many_adapters --grid "benchmarks/gpu/grid_$grid.json" --seconds 240 \
                --tokens "${TOKENS:-131072}" --out "$OUT/$grid.npz"
        done
        ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
cp "$LT/worker.log" "$OUT/worker.log" 2>/dev/null
[ ! -d "$OUT/logs" ] || { tar czf "$OUT/logs.tgz" -C "$OUT" logs && rm -r "$OUT/logs"; }
