: "${LOGDIR:=./results}"
_cont_mounts="${DATADIR}:/data:ro,${MODEL}:/ckpt:ro,${LOGDIR}:/results:rw"
mounts_to_verify="DATADIR:/data CHECKPOINT:/ckpt"
rm -rf "${LOGDIR}/data_index/train"
