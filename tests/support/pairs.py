"""Roles of two processes, one on each of two nodes, for stories of copies on peers; see ``dying.py`` for the others.

The nodes are folders ``a`` and ``b`` of the order's memory. The process that carries out the order holds the store by
which the two find each other, so that either may be killed without it.
"""

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter
from datetime import timedelta

from support import clocks, story
from support.dying import options_of
from support.launch import free_port
from support.restoring import served
from support.supporting import build

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

PATIENCE_S = 40
#: Bound of all that one of the two waits for the other, seconds.
SOON_S = 2.0
KEEP_LAST = 2


def import_all():
    """Imports the modules of the roles; waits for peers are short, as all processes are here, or dead."""
    # The first save of a DTensor would otherwise take seconds for its imports, in each process again.
    import torch._dynamo
    import torch.distributed.device_mesh
    import torch.distributed.tensor  # noqa: F401

    from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter, dcp  # noqa: F401

    clocks.hurry(
        offer_poll_s=0.01,
        store_rest_s=0.01,
        replication_linger_s=0.3,
        replication_release_s=0.1,
        message_s=SOON_S,
        accept_s=SOON_S,
        accept_again_s=0.2,
        store_answer_s=SOON_S,
        rendezvous_s=4 * SOON_S,
    )


def fork(role, work, order, counter):
    """Does ``work`` in a process of its own, which is killed at the effect ``<role>_kill_at``."""
    pid = os.fork()
    if pid:
        return pid
    signal.alarm(PATIENCE_S)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    counter.role, counter.effects, counter.kill_at = role, [], order.get(f"{role}_kill_at", 0)
    counter._lock, counter._own_phase = threading.Lock(), threading.local()
    try:
        work()
    except BaseException:
        counter.tell(error=traceback.format_exc()[-3000:])
    counter.tell_all()
    os._exit(0)


def reap(pid):
    """Waits until a process has ended; one that is still there by SIGALRM has waited too long."""
    _, status = os.waitpid(pid, 0)
    assert not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM), "a process waits for ever"


# ------------------------------------------------------------------------------------------ copies
def run_pair(order, counter):
    """Has node a save the steps of ``order``, memory only; node b keeps copies."""
    from torch.distributed import TCPStore

    port = free_port()

    def joined():
        return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SOON_S + 5))

    sender = fork("sender", lambda: send(order, counter, joined()), order, counter)
    receiver = fork("receiver", lambda: keep(order, counter, joined()), order, counter)
    store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    reap(sender)
    store.set("over", "1")
    reap(receiver)


def replicator_of(order, rank, store):
    from tiered_checkpoint_io.clock import SYSTEM
    from tiered_checkpoint_io.engine.ranks.run import StoreClient
    from tiered_checkpoint_io.engine.replication.replicator import Member, Replicator
    from tiered_checkpoint_io.logs import get_logger
    from tiered_checkpoint_io.memory.tier import MemoryTier

    folder = node(order, rank)
    os.makedirs(folder, exist_ok=True)
    tier = MemoryTier.open(folder, "default")
    client = StoreClient(store, "pair", timeout_s=SYSTEM.timing.store_answer_s)
    config = build(
        TieredCheckpointConfig,
        dirpath=order["dirpath"],
        memory_keep_last=KEEP_LAST,
        wait_timeout_s=PATIENCE_S,
        replication_factor=2,
    )
    endpoint = served(tier)
    member = Member(tier, client, rank, config, get_logger("default"), SYSTEM, lambda: endpoint)
    counts = Counter()
    made = Replicator(member, [(1,), ()], counts, {})
    tier.on_commit, tier.awaited = made.offer, made.awaited
    return tier, made, counts


def node(order, rank):
    return f"{order['memory_dir']}/{'ab'[rank]}"


def send(order, counter, store):
    from support.saving import save_full

    from tiered_checkpoint_io.engine.staging import Capturer

    counter.phase = "replicate: save and send"
    tier, replicator, counts = replicator_of(order, 0, store)
    run_id = ids.new_run_id(after=max((stored.save_id for stored in tier.parts()), default=None))
    capturer = Capturer(tier)
    for number in order["numbers"]:
        save_id = ids.save_id(run_id, number)
        options = {"keep_last": KEEP_LAST, "dirpath": order["dirpath"], "world_size": 2}
        save_full(tier, capturer, story.state(number), f"{number}.ckpt", save_id, number, **options)
        counter.tell(done=["saved", number])
        deadline = time.monotonic() + 3 * SOON_S
        while time.monotonic() < deadline:
            safe = [stored for stored in tier.parts() if stored.save_id == save_id and stored.replicated]
            if safe:
                counter.tell(done=["safe", number])
            if safe or (counts["unreplicated"] and not replicator.pending):
                break
            time.sleep(0.005)
    replicator.close(SOON_S)
    capturer.close()
    tier.close()


