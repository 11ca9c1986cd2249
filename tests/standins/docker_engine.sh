#!/bin/bash
# Stands in for the command docker: containers are processes in the folder $STANDIN_IMAGE, with the variables that
# --env names and no others; options have their values behind "=" where they are followed by a command. What is asked is appended to $STANDIN_IMAGE/asked.
echo "$*" >>"$STANDIN_IMAGE/asked"
case $1 in
container | rm) ;;
run | exec)
    [[ " $* " != *" --detach "* ]] || { echo "a container of $STANDIN_IMAGE" && exit; }
    shift
    passed=()
    while [[ $1 == -* ]]; do
        name=${1#--env=}
        [[ $1 != --env=* ]] || { [[ $name == *=* ]] && passed+=("$name") || passed+=("$name=${!name}"); }
        shift
    done
    shift # the container's name, or its image
    cd "$STANDIN_IMAGE" && exec env -i PATH="$PATH" "${passed[@]}" "$@"
    ;;
*) echo "docker_engine.sh: $1 is not known" >&2 && exit 125 ;;
esac
