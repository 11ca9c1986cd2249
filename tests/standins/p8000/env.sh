# Sourced before the config: where everything lies at this site.
export CONT_FILE=${CONT_FILE:-/images/lora.sqsh}
export DATADIR=${DATADIR:-/data/gov_report}
export MODEL=${MODEL:-/data/model}
export LOGDIR=${LOGDIR:-./results}
