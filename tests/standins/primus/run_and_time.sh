#!/bin/bash
echo "healing after ${HEALING_ITER} steps in ${HEALING_PRECISION}, FP4=${FP4} (${FP4_RECIPE})"
exec python3 -m primus.cli train posttrain --config "$EXP"
