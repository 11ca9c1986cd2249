#!/usr/bin/env bash
# One GPU, stage by stage:  bash benchmarks/gpu/one_gpu.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the trials adapt (about 90 s; imports for the sweep go on beside it)
#   curves   eval curves over learning rates: which target separates good from bad
#   probes   throughput variants of an 8-layer slice of the 70B shape
#   sweep    the study under real Slurm (STUDY, default nemo_h100x1; TRIALS; SECONDS_SWEEP)
#   confirm  more seeds of the sweep's best two (SEEDS, default 5)
#   peft     some trials of peft_h100x1 under Slurm (TRIALS_PEFT, default 6)
#   compare  the NeMo recipe, the PEFT recipe and transformers.Trainer side by side (SHAPE, default 7b)
#   bridge   Megatron-Bridge beside NeMo and PEFT: speed of the 70B slice, eval losses, an adapter that peft loads (BRIDGE_PARTS)
#   bridge_sweep  bridge_h200x1 under real Slurm (TRIALS; SECONDS_SWEEP)
#   bridge_start  the start of a small Bridge trial in a warm worker, with and without spares (TRIALS_START of each, default 6)
#   tables   whole eval curves of thousands of adapters (GRIDS, default tiny and small; also warmup. TOKENS of a pass: memory)
#   packed   trials side by side over one base: speed of each shape, equality, trials an hour (PARTS)
#   packed_sweep  one study under real Slurm in a pack of 64 and one trial at a time, whole sweeps (SECONDS_SWEEP each, default 90),
#            and ten seeds of the pack's three leaders at one time (SEEDS)
#   packed_faults  packs and drivers killed or asked to end at random (KILLS, default 6); then a pack short of memory
#   knobs    knobs of the PEFT recipe that need a GPU, each once: QLoRA, DoRA; FSDP where there are two GPUs
# A warm worker serves NeMo's stages, and stays for the next call while the machine does.
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
BASE=$LT/base
study=${STUDY:-nemo_h100x1}
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
case " $* " in *" base "*) start_base ;; esac
case " $* " in *" sweep "* | *" curves "* | *" probes "* | *" confirm "*) start_worker lora_tune_recipes.nemo.trial ;; esac

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base) base_ready ;;
    curves)
        worker_ready
        timeout 400 python3 -m benchmarks.gpu.curves --base "$BASE" --total 300 --out "$OUT/curves.json"
        ;;
    probes)
        worker_ready
        timeout 560 python3 -m benchmarks.gpu.probes --llama 70b_slice8 --total "${SECONDS_PROBES:-300}" --out "$OUT/probes.json"
        ;;
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
    compare)
        timeout 400 python3 -m benchmarks.gpu_side_by_side --shape "${SHAPE:-7b}" --block 6 --peft-path "$PEFT_PATH" \
            --limit 100 --out "$OUT/side_by_side.json"
        ;;
    bridge)
        start_base
        unpack_nemo
        unpack_bridge
        start_workers_of_megatron
        start_worker_of peft "$PEFT_PATH" lora_tune_recipes.training
        workers_ready bridge nemo peft
        base_ready
        timeout "${SECONDS_BRIDGE:-460}" python3 -m benchmarks.gpu.bridge --base "$BASE" --workers "$LT/workers" --out "$OUT/bridge.json" \
            --bridge-path "$BRIDGE_PATH" --nemo-path "$NEMO_PATH" --peft-path "$PEFT_PATH" ${BRIDGE_PARTS:+--parts $BRIDGE_PARTS} --total "$((${SECONDS_BRIDGE:-460} - 15))" 2>&1 |
            tee "$OUT/bridge.txt"
        cp "$LT"/workers/*.log "$OUT"
        ;;
    bridge_sweep) bridge_sweep_stage bridge_h200x1 ;;
    bridge_start)
        start_base
        unpack_te
        unpack_bridge
        base_ready
        PYTHONPATH=$BRIDGE_PATH timeout "${SECONDS_START:-220}" python3 -m benchmarks.gpu.start_up --base "$BASE" \
            --out "$OUT/start_up/start_up.json" --trials "${TRIALS_START:-6}" 2>&1 | tee "$OUT/start_up.txt"
        ;;
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
    packed_sweep)
        start_base
        base_ready
        start_slurm
        PYTHONPATH=$PEFT_PATH timeout 500 python3 -m benchmarks.gpu.packed_sweep --base "$BASE" --trials "${TRIALS:-192}" --slurm \
            --seconds "${SECONDS_SWEEP:-90}" --confirm "${SEEDS:-10}" --out "$LT/packed_sweep" 2>&1 | tee "$OUT/packed_sweep.txt"
        tar czf "$OUT/packed_sweep.tgz" -C "$LT" packed_sweep
        ;;
    packed_faults)
        start_base
        base_ready
        (
            export PYTHONPATH=$PEFT_PATH
            timeout 260 python3 -m benchmarks.packed_faults --base "$BASE" --gpus 1 --slots 8 --trials 24 --steps 300 \
                --kills "${KILLS:-6}" --pause 20 --limit 220 2>&1 | tee "$OUT/packed_faults.txt"
            timeout 240 python3 -m benchmarks.gpu.packed_memory --base "$BASE" --out "$OUT/packed_memory.json"
        )
        ;;
    knobs) PYTHONPATH=$PEFT_PATH timeout 400 python3 -m benchmarks.gpu.recipe_knobs --out "$OUT/recipe_knobs.json" ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
gather_logs
