#!/bin/bash
# One task a GPU. Only the first trains; the others wait for it, as ranks of one job end together.
if [ "${SLURM_PROCID:-0}" -ne 0 ]; then
    echo "rank ${SLURM_PROCID}: initialized"
    # A FIFO would leave a rank behind when the first dies early; the step's end reaches all of them.
    while [ ! -e "${LOGDIR}/data_index/done_${SLURM_JOB_ID}_${SEED}" ]; do sleep 0.3; done
    exit 0
fi
start=$(date +%s)
echo "STARTING TIMING RUN AT $(date '+%Y-%m-%d %r')"
"${STANDIN_PYTHON:-python3}" -u train.py
ret_code=$?
touch "${LOGDIR}/data_index/done_${SLURM_JOB_ID}_${SEED}"
if [ $ret_code != 0 ]; then exit $ret_code; fi
echo "ENDING TIMING RUN AT $(date '+%Y-%m-%d %r')"
echo "RESULT,LLM_FINETUNING,,$(($(date +%s) - start)),standin,$start"
