#!/bin/bash
if [ "${SLURM_PROCID:-0}" -ne 0 ]; then exit 0; fi
"$STANDIN_PYTHON" -u train.py
