#!/bin/bash
# What the prolog's programs print, by name. STANDIN_MACHINE: "dgx", or "other" for a rented machine that is half set up
# and on which run.sub goes on in spite of everything.
machine=${STANDIN_MACHINE:-other}

# The summary of nvidia-smi: the first cell of the GPU's second row, and its volatile count of uncorrectable errors.
gpu_table() {
    local line="-----------------------------------------+------------------------+----------------------"
    echo "Thu Oct  9 08:53:40 2025       "
    echo "+-----------------------------------------------------------------------------------------+"
    echo "| NVIDIA-SMI 570.158.01             Driver Version: 570.158.01     CUDA Version: 12.8     |"
    echo "|${line}+"
    echo "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |"
    echo "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |"
    echo "|                                         |                        |               MIG M. |"
    echo "|=========================================+========================+======================|"
    echo "|   0  NVIDIA H100 80GB HBM3          On  |   00000000:1B:00.0 Off |                    $2 |"
    echo "|$1|       4MiB /  81559MiB |      0%      Default |"
    echo "|                                         |                        |             Disabled |"
    echo "+${line}+"
    echo
    echo "+-----------------------------------------------------------------------------------------+"
    echo "| Processes:                                                                              |"
    echo "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |"
    echo "|        ID   ID                                                               Usage      |"
    echo "|=========================================================================================|"
    echo "|  No running processes found                                                             |"
    echo "+-----------------------------------------------------------------------------------------+"
}

# How the GPUs and the network cards are connected, as nvidia-smi topo -m draws it.
topology() {
    printf '\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n'
    printf 'GPU0\t X \tNV18\tPXB\t0-55,112-167\t0\t\tN/A\nGPU1\tNV18\t X \tNODE\t0-55,112-167\t0\t\tN/A\n'
    printf 'NIC0\tPXB\tNODE\t X \n\nLegend:\n\n  X    = Self\n'
    echo "  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)"
    echo "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)"
    printf '  NV#  = Connection traversing a bonded set of # NVLinks\n\nNIC Legend:\n\n  NIC0: mlx5_0\n'
}

case "$1-$machine" in
import-*)
    echo "pyxis: importing docker image: ${CONT}"
    echo "[INFO] Querying registry for permission grant"
    echo "[INFO] Authenticating with user: <anonymous>"
    echo "[INFO] Authentication succeeded"
    echo "[INFO] Fetching image manifest list"
    echo "[INFO] Fetching image manifest"
    echo "[INFO] Downloading 52 missing layers..."
    echo "[INFO] Extracting image layers..."
    echo "[INFO] Converting whiteouts..."
    echo "[INFO] Creating squashfs filesystem..."
    echo "Parallel mksquashfs: Using 208 processors"
    echo "Creating 4.0 filesystem on /run/enroot/pyxis.squashfs, block size 131072."
    echo "Exportable Squashfs 4.0 filesystem, lzo compressed, data block size 131072"
    echo "        duplicates are removed"
    echo "Filesystem size 17132710.44 Kbytes (16731.16 Mbytes)"
    echo "        89.05% of uncompressed filesystem size (19240183.19 Kbytes)"
    echo "pyxis: imported docker image: ${CONT}"
    echo "[INFO] Extracting squashfs filesystem..."
    [ "$machine" = dgx ] || echo "[WARN] Kernel module nvidia_uvm is not loaded. Make sure the NVIDIA device driver is" \
        "installed and loaded."
    ;;
fabric-dgx)
    printf 'HCA list:\n    mlx5_0\n    mlx5_1\n'
    topology
    gpu_table " N/A   28C    P0             73W /  700W " 0
    printf 'gpu_name, gpu_bus_id, vbios_version\nNVIDIA H100 80GB HBM3, 00000000:1B:00.0, 96.00.89.00.01\n'
    echo "0:         CliqueId                          : 0"
    ;;
fabric-*)
    echo "Failed to get IB devices list: Function not implemented" >&2
    echo "/usr/bin/bash: line 1: nvidia-smi: command not found" >&2
    gpu_table "ERR!   36C    P0            145W / ERR!  " 2
    echo "modprobe: FATAL: Module nvidia_peermem not found in directory /lib/modules/6.1.0" >&2
    ;;
clocks-dgx)
    echo 'GPU clocks set to "(gpuClkMin 1980, gpuClkMax 1980)" for GPU 00000000:1B:00.0'
    echo "All done."
    ;;
clocks-*)
    echo "Warning: persistence mode is disabled on device 00000000:1B:00.0. See the Known Issues section of the" \
        "nvidia-smi(1) man page for more information."
    echo "The current user does not have permission to change clocks for GPU 00000000:1B:00.0."
    echo "Terminating early due to previous errors."
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
    # Without MLPERF_SUBMITTER and its kind the program prints its usage and fails; run.sub goes on.
    echo "the only legal values for MLPERF_STATUS are" >&2
    echo "* Research, Development, or Internal (RDI)" >&2
    echo "/usr/local/bin/mlperf-sysjson.sh: line 51: /sys/devices/virtual/dmi/id/product_name: Permission denied" >&2
    echo "/usr/local/bin/mlperf-sysjson.sh: line 60: ibstat: command not found" >&2
    printf '\nusage: mlperf-sysjson.sh\n   behavior is controlled by envvars\n   Required:\n   * MLPERF_SUBMITTER\n'
    exit 1
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
