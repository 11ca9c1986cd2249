#!/usr/bin/env bash
# Make a GPU machine without network ready for sweeps:  source benchmarks/gpu/prepare.sh [FOLDER]
#
# It has Python 3.12 with CUDA's torch; what else is needed was carried into the repository (all optional):
#   .whl/      wheels of the driver's packages     .debs/     Slurm, see tests/cluster/gpu_node.sh
#   .nemo312/  NeMo and Transformer Engine: site312.tar.xz, transformer_engine-*.whl, te_core.tar.xz, *.so, *.METADATA
# Everything goes below FOLDER (default /tmp/lora_tune). Running it again in a new shell only sets the environment.
LT=${1:-${LT:-/tmp/lora_tune}}
mkdir -p "$LT"

if [ ! -e "$LT/.ready" ]; then
    if [ -d .whl ]; then
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$LT/site" .whl/*.whl
    fi
    if [ -d .nemo312 ]; then
        te=$LT/te
        mkdir -p "$LT/nemo" "$te"
        tar xJf .nemo312/site312.tar.xz -C "$LT/nemo" &
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$te" .nemo312/transformer_engine-*.whl
        tar xJf .nemo312/te_core.tar.xz -C "$te"
        mkdir -p "$te/transformer_engine/wheel_lib" "$te/transformer_engine_torch-2.9.0.dist-info"
        cp .nemo312/*.so "$te/transformer_engine/wheel_lib/"
        cp .nemo312/*.METADATA "$te/transformer_engine_torch-2.9.0.dist-info/METADATA"
        wait
    fi
    # Once here, instead of in every process.
    python3 -m compileall -q -j 0 "$LT" lora_tune >/dev/null 2>&1
    touch "$LT/.ready"
fi

export PYTHONPATH=$LT/te:$LT/nemo:$LT/site:$PWD PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false
# NVLink multicast stays off: it can put GPUs that others share out of service.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 UB_SKIPMC=1

start_slurm() { # real Slurm on this node
    bash tests/cluster/gpu_node.sh start "$LT/slurm" .debs
    # shellcheck disable=SC1091
    source "$LT/slurm/environment"
}

start_worker() { # $@: modules to import. Every trial is forked from it
    export LORA_TUNE_WORKER=$LT/worker.sock
    [ -S "$LORA_TUNE_WORKER" ] && return
    setsid python3 -m lora_tune.recipes.warm_worker --socket "$LORA_TUNE_WORKER" "$@" >"$LT/worker.log" 2>&1 </dev/null &
    local end=$((SECONDS + 150))
    until grep -q ready "$LT/worker.log" 2>/dev/null; do
        [ $SECONDS -lt $end ] && kill -0 $! 2>/dev/null || { tail -n 5 "$LT/worker.log" >&2; unset LORA_TUNE_WORKER; return 1; }
        sleep 0.2
    done
    tail -n 1 "$LT/worker.log"
}
