#!/bin/bash
# Slurm's Epilog (slurm.conf: Epilog=/etc/slurm/epilog.sh), as root on each node, once a job has ended in any way:
# a last chance to upload what a cancelled or failed job has in node memory alone. Other jobs of the user that still run
# are left alone. An epilog that fails drains the node, so this one always ends with 0, and within 90 s a namespace.
[ -n "${SLURM_JOB_USER:-}" ] && [ -n "${SLURM_JOB_UID:-}" ] || exit 0

memory_dir=${TIERED_MEMORY_DIR:-/dev/shm}
for root in "$memory_dir/tiered-$SLURM_JOB_UID"/*/; do
    [ -d "$root" ] || continue
    namespace=$(basename "$root")
    timeout -k 5 90 runuser -u "$SLURM_JOB_USER" -- \
        tiered-ckpt flush --ended --memory-dir "$memory_dir" --namespace "$namespace" --timeout 80 ||
        logger -t tiered-epilog "flush of namespace $namespace failed"
done
exit 0
