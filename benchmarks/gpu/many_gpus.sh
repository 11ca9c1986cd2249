#!/usr/bin/env bash
# All GPUs of one host, stage by stage:  bash benchmarks/gpu/many_gpus.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the small trials adapt (about 90 s on one GPU; imports go on beside it)
#   probes   layouts and precisions of the whole 70B shape, in order of interest (SECONDS_PROBES, default 500; ONLY)
#   peft     the PEFT recipe's tests of FSDP2, TP and CP on two GPUs
#   layouts  the study of the 70B shape's throughput under real Slurm (nemo_h200x2 or x4; TRIALS_LAYOUTS; SECONDS_LAYOUTS)
#   sweep    a study of the small Llama under real Slurm (STUDY, default nemo_small_h200x2 or x4, h200x8; TRIALS)
#   confirm  more seeds of that sweep's leading configs (SEEDS, default 3)
#   bridge   Megatron-Bridge beside NeMo: speed of the whole 70B shape, eval losses of a small Llama in every layout
#   bridge_sweep  bridge_small_h200x2 under real Slurm (two GPUs; TRIALS; SECONDS_SWEEP)
#   overlap  the small Llama with and without overlapped communication: the losses must be alike
set -u
OUT=${OUT:-gpu_out}
mkdir -p "$OUT"
source benchmarks/gpu/prepare.sh "${LT:-/tmp/lora_tune}"  # named, or it would inherit our stages
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader
GPUS=$(nvidia-smi --query-gpu=index --format=csv,noheader | wc -l)
study=${STUDY:-nemo_small_h200x$GPUS}
[ "$GPUS" -lt 8 ] || study=${STUDY:-h200x8}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
case " $* " in *" base "*) start_base ;; esac
case " $* " in *" probes "* | *" layouts "* | *" sweep "* | *" confirm "* | *" overlap "*) start_worker lora_tune_recipes.nemo.trial ;; esac

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base) base_ready ;;
    probes)
        worker_ready
        # shellcheck disable=SC2086
        timeout 570 python3 -m benchmarks.gpu.probes --gpus "$GPUS" --llama "${LLAMA:-70b}" --batch "${BATCH:-$GPUS}" \
            --steps "${STEPS:-4}" --total "${SECONDS_PROBES:-500}" --out "$OUT/probes.json" ${ONLY:+--only $ONLY}
        ;;
    peft)
        PYTHONPATH=$PEFT_PATH LORA_TUNE_WORKER='' timeout 200 python3 -m pytest -o addopts= -p no:cacheprovider -v \
            tests/recipes/test_peft.py -k two_gpus 2>&1 | tee "$OUT/peft.txt"
        ;;
    layouts) TRIALS=${TRIALS_LAYOUTS:-} SECONDS_SWEEP=${SECONDS_LAYOUTS:-400} sweep_stage "nemo_h200x$GPUS" ;;
    sweep) sweep_stage "$study" ;;
    confirm) confirm_stage "$study" "${SEEDS:-3}" ;;
    overlap)
        worker_ready
        timeout 250 python3 -m benchmarks.gpu.overlap --base "$LT/base" --gpus "$GPUS" --out "$OUT/overlap.json"
        ;;
    bridge)
        start_base
        unpack_nemo
        unpack_bridge
        start_workers_of_megatron
        workers_ready bridge nemo
        base_ready
        timeout "${SECONDS_BRIDGE:-430}" python3 -m benchmarks.gpu.bridge_layouts --base "$LT/base" --gpus "$GPUS" --workers "$LT/workers" \
            --bridge-path "$BRIDGE_PATH" --nemo-path "$NEMO_PATH" ${BRIDGE_PARTS:+--parts $BRIDGE_PARTS} \
            --total "$((${SECONDS_BRIDGE:-430} - 15))" --large-seconds "${SECONDS_LARGE:-330}" --out "$OUT/layouts.json" 2>&1 | tee "$OUT/layouts.txt"
        cp "$LT"/workers/*.log "$OUT"
        ;;
    bridge_sweep) bridge_sweep_stage "bridge_small_h200x$GPUS" ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
gather_logs
