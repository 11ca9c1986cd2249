#!/usr/bin/env bash
# Make a GPU machine without network ready for sweeps:  source benchmarks/gpu/prepare.sh [FOLDER]
#
# It has Python 3.12 with CUDA's torch; what else is needed was carried into the repository (all optional):
#   .whl/      wheels of the driver's packages     .debs/     Slurm, see tests/cluster/gpu_node.sh
#   .nemo312/  NeMo and Transformer Engine: site312.tar.xz, transformer_engine-*.whl, te_core.tar.xz, *.so, *.METADATA
#   .bridge312/  Megatron-Bridge beside that Transformer Engine: site_bridge312.tar.xz
# Everything goes below FOLDER (default /tmp/lora_tune). Running it again in a new shell only sets the environment.
# What takes long goes on in the background: start_base, start_worker; base_ready and worker_ready wait for it.
LT=${1:-${LT:-/tmp/lora_tune}}
mkdir -p "$LT"

if [ ! -e "$LT/.ready" ]; then
    if [ -d .whl ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$LT/site" .whl/*.whl
    fi
    touch "$LT/.ready"
fi

# The PEFT recipe wants the machine's own transformers, NeMo an older one.
PEFT_PATH=$LT/site:$PWD
NEMO_PATH=$LT/te:$LT/nemo:$PEFT_PATH BRIDGE_PATH=$LT/te:$LT/bridge:$PEFT_PATH
export PYTHONPATH=$NEMO_PATH PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# NVLink multicast stays off: it can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 UB_SKIPMC=1

unpack_te() { # Transformer Engine, for NeMo and Megatron-Bridge alike
    [ -d .nemo312 ] && [ ! -e "$LT/.te" ] || return 0
    local te=$LT/te
    mkdir -p "$te"
    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$te" .nemo312/transformer_engine-*.whl
    tar xJf .nemo312/te_core.tar.xz -C "$te"
    mkdir -p "$te/transformer_engine/wheel_lib" "$te/transformer_engine_torch-2.9.0.dist-info"
    cp .nemo312/*.so "$te/transformer_engine/wheel_lib/"
    cp .nemo312/*.METADATA "$te/transformer_engine_torch-2.9.0.dist-info/METADATA"
    touch "$LT/.te"
}

unpack_nemo() {
    if [ -d .nemo312 ] && [ ! -e "$LT/.nemo" ]; then
        local archive
        mkdir -p "$LT/nemo"
        tar xJf .nemo312/site312.tar.xz -C "$LT/nemo" &
        archive=$!
        unpack_te
        wait $archive
        # Once here, instead of in every process.
        python3 -m compileall -q -j 0 "$LT/nemo" "$LT/te" "$LT/site" lora_tune >/dev/null 2>&1
        touch "$LT/.nemo"
    fi
}

unpack_bridge() {
    if [ -d .bridge312 ] && [ ! -e "$LT/.bridge" ]; then
        mkdir -p "$LT/bridge"
        tar xJf .bridge312/site_bridge312.tar.xz -C "$LT/bridge"
        # Transformer Engine imports pydantic, which the driver's wheels hold too.
        [ ! -e .nemo312/site312.tar.xz ] || tar xJf .nemo312/site312.tar.xz -C "$LT/bridge" --wildcards './pydantic*' './annotated_types*' './typing_inspection*'
        python3 -m compileall -q -j 0 "$LT/bridge" >/dev/null 2>&1
        touch "$LT/.bridge"
    fi
}

until_true() { # $1: seconds. $2...: what must become true
    local end=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.2
    done
}

start_slurm() { # real Slurm on this node, if it does not run yet
    # shellcheck disable=SC1091
    [ -f "$LT/slurm/environment" ] && source "$LT/slurm/environment" && timeout 3 scontrol ping | grep -q 'is UP' && return
    bash tests/cluster/gpu_node.sh start "$LT/slurm" .debs
    # shellcheck disable=SC1091
    source "$LT/slurm/environment"
}

under_slurm() { # $1: study. $2: seconds. $3...: a command of lora_tune and its arguments
    local study=$1 seconds=$2
    shift 2
    timeout "$seconds" python3 -m "lora_tune.$1" --study "$study" "${@:2}" --output "$LT/sweeps/$study" 2>&1 |
        tee "$OUT/$study.$1.txt"
    tar czf "$OUT/$study.tgz" -C "$LT/sweeps" "$study"
}

sweep_stage() { # $1: study
    start_slurm
    worker_ready
    under_slurm "$1" "${SECONDS_SWEEP:-540}" sweep ${TRIALS:+--trials "$TRIALS"}
}

bridge_sweep_stage() { # $1: study
    start_base
    unpack_te
    unpack_bridge
    [ -S "$LT/workers/bridge.sock" ] || start_worker_of bridge "$BRIDGE_PATH" lora_tune_recipes.bridge.trial
    start_slurm
    workers_ready bridge
    base_ready
    (
        export PYTHONPATH=$BRIDGE_PATH
        under_slurm "$1" "${SECONDS_SWEEP:-540}" sweep ${TRIALS:+--trials "$TRIALS"}
    )
}

confirm_stage() { # $1: study. $2: seeds
    start_slurm
    worker_ready
    under_slurm "$1" "${SECONDS_CONFIRM:-300}" confirm --top 2 --seeds "$2" --confidence 0.999
}

gather_logs() { # into $OUT
    echo "== end $(date +%T)"
    cp "$LT/worker.log" "$OUT/worker.log" 2>/dev/null
    [ ! -d "$OUT/logs" ] || { tar czf "$OUT/logs.tgz" -C "$OUT" logs && rm -r "$OUT/logs"; }
}

start_base() { # the small base that trials adapt, on the first GPU
    [ -f "$LT/base/config.json" ] || [ -e "$LT/base.log" ] && return
    PYTHONPATH=$PEFT_PATH timeout 180 python3 -m benchmarks.gpu.make_base "$LT/base" ${BASE_STEPS:+--steps "$BASE_STEPS"} >"$LT/base.log" 2>&1 &
    BASE_PROCESS=$!
}

said() { # $1: word. $2: log. $3: process that writes it; true as well when that has ended
    grep -q "$1" "$2" || ! kill -0 "$3" 2>/dev/null
}

base_ready() {
    until_true 180 said '"seconds"' "$LT/base.log" "${BASE_PROCESS:-0}"
    cp "$LT/base.log" "$OUT/base.json" && tail -n 2 "$LT/base.log"
}

start_worker() { # $@: modules to import. Every trial is forked from it
    export LORA_TUNE_WORKER=$LT/worker.sock
    [ -e "$LT/worker.log" ] && return
    touch "$LT/worker.log"
    (
        [ "$1" != lora_tune_recipes.nemo.trial ] || unpack_nemo
        exec setsid python3 -m lora_tune_recipes.warm_worker --socket "$LORA_TUNE_WORKER" "$@" >"$LT/worker.log" 2>&1 </dev/null
    ) &
    WORKER_PROCESS=$!
}

start_worker_of() { # $1: recipe, peft, nemo or bridge. $2: its PYTHONPATH. $3: module to import. Many may run side by side
    mkdir -p "$LT/workers"
    PYTHONPATH=$2 setsid python3 -m lora_tune_recipes.warm_worker --socket "$LT/workers/$1.sock" "$3" \
        >"$LT/workers/$1.log" 2>&1 </dev/null &
    echo $! >"$LT/workers/$1.pid"
}

start_workers_of_megatron() { # one for each of the two libraries
    start_worker_of bridge "$BRIDGE_PATH" lora_tune_recipes.bridge.trial
    start_worker_of nemo "$NEMO_PATH" lora_tune_recipes.nemo.trial
}

workers_ready() { # $@: recipes
    local recipe
    for recipe in "$@"; do
        until_true 90 grep -q -e ready -e rror "$LT/workers/$recipe.log"
        tail -n 1 "$LT/workers/$recipe.log"
    done
}

worker_ready() {
    until_true 200 said ready "$LT/worker.log" "${WORKER_PROCESS:-0}"
    grep ready "$LT/worker.log" && return
    tail -n 5 "$LT/worker.log" >&2
    unset LORA_TUNE_WORKER
    return 1
}
