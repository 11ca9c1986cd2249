export DGXNGPU=4
export DGXSYSTEM=$(basename $(readlink -f ${BASH_SOURCE[1]}) | sed 's/^config_//' | sed 's/\.sh$//' )
export MODEL_SIZE=405b
export LOAD_CHECKPOINT=/load_checkpoints/405b
export MICRO_BATCH_SIZE=1
