"""One rank: joins the others over gloo, restores, and writes down what it got.

The job, a JSON object on the command line: ``dirpath``, ``memory_dir``, ``endpoint_url``,
``answer`` (where to write), and whether it is ``late``: this rank never comes to the load.
"""

import contextlib
import hashlib
import json
import logging
import os
import sys
import time

import torch.distributed as dist

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.clocks import quick
from support.restoring import served
from support.supporting import build

from tiered_checkpoint_io.engine.ranks.coordination import TorchGroup, node_of
from tiered_checkpoint_io.engine.restore import restore as restoring
from tiered_checkpoint_io.engine.restore.catalog import Tiers
from tiered_checkpoint_io.engine.restore.choice import Selector
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store


def restore(job):
    config = build(
        TieredCheckpointConfig,
        dirpath=job["dirpath"],
        memory_dir=job["memory_dir"],
        endpoint_url=job.get("endpoint_url"),
        wait_timeout_s=60,
        namespace="default",
    )
    tier = MemoryTier.open(config.memory_dir, config.namespace)
    clock = quick(retry_deadline_s=1.0, retry_first_wait_s=0.1, rendezvous_s=job.get("rendezvous_s", 30.0))
    store = open_store(config, clock=clock)
    answer = {"node": node_of(tier.root)}
    group = TorchGroup(node_of(tier.root), clock, timeout_s=60.0)
    try:
        log = logging.getLogger("worker")
        tiers = Tiers(config, tier, lambda: store, config.dirpath, log, serve=lambda: served(tier))
        restored = restoring.restore(tiers, Selector("latest"), group)
    finally:
        group.close()
        answer["metrics"] = store.metrics.snapshot()
        store.close()
    if restored is not None:
        answer |= {
            "save_id": restored.content.save_id,
            "tier": restored.tier,
            "digest": hashlib.sha256(restored.path.read_bytes()).hexdigest(),
            "bytes_read": restored.bytes_read,
            "inode": os.stat(restored.path).st_ino,
        }
        restored.release()
    return answer


def main():
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    if job.get("late"):
        # Alive, but somewhere else than its fellows; they must find out by themselves.
        store = dist.distributed_c10d._get_default_store()
        # The first rank holds the store, and may be gone before it has told us so.
        with contextlib.suppress(dist.DistNetworkError):
            store.wait(["others-are-done"])
        answer = {"late": True}
    else:
        began = time.monotonic()
        try:
            answer = restore(job)
        except Exception as error:
            answer = {"error": type(error).__name__, "message": str(error)}
        answer["seconds"] = time.monotonic() - began
        dist.distributed_c10d._get_default_store().set("others-are-done", "1")
    with open(job["answer"] + ".new", "w") as file:
        json.dump(answer, file)
    os.rename(job["answer"] + ".new", job["answer"])
    if all(key not in answer for key in ("error", "late")):
        dist.barrier()
        dist.destroy_process_group()
    # A group that lost a member may not be torn down in order; nothing is left to say.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
