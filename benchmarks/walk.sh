#!/usr/bin/env bash
# README.md followed to the letter by a newcomer, each command timed: bash benchmarks/walk.sh REPOSITORY EMPTY_FOLDER
# An empty home folder, no cache of packages, no variable set, no `python` in the path. Prints a row a command; what was printed: FOLDER/walk.log.
set -euo pipefail
[ $# = 2 ] || { echo "usage: bash benchmarks/walk.sh REPOSITORY EMPTY_FOLDER" >&2; exit 2; }
repository=$(realpath "$1") folder=$(realpath -m "$2")
[ ! -e "$folder" ] || { echo "$folder exists; name a folder that does not" >&2; exit 2; }
mkdir -p "$folder/home" "$folder/bin"
find /usr/bin /bin -maxdepth 1 ! -name python ! -type d -exec ln -sf {} "$folder/bin/" \;

cat >"$folder/walk.bash" <<'WALK'
step() {
  local begin=${EPOCHREALTIME/./} code=0 tenths
  echo "\$ $*" >>"$log"
  eval "$*" >>"$log" 2>&1 </dev/null || code=$?
  tenths=$(((${EPOCHREALTIME/./} - begin) / 100000))
  printf '| `%s` | %d.%d s | %s |\n' "$*" $((tenths / 10)) $((tenths % 10)) "$code"
}
log=$PWD/walk.log
printf '| typed | time | exit code |\n|---|---|---|\n'
step "git clone -q $repository lora_tune"; cd lora_tune
step make sweep
step make sweep
source .venv/bin/activate
for command in status report explain export; do step "python -m lora_tune.$command --study tiny"; done
step "lora-tune status --study tiny"
step "timeout 20 python -m lora_tune.dashboard --study tiny"
step "python -m lora_tune.confirm --study tiny"
printf 'load now: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
WALK
printf 'load before: %s\n' "$(cut -d' ' -f1-3 /proc/loadavg)"
cd "$folder" && exec env -i HOME="$folder/home" PATH="$folder/bin" repository="$repository" bash "$folder/walk.bash"
