#!/bin/bash
# Trains in a container, in one of two ways: run.sh private | run.sh host
set -eu
image=${IMAGE:-trainer:1}

case "${1:-private}" in
    private)
        # Memory of the container: survives a crash of the trainer where something in the container starts it again,
        # and ends with the container. Without --shm-size it has 64 MiB, and checkpoints go through spill_dir.
        docker run --rm --init --stop-timeout 60 --shm-size=64g \
            --volume /mnt/nvme/checkpoints:/spill "$image" python train.py spill_dir=/spill
        ;;
    host)
        # Memory of the node: survives the container, until the node reboots. The same user in each of them.
        mkdir -p /dev/shm/checkpoints /mnt/nvme/checkpoints
        docker run --rm --init --stop-timeout 60 --user "$(id -u):$(id -g)" \
            --volume /dev/shm/checkpoints:/dev/shm \
            --volume /mnt/nvme/checkpoints:/spill "$image" python train.py spill_dir=/spill
        ;;
    *)
        echo "usage: $0 private | host" >&2
        exit 2
        ;;
esac
