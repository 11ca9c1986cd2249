#!/bin/bash
# What stands in the image: reads LR, MAX_STEPS, MINIBS, TP, CP, PP, VAL_CHECK_INTERVAL, SKIP_EVALS, FP8_ACTIVATION, SEED.
say() { # key value [metadata]
    local clock=$(date +%s%3N)
    printf ':::MLLOG {"namespace": "", "time_ms": %d, "event_type": "POINT_IN_TIME", "key": "%s", "value": %s, "metadata": {"file": "train.py", "lineno": 1%s}}\n' "$clock" "$1" "$2" "$3"
}
echo "trained with:" $(compgen -e)
say init_start null
say submission_benchmark '"llama2_70b_lora"'
say seed "$SEED"
say global_batch_size $((MINIBS * 8 / (TP * PP * CP)))
say opt_base_learning_rate "$LR"
say opt_learning_rate_training_steps "$MAX_STEPS"
say init_stop null
say run_start null
for eval in 1536 1920 2304 2688 3072 3456; do
    sleep 0.1
    loss=$((9421 - 4 * (eval - 1536) / 40 + SEED % 7))
    say eval_accuracy "0.$loss" ", \"samples_count\": $eval"
    [ "$loss" -gt 9250 ] || break
done
say run_stop null ', "status": "success"'
