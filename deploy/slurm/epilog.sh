#!/bin/bash
# Slurm's Epilog (slurm.conf: Epilog=/etc/slurm/epilog.sh), as root on each node, once a job has ended in any way:
# a last chance to upload what a cancelled or failed job has in node memory alone. An epilog that fails drains the
# node, so this one always ends with 0, and within 90 s a namespace.
[ -n "${SLURM_JOB_USER:-}" ] && [ -n "${SLURM_JOB_UID:-}" ] || exit 0

for root in "${TIERED_MEMORY_DIR:-/dev/shm}/tiered-$SLURM_JOB_UID"/*/; do
    [ -d "$root" ] || continue
    timeout -k 5 90 runuser -u "$SLURM_JOB_USER" -- \
        tiered-ckpt flush --root "${root%/}" --timeout 80 || logger -t tiered-epilog "flush of $root failed"
done
exit 0
