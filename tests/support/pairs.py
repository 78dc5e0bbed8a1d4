"""Roles of two processes, one on each of two nodes, for stories of copies on peers; see ``dying.py`` for the others.

The nodes are folders ``a`` and ``b`` of the order's memory. The process that carries out the order holds the store by
which the two find each other, so that either may be killed without it.
"""

import contextlib
import multiprocessing
import os
import select
import signal
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path

from support import clocks, story
from support.dying import options_of
from support.launch import free_port
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
        store_rest_s=0.01,
        replica_patience_s=SOON_S,
        replica_retry_s=0.2,
        replication_linger_s=0.3,
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
    over = Path(order["memory_dir"], "over")
    over.unlink(missing_ok=True)
    for rank in (0, 1):
        os.makedirs(node(order, rank), exist_ok=True)
    ports = [free_port(), free_port()]
    # Open for writing as long as the receiver lives.
    lives, held = os.pipe()
    receiver = fork("receiver", lambda: keep(order, counter, ports, over), order, counter)
    os.close(held)
    sender = fork("sender", lambda: send(order, counter, ports, lives), order, counter)
    os.close(lives)
    reap(sender)
    over.touch()
    reap(receiver)


@contextlib.contextmanager
def replicating(order, rank, ports):
    """Yields a node's memory and its replication, served on its port, in a group of the two."""
    from tiered_checkpoint_io.clock import SYSTEM
    from tiered_checkpoint_io.engine.drain.serving import Server
    from tiered_checkpoint_io.engine.replication.agreement import Group, Node
    from tiered_checkpoint_io.engine.replication.replicas import Replicas, join, leave_groups
    from tiered_checkpoint_io.logs import get_logger
    from tiered_checkpoint_io.memory.node import memory_of, write_atomic
    from tiered_checkpoint_io.memory.tier import MemoryTier
    from tiered_checkpoint_io.stores.peer import Endpoint

    tiers = [MemoryTier.open(node(order, each), "default") for each in (0, 1)]
    tier, token = tiers[rank], "ab" * 32
    nodes = [Node(node(order, each), memory_of(tiers[each].root), "127.0.0.1", ports[each], token) for each in (0, 1)]
    leave_groups(tier.root)
    join(tier.root, Group("ab", 2, None, tuple(nodes)))
    write_atomic(tier.root / "serve.json", Endpoint("127.0.0.1", ports[rank], token).to_json())
    log = get_logger("default")
    replicas = Replicas(tier.root, tier, log, SYSTEM)
    replicas.keep_last = KEEP_LAST
    server = Server(tier.root, tier, log, SYSTEM, replicas)
    server.look()
    replicas.look()
    try:
        yield tier, replicas
    finally:
        deadline = time.monotonic() + SOON_S
        while replicas.is_busy and time.monotonic() < deadline:
            time.sleep(0.005)
        replicas.close()
        server.close()
        for each in tiers:
            each.close()


def node(order, rank):
    return f"{order['memory_dir']}/{'ab'[rank]}"


def send(order, counter, ports, lives):
    from support.saving import save_full

    from tiered_checkpoint_io.engine.replication.meeting import awaited_in
    from tiered_checkpoint_io.engine.staging import Capturer

    counter.phase = "replicate: save and serve"
    with replicating(order, 0, ports) as (tier, _):
        tier.awaited = awaited_in
        run_id = ids.new_run_id(after=max((stored.save_id for stored in tier.parts()), default=None))
        capturer = Capturer(tier)
        for number in order["numbers"]:
            save_id = ids.save_id(run_id, number)
            options = {"keep_last": KEEP_LAST, "dirpath": order["dirpath"], "world_size": 2}
            save_full(tier, capturer, story.state(number), f"{number}.ckpt", save_id, number, **options)
            counter.tell(done=["saved", number])
            deadline = time.monotonic() + 3 * SOON_S
            while time.monotonic() < deadline and not select.select([lives], [], [], 0.005)[0]:
                if any(stored.save_id == save_id and stored.replicated for stored in tier.parts()):
                    counter.tell(done=["safe", number])
                    break
        capturer.close()


def keep(order, counter, ports, over):
    counter.phase = "replicate: read and keep"
    with replicating(order, 1, ports):
        deadline = time.monotonic() + PATIENCE_S / 2
        while not over.exists() and time.monotonic() < deadline:
            time.sleep(0.01)


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
        answer = [rank, *(load_full if order["kind"] == "full" else load_sharded)(options, rank)]
    except Exception as error:
        answer = [rank, None, f"{type(error).__name__}: {error}"]
    counter.tell(done=answer)


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
