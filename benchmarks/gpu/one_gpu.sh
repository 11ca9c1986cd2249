#!/usr/bin/env bash
# One GPU, stage by stage:  bash benchmarks/gpu/one_gpu.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the trials adapt (about 90 s; imports for the sweep go on beside it)
#   sweep    the study under real Slurm (STUDY, default nemo_h100x1; TRIALS; SECONDS_SWEEP)
#   confirm  more seeds of the sweep's best two (SEEDS, default 5)
#   peft     some trials of peft_h100x1 under Slurm (TRIALS_PEFT, default 6)
#   bridge_sweep  bridge_h200x1 under real Slurm (TRIALS; SECONDS_SWEEP)
#   tables   whole eval curves of thousands of adapters (GRIDS, default tiny and small; also warmup. TOKENS of a pass: memory)
#   packed   trials side by side over one base: speed of each shape, equality, trials an hour (PARTS)
#   packed_faults  packs and drivers killed or asked to end at random (KILLS, default 6)
# A warm worker serves NeMo's stages, and stays for the next call while the machine does.
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
BASE=$LT/base
study=${STUDY:-nemo_h100x1}
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
case " $* " in *" base "*) start_base ;; esac
case " $* " in *" sweep "* | *" confirm "*) start_worker lora_tune_recipes.nemo.trial ;; esac

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base) base_ready ;;
    sweep) sweep_stage "$study" ;;
    confirm) confirm_stage "$study" "${SEEDS:-5}" ;;
    peft)
        start_slurm
        # Another worker, at the address that this study names: each has one set of imports.
        (
            export PYTHONPATH=$PEFT_PATH LORA_TUNE_WORKER=$LT/peft.sock
            setsid python3 -m lora_tune_recipes.warm_worker --socket "$LORA_TUNE_WORKER" lora_tune_recipes.training >"$LT/peft.log" 2>&1 </dev/null &
            until_true 90 grep -q ready "$LT/peft.log" && tail -n 1 "$LT/peft.log"
            under_slurm peft_h100x1 "${SECONDS_PEFT:-120}" sweep --trials "${TRIALS_PEFT:-6}"
        )
        ;;
    bridge_sweep) bridge_sweep_stage bridge_h200x1 ;;
    tables)
        for grid in ${GRIDS:-tiny small}; do
            PYTHONPATH=$PEFT_PATH timeout "$((${SECONDS_TABLE:-240} + 60))" python3 -m lora_tune_recipes.many_adapters --grid "benchmarks/gpu/grid_$grid.json" \
                --seconds "${SECONDS_TABLE:-240}" --tokens "${TOKENS:-262144}" --out "$OUT/$grid.npz"
        done
        ;;
    packed)
        start_base
        base_ready
        PYTHONPATH=$PEFT_PATH timeout "${SECONDS_PACKED:-540}" python3 -m benchmarks.gpu.packed --base "$BASE" --out "$OUT/packed.json" \
            ${PARTS:-speed equality trials large}
        ;;
    packed_faults)
        start_base
        base_ready
        (
            export PYTHONPATH=$PEFT_PATH
            timeout 260 python3 -m benchmarks.packed_faults --base "$BASE" --gpus 1 --slots 8 --trials 24 --steps 300 \
                --kills "${KILLS:-6}" --pause 20 --limit 220 2>&1 | tee "$OUT/packed_faults.txt"
        )
        ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
gather_logs
