#!/bin/bash
set -euxo pipefail
cd "$(dirname "$(readlink -f "$0")")"

: "${DGXSYSTEM:?DGXSYSTEM not set}"
: "${CONT:?CONT not set}"
: "${DATADIR:?DATADIR not set}"
: "${NEXP:=1}"
: "${LOGDIR:=./results}"
: "${CONT_NAME:=mlperf_llama2sft}"

readonly _config_file="./config_${DGXSYSTEM}.sh"
mkdir -p "$LOGDIR"

mapfile -t _passed < <(env -i bash -c ". ${_config_file} && compgen -e" | grep -E -v '^(PWD|SHLVL|_)$')
_passed+=(DGXSYSTEM)
mapfile -t _passed < <(printf -- '--env=%s\n' "${_passed[@]}")

remove_container() {
    docker container rm -f "$CONT_NAME" || true
}
remove_container
trap 'remove_container' EXIT

docker run --rm --init --detach --net=host --uts=host --ipc=host --device /dev/dri --device /dev/kfd \
    --security-opt=seccomp=unconfined --name="$CONT_NAME" "--volume=${DATADIR}/data:/data" \
    "--volume=${DATADIR}/model:/ckpt" "$CONT" sleep infinity

bash runtime_tunables.sh
docker exec "$CONT_NAME" true

for _run in $(seq 0 $((NEXP - 1))); do
    echo "Beginning trial ${_run} of ${NEXP}"
    (
        docker exec "${_passed[@]}" "--env=SEED=$RANDOM" "$CONT_NAME" bash ./run_and_time.sh
    ) | tee "${LOGDIR}/result_${_run}.txt"
done