def keep(order, counter, store):
    counter.phase = "replicate: receive and keep"
    tier, replicator, _ = replicator_of(order, 1, store)
    deadline = time.monotonic() + PATIENCE_S / 2
    while not store.check(["over"]) and time.monotonic() < deadline:
        time.sleep(0.01)
    replicator.close(SOON_S)
    tier.close()


# -------------------------------------------------------------------------------- training together
def run_pair_train(order, counter):
    """Has both nodes save sharded checkpoints, memory only, and keep copies of each other's parts."""
    both("trainer", train, order, counter)


def both(role, work, order, counter):
    port, joined = free_port(), multiprocessing.Barrier(2)

    def join_and_work(rank):
        join(rank, port, joined)
        work(order, counter, rank)

    pids = [fork(f"{role}-{'ab'[rank]}", lambda rank=rank: join_and_work(rank), order, counter) for rank in (0, 1)]
    for pid in pids:
        reap(pid)


def join(rank, port, joined):
    """Joins both before either may be killed: torch waits for a dead rank 0 far beyond its timeout."""
    import torch.distributed as dist

    where, bound = f"tcp://127.0.0.1:{port}", timedelta(seconds=PATIENCE_S / 2)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=2, timeout=bound)
    joined.wait(PATIENCE_S / 2)


def shards(number, rank):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mine = story.state(number)["w"].chunk(2)[rank].clone()
    mesh = init_device_mesh("cpu", (2,))
    return {
        "w": DTensor.from_local(mine, mesh, [Shard(0)], run_check=False),
        "global_step": torch.tensor(number),
    }


def train(order, counter, rank):
    import torch.distributed as dist

    from tiered_checkpoint_io import TieredStorageWriter, dcp

    counter.phase = "replicate: train together"
    os.makedirs(node(order, rank), exist_ok=True)
    os.environ["TIERED_CHECKPOINT_MACHINE"] = node(order, rank)
    options = {**options_of(order), "memory_dir": node(order, rank), "replication_factor": 2, "memory_keep_last": 2}
    writer = build(TieredStorageWriter, **options, save_to_s3=False)
    try:
        for number in order["numbers"]:
            dcp.save(shards(number, rank), checkpoint_id=f"step_{number}", storage_writer=writer)
            counter.tell(done=["saved", number])
            tier, deadline = writer.session.open().tier, time.monotonic() + 3 * SOON_S
            while time.monotonic() < deadline and not tier.parts()[-1].replicated:
                time.sleep(0.005)
            if tier.parts()[-1].replicated:
                counter.tell(done=["safe", number])
            dist.barrier()
    except Exception as error:
        # The other one is dead.
        counter.tell(done=["lost", str(error)])
    writer.session.release()


# ----------------------------------------------------------------------------------------- restores
def run_pair_load(order, counter):
    """Has both nodes load the newest together; returns what each has got."""
    both("loader", load, order, counter)


def load(order, counter, rank):
    counter.phase = f"restore from peers: {order['kind']}, {'receive' if rank == 0 else 'send'}"
    os.makedirs(node(order, rank), exist_ok=True)
    options = {**options_of(order), "memory_dir": node(order, rank), "drain": "thread"}
    try:
        told = [rank, *(load_full if order["kind"] == "full" else load_sharded)(options, rank)]
    except Exception as error:
        told = [rank, None, f"{type(error).__name__}: {error}"]
    counter.tell(done=told)


def load_full(options, _):
    import torch

    from tiered_checkpoint_io.engine.checkpointer import Checkpointer

    made = Checkpointer(build(TieredCheckpointConfig.from_any, **options))
    state = made.load("tiered:latest")
    made.session.release()
    return state["global_step"], torch.equal(state["w"], story.state(state["global_step"])["w"])


def load_sharded(options, rank):
    import torch

    from tiered_checkpoint_io import dcp

    state = shards(-1, rank)
    build(dcp.load, state, **options).close()
    step = int(state["global_step"])
    return step, torch.equal(state["w"].to_local(), story.state(step)["w"].chunk(2)[rank])


ROLES = {"pair": run_pair, "pair-train": run_pair_train, "pair-load": run_pair_load}
