#!/usr/bin/env bash
# All GPUs of one host, stage by stage:  bash benchmarks/gpu/many_gpus.sh STAGE...   (OUT: folder for results, default gpu_out)
#
#   base     train the small base that the small trials adapt (about 90 s on one GPU; imports go on beside it)
#   peft     the PEFT recipe's tests of FSDP2, TP and CP on two GPUs
#   layouts  the study of the 70B shape's throughput under real Slurm (nemo_h200x2 or x4; TRIALS_LAYOUTS; SECONDS_LAYOUTS)
#   sweep    a study of the small Llama under real Slurm (STUDY, default nemo_small_h200x2 or x4, h200x8; TRIALS)
#   confirm  more seeds of that sweep's leading configs (SEEDS, default 3)
#   bridge_sweep  bridge_small_h200x2 under real Slurm (two GPUs; TRIALS; SECONDS_SWEEP)
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
case " $* " in *" layouts "* | *" sweep "* | *" confirm "*) start_worker lora_tune_recipes.nemo.trial ;; esac

for stage in "$@"; do
    echo "== $stage $(date +%T)"
    case $stage in
    base) base_ready ;;
    peft)
        PYTHONPATH=$PEFT_PATH LORA_TUNE_WORKER='' timeout 200 python3 -m pytest -o addopts= -p no:cacheprovider -v \
            tests/recipes/test_peft.py -k two_gpus 2>&1 | tee "$OUT/peft.txt"
        ;;
    layouts) TRIALS=${TRIALS_LAYOUTS:-} SECONDS_SWEEP=${SECONDS_LAYOUTS:-400} sweep_stage "nemo_h200x$GPUS" ;;
    sweep) sweep_stage "$study" ;;
    confirm) confirm_stage "$study" "${SEEDS:-3}" ;;
    bridge_sweep) bridge_sweep_stage "bridge_small_h200x$GPUS" ;;
    *) echo "unknown stage $stage" >&2; exit 2 ;;
    esac
done
gather_logs
