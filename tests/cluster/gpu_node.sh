#!/usr/bin/env bash
# Real Slurm with real GPU gres on one machine: no network, systemd, munge or accounting needed. Root, about 3 seconds.
#
#   gpu_node.sh start FOLDER [PACKAGES]   start a cluster of this one node; its GPUs are the machine's /dev/nvidia*
#   gpu_node.sh stop FOLDER               end its jobs and daemons
#
# PACKAGES is a folder of Debian 12 packages, unpacked where slurmctld is not installed (Ubuntu 24.04 runs them):
#   slurmctld slurmd slurm-client slurm-wlm-basic-plugins libslurm38, and the libraries libmunge2 libhwloc15 libjson-c5
#   liblua5.1-0 libnuma1 libdbus-1-3 libsystemd0 liblz4-1 libreadline8 libyaml-0-2 libaudit1 libcap2 libcap-ng0 libpam0g
#   libgcrypt20 libtinfo6
# GPUS="/dev/a /dev/b" overrides the device files. Afterwards: source FOLDER/environment
# Every wait is bounded; on failure the daemons' last lines are printed and the exit code is 3.
set -euo pipefail

FOLDER=$(realpath -m "${2:?usage: gpu_node.sh start|stop FOLDER [PACKAGES]}")
PACKAGES=${3:-}
LIBRARIES=/opt/slurm-libraries
export PATH=$PATH:/usr/sbin:/sbin

say() { echo "gpu_node.sh: $*" >&2; }

unpack() { # Slurm's own files where they were compiled to be; foreign libraries out of the system's way
    command -v slurmctld >/dev/null && return
    [ -n "$PACKAGES" ] || { say "slurmctld is not installed; give a folder of Debian packages"; exit 3; }
    local package
    mkdir -p "$LIBRARIES"
    for package in "$PACKAGES"/*.deb; do
        case ${package##*/} in
        # dpkg -x would put a folder in the place of the link /lib, and with it hide the C library from linkers.
        slurm* | libslurm*) dpkg --fsys-tarfile "$package" | tar -x -C / --keep-directory-symlink ;;
        *) dpkg -x "$package" "$LIBRARIES" ;;
        esac
    done
    only_the_missing_libraries
    # Debian makes these names after unpacking, by its alternatives system.
    for program in slurmctld slurmd slurmstepd; do ln -sf "/usr/sbin/$program-wlm" "/usr/sbin/$program"; done
}

only_the_missing_libraries() { # trials must not meet foreign copies of what the machine has: no LD_LIBRARY_PATH
    local known library
    known=$(ldconfig -p)
    for library in "$LIBRARIES"/usr/lib/x86_64-linux-gnu/lib*.so.* "$LIBRARIES"/lib/x86_64-linux-gnu/lib*.so.*; do
        if grep -q "^[[:space:]]*${library##*/} " <<<"$known"; then rm "$library"; fi
    done
    printf '%s\n' "$LIBRARIES/usr/lib/x86_64-linux-gnu" "$LIBRARIES/lib/x86_64-linux-gnu" \
        /usr/lib/x86_64-linux-gnu/slurm-wlm >/etc/ld.so.conf.d/zz-slurm.conf
    ldconfig
}

control_group() { # slurmd's cgroup v2 plugin wants this scope ready, and asks systemd for it, who is not there
    local root=/sys/fs/cgroup
    [ -f $root/cgroup.controllers ] || return 0
    mkdir -p $root/system.slice
    local folder
    for folder in $root $root/system.slice; do
        echo '+cpuset +cpu +memory' >"$folder/cgroup.subtree_control" 2>/dev/null || say "no cgroup controllers in $folder"
    done
}

configure() { # $1: proctrack plugin
    local devices=${GPUS:-$(ls -d /dev/nvidia[0-9]* 2>/dev/null || true)} count=0 device
    mkdir -p "$FOLDER"/state "$FOLDER"/log "$FOLDER"/spool "$FOLDER"/run
    printf 'CgroupPlugin=autodetect\nIgnoreSystemd=yes\nCgroupAutomount=no\n' >"$FOLDER/cgroup.conf"
    echo "AutoDetect=off" >"$FOLDER/gres.conf"
    for device in $devices; do
        echo "NodeName=n1 Name=gpu File=$device" >>"$FOLDER/gres.conf"
        count=$((count + 1))
    done
    [ $count -gt 0 ] || { say "no GPU: no /dev/nvidia*, and GPUS is not set"; exit 3; }
    # nproc prints OMP_NUM_THREADS where that is set: a test run with one thread each is not a machine with one CPU.
    local host cpus; host=$(hostname -s) cpus=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)
    cat >"$FOLDER/slurm.conf" <<CONF
ClusterName=gpunode
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=27817
SlurmdPort=27818
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation=$FOLDER/state
SlurmdSpoolDir=$FOLDER/spool
SlurmctldPidFile=$FOLDER/run/slurmctld.pid
SlurmdPidFile=$FOLDER/run/slurmd.pid
SlurmctldLogFile=$FOLDER/log/slurmctld.log
SlurmdLogFile=$FOLDER/log/slurmd.log
ProctrackType=$1
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=2
ReturnToService=2
KillWait=5
MinJobAge=86400
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=27818 CPUs=$cpus RealMemory=16000 Gres=gpu:$count State=UNKNOWN
PartitionName=gpu Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    {
        echo "export SLURM_CONF='$FOLDER/slurm.conf' PATH=\"\$PATH:/usr/sbin:/sbin\""
    } >"$FOLDER/environment"
}

within() { # seconds command...: try again until it succeeds
    local end=$((SECONDS + $1)); shift
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || return 1
        sleep 0.1
    done
}

idle() { [ "$(timeout 3 sinfo -h -t idle -o %D)" = 1 ]; }
ping() { timeout 3 scontrol ping | grep -q 'is UP'; }

launch() { # daemons up, node idle, and a job really runs and ends
    setsid slurmctld -D >"$FOLDER/log/slurmctld.out" 2>&1 </dev/null &
    within 10 ping || return 1
    setsid slurmd -D -N n1 >"$FOLDER/log/slurmd.out" 2>&1 </dev/null &
    within 15 idle || return 1
    timeout 10 srun --gres=gpu:1 true
}

stop() {
    local daemon pid
    if [ -f "$FOLDER/environment" ]; then
        # shellcheck disable=SC1091
        (source "$FOLDER/environment"; timeout 5 scancel --user=root --signal=KILL --full 2>/dev/null) || true
    fi
    for daemon in slurmd slurmctld; do
        pid=$(cat "$FOLDER/run/$daemon.pid" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null || continue
        within 5 not_there "$pid" || kill -9 "$pid" 2>/dev/null || true
    done
}

not_there() { ! kill -0 "$1" 2>/dev/null; }

start() {
    unpack
    control_group
    local proctrack
    # Control groups hold every descendant of a job; where the kernel does not give them, parents and children do.
    for proctrack in proctrack/cgroup proctrack/linuxproc; do
        rm -rf "$FOLDER"
        configure $proctrack
        # shellcheck disable=SC1091
        source "$FOLDER/environment"
        if launch; then
            say "ready with $proctrack: source $FOLDER/environment"
            return
        fi
        say "$proctrack did not come up:"
        tail -n 8 "$FOLDER"/log/slurmctld.log "$FOLDER"/log/slurmd.log >&2 || true
        stop
    done
    exit 3
}

case ${1:-} in
start) start ;;
stop) stop ;;
*) say "usage: gpu_node.sh start|stop FOLDER [PACKAGES]"; exit 2 ;;
esac
