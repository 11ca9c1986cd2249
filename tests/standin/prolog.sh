#!/bin/bash
# What the prolog's programs print, by name. STANDIN_MACHINE: "dgx", or "other" for a rented machine that is half set up
# and on which run.sub goes on in spite of everything.
machine=${STANDIN_MACHINE:-other}
case "$1-$machine" in
import-*)
    echo "pyxis: importing docker image: ${CONT}"
    echo "[INFO] Extracting squashfs filesystem..."
    echo "pyxis: imported docker image: ${CONT}"
    ;;
fabric-dgx)
    printf 'HCA list:\n    mlx5_0\n    mlx5_1\n'
    printf '\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tNV18\tPXB\t0-55,112-167\t0\n'
    printf 'gpu_name, gpu_bus_id, vbios_version\nNVIDIA H100 80GB HBM3, 00000000:1B:00.0, 96.00.89.00.01\n'
    ;;
fabric-*)
    echo "Failed to get IB devices list: Function not implemented" >&2
    echo "/usr/bin/bash: line 1: nvidia-smi: command not found" >&2
    echo "modprobe: FATAL: Module nvidia_peermem not found in directory /lib/modules/6.1.0" >&2
    ;;
nccl-*)
    [ "$machine" = dgx ] || echo "n1:1:2 [0] misc/ibvwrap.cc:199 NCCL WARN Call to ibv_open_device failed"
    echo "# nThread 1 nGpus 1 minBytes 65011712 maxBytes 65011712 warmup iters: 5 iters: 20"
    echo "#       size         count      type   redop    root     time   algbw   busbw #wrong"
    echo "    65011712      32505856      half     sum      -1    341.2  190.56  333.48      0"
    echo "# Out of bounds values : 0 OK"
    echo "# Avg bus bandwidth    : ${STANDIN_NCCL_BANDWIDTH}"
    ;;
sysjson-dgx)
    echo '{"submitter":"stand-in","host_processor_model_name":"Intel(R) Xeon(R) Platinum 8480C"}'
    ;;
sysjson-*)
    echo "/usr/local/bin/mlperf-sysjson.sh: line 51: /sys/devices/virtual/dmi/id/product_name: Permission denied" >&2
    echo "/usr/local/bin/mlperf-sysjson.sh: line 60: ibstat: command not found" >&2
    echo '{"submitter":"stand-in"}'
    ;;
caches-dgx)
    echo -n "Clearing cache on " && hostname
    echo "vm.drop_caches = 3"
    ;;
caches-*)
    echo -n "Clearing cache on " && hostname
    echo "sudo: a terminal is required to read the password; either use the -S option or configure an askpass helper" >&2
    echo "sudo: a password is required" >&2
    ;;
esac
