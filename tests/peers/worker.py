"""One rank of a job whose parts have copies on peers; steps as in ``tests/dcp/worker.py``, which it builds on."""

import contextlib
import errno
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "dcp"))
import worker as base

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from support.clocks import hurry as hurry_clock
from support.networks import enter_network
from support.supporting import build

from tiered_checkpoint_io import dcp as ours
from tiered_checkpoint_io.adapters.dcp_settings import settings_of, shared_of
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.ranks.run import Run
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.peer import PeerStore

IO = []
SETTLE_S = 30.0
#: Functions of torch.distributed in which ranks wait for each other.
EXCHANGES = ["all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "new_group"]
EXCHANGES += ["all_gather", "all_reduce", "barrier", "broadcast", "gather", "monitored_barrier", "reduce", "scatter"]
#: Enough for a file of two chunks.
ROWS = 260_000


def io_of(job):
    """Returns the engine of Lightning's IO (whose import takes long); its ranks have met, as in a Trainer's set-up."""
    if not IO:
        IO.append(Checkpointer(build(TieredCheckpointConfig, **base.reading(job))))
        IO[0].session.meet_peers()
    return IO[0]


def session_of(job):
    if IO:
        return IO[0].session
    return shared_of(build(settings_of, None, base.reading(job))).session


def held(job):
    """Returns the parts in this node's memory, own ones and copies: step, rank and whether it is safe."""
    tier = session_of(job).open().tier

    def each(tier):
        return [[s.part.content.step, s.part.rank, s.replicated] for s in tier.parts()]

    return {"own": each(tier), "copies": each(tier.replicas), "counts": dict(session_of(job).counts)}


def settle(job):
    """Waits until no part is on its way to peers, and this node knows so."""
    session = session_of(job)
    deadline = time.monotonic() + SETTLE_S
    while time.monotonic() < deadline:
        newest = [stored.replicated for stored in session.open().tier.parts()][-1:]
        alone = session.config.replication_factor == 1 or session.counts["unreplicated"]
        if not session._peering.pending and (all(newest) or alone):
            break
        time.sleep(0.02)
    dist.barrier()
    # The copies of others on this node are marked by its ranks within a look, those of whole saves.
    deadline = time.monotonic() + 0.6
    while time.monotonic() < deadline and not all(stored.replicated for stored in session.open().tier.replicas.parts()):
        time.sleep(0.02)
    dist.barrier()
    return held(job)


def await_parts(job, step, ranks):
    """Waits until this node has parts of these ranks, own ones or copies."""
    tier, deadline = session_of(job).open().tier, time.monotonic() + SETTLE_S
    while {each.part.rank for each in tier.held() if each.part.content.step == step} != {*ranks}:
        assert time.monotonic() < deadline, held(job)
        time.sleep(0.02)
    dist.barrier()


def save(job, seed, settles=True, **more):
    build(
        ours.save,
        base.sharded(seed, more.pop("rows", base.ROWS)),
        checkpoint_id=f"step_{seed}",
        **{**job["options"], **more},
    )
    return settle(job) if settles else held(job)


def save_by_thread_of_dcp(job, seed):
    base.dcp.async_save(base.sharded(seed), checkpoint_id=f"step_{seed}", storage_writer=base.writer(job)).result()
    return settle(job)


def save_local(job, seed, stages=()):
    groups = [dist.new_group(ranks) for ranks in stages] or [None]
    mine = next((n for n, ranks in enumerate(stages) if dist.get_rank() in ranks), 0)
    name = f"stage{mine}/step_{seed + mine}" if stages else f"step_{seed}"
    state = {"w": torch.full((1000,), 100.0 * seed + dist.get_rank())}
    build(ours.async_save, state, checkpoint_id=name, kind="local", process_group=groups[mine], **job["options"])
    return settle(job)


def load_local(job, name=None, late=None, absent=None):
    """Loads on each rank its shard; one may begin some seconds later, or not at all."""
    if dist.get_rank() == absent:
        return None
    if late is not None and dist.get_rank() == late[0]:
        time.sleep(late[1])
    state, began = {"w": torch.zeros(1000)}, time.monotonic()
    try:
        reader = build(ours.load, state, checkpoint_id=name, kind="local", **base.reading(job))
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "seconds": time.monotonic() - began}
    return {
        "value": state["w"].unique().tolist(),
        "asked": reader.session.asked,
        "name": reader.opened.name,
        "seconds": time.monotonic() - began,
        **held(job),
    }


def full_state(seed, size=50_000):
    generator = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(size, generator=generator), "global_step": seed, "epoch": 0}


def save_full(job, seed, tiers=("memory",), name=None):
    """Saves only on rank 0, as DDP does."""
    io = io_of(job)
    if dist.get_rank() == 0:
        io.save(full_state(seed), name or f"step={seed}.ckpt", tiers=tiers)
    dist.barrier()
    return settle(job)


def load_full(job, seed, path="tiered:latest", absent=None):
    if dist.get_rank() == absent:
        return None
    io = IO[0] if IO else Checkpointer(build(TieredCheckpointConfig, **base.reading(job)))
    state = io.load(path)
    restored = io.restored
    answer = {
        "matches": bool(state) and torch.equal(state["w"], full_state(seed)["w"]),
        "step": restored.step if restored else None,
        "tier": restored.tier if restored else None,
        "asked": io.session.asked,
        "rejected": restored.rejected if restored else [],
        "pending": [s.part.rank for s in io.session.open().tier.parts() if s.pending],
    }
    if not IO:
        io.close()
    return answer


def load(job, seed, rows=base.ROWS, **more):
    state = base.blank(rows=rows)
    reader = build(ours.load, state, **{**base.reading(job), **more})
    return {**base.loaded_rows(reader, state, seed, rows), "tiers": held(job)}


def stop(job, rank, seconds):
    """Stops one rank for some seconds; the other ranks continue."""
    if dist.get_rank() == rank:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(seconds)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        os.kill(pid, signal.SIGSTOP)
    return held(job) if session_of(job)._opened else None


def save_local_now(job, seed, rank, seconds):
    """Saves synchronously; shard 0 stops before it reports the commit to the others."""
    report_end = Run.report_end

    def late(self, *reports):
        stop(job, rank, seconds)
        return report_end(self, *reports)

    Run.report_end = late
    try:
        state = {"w": torch.full((1000,), 100.0 * seed + dist.get_rank())}
        began, options = time.monotonic(), {**job["options"], "save_to_s3": True}
        report = build(ours.save, state, checkpoint_id=f"step_{seed}", kind="local", **options)
        return {"tiers": sorted(report.tiers), "seconds": time.monotonic() - began}
    finally:
        Run.report_end = report_end
        dist.barrier()


def save_alone(job, seed, rank, size=50_000):
    """Saves a full checkpoint on one rank, without any exchange."""
    if dist.get_rank() != rank:
        return None
    state, began = full_state(seed, size), time.monotonic()
    io_of(job).save(state, f"step={seed}.ckpt", tiers=["memory"])
    return time.monotonic() - began


def cut_while_reading(job, rank, at):
    """Cuts a rank's network before the n-th piece that it reads next of another node's memory."""
    if dist.get_rank() != rank:
        return
    read_pieces, read = PeerStore.read_pieces, []

    def cutting(self, key, offset, pieces, filled):
        read.append(key)
        if len(read) == at:
            PeerStore.read_pieces = read_pieces
            link_set(job, "down")
        read_pieces(self, key, offset, pieces, filled)

    PeerStore.read_pieces = cutting


def link_set(job, state, rank=None):
    """Cuts or mends the cable of this rank's network."""
    if rank in (None, dist.get_rank()):
        subprocess.run(["ip", "link", "set", job["netns"]["device"], state], check=True)


def mark(job, rank, name):
    """Makes a mark for the other rank, which can't be reached over the network."""
    if dist.get_rank() == rank:
        marks(job, name).touch()


def await_mark(job, rank, name, seconds=40):
    deadline = time.monotonic() + seconds
    while dist.get_rank() == rank and not marks(job, name).exists():
        assert time.monotonic() < deadline, f"{name} does not come"
        time.sleep(0.05)


def marks(job, name):
    return Path(job["answer"]).with_name(f"mark-{name}")


def wait_for_copies(job, rank, seconds):
    """Returns the time until nothing was on its way from a rank."""
    if dist.get_rank() != rank:
        return None
    session, began = session_of(job), time.monotonic()
    while session._peering.pending and time.monotonic() < began + seconds:
        time.sleep(0.05)
    return {"seconds": time.monotonic() - began, "pending": session._peering.pending, **held(job)}


def save_until_copied(job, rank, seeds):
    """Saves one step after the other until one gets to the peer; returns this step."""
    if dist.get_rank() == rank:
        for seed in seeds:
            before = session_of(job).counts["replicated"]
            save_alone(job, seed, rank)
            wait_for_copies(job, rank, 30)
            if session_of(job).counts["replicated"] > before:
                return seed
    return None


def meet_all(job):
    io_of(job)


def save_and_die(job, seed):
    """Saves, and is killed at once."""
    save(job, seed, settles=False, rows=ROWS)
    os.kill(os.getpid(), signal.SIGKILL)


def die_without_a_word(job, ranks):
    """Kills some ranks; the others' process group notices this only when it is used."""
    if dist.get_rank() in ranks:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)


def hurry(job, **seconds):
    """Sets shorter bounds, by the names of Timing's fields."""
    hurry_clock(**seconds)


def load_failing(job, kind, seed, rank, where, dies=False):
    """Loads after rank 0's node has lost its memory; a call of one rank fails once, or kills it. Returns the result."""
    tier = session_of(job).open().tier
    if dist.get_rank() == 0:
        for stored in tier.parts():
            tier.remove(stored)
    dist.barrier()
    module, _, path = where.partition(":")
    *holders, name = path.split(".")
    holder = importlib.import_module(f"tiered_checkpoint_io.{module}")
    for each in holders:
        holder = getattr(holder, each)
    real, calls = getattr(holder, name), []

    def fail(*args, **kwargs):
        calls.append(where)
        if len(calls) == 1:
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "the disk is broken")
        return real(*args, **kwargs)

    if dist.get_rank() == rank:
        setattr(holder, name, fail)
    began = time.monotonic()
    try:
        answer = load_full(job, seed) if kind == "full" else load(job, seed, rows=ROWS)
    except BaseException as error:
        answer = {"error": type(error).__name__, "message": str(error), "matches": False}
    finally:
        setattr(holder, name, real)
    return {**answer, "seconds": time.monotonic() - began, "failed": bool(calls)}


def counted(job, step, *arguments):
    """Runs a step; returns the package's exchanges in it, DCP's own, and how many sockets were opened until the last."""
    dist.barrier()
    calls, before = {"tiered_checkpoint_io": [], "torch": []}, sockets()
    real, opened = {name: getattr(dist, name) for name in EXCHANGES}, []

    def counting(name):
        def call(*args, **options):
            answer = real[name](*args, **options)
            caller = sys._getframe(1).f_globals["__name__"].partition(".")[0]
            calls.get(caller, []).append(name)
            opened.append(sockets() - before)
            return answer

        return call

    try:
        for name in EXCHANGES:
            setattr(dist, name, counting(name))
        answer = globals()[step](job, *arguments)
    finally:
        for name, function in real.items():
            setattr(dist, name, function)
    return {"answer": answer, "ours": calls["tiered_checkpoint_io"], "dcp": calls["torch"], "sockets": max(opened)}


def sockets():
    found = 0
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{each}").startswith("socket:")
    return found


def close(job):
    """Ends this process' use of the tiers; how long that took."""
    began = time.monotonic()
    if IO:
        IO.pop().close()
    else:
        session_of(job).close()
    return time.monotonic() - began


for each in [name for name in globals() if not name.startswith("_")]:
    if callable(globals()[each]):
        setattr(base, each, globals()[each])

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    hurry_clock(local_poll_s=0.02, store_rest_s=0.05)
    if "netns" in json.loads(sys.argv[1]):
        enter_network(json.loads(sys.argv[1])["netns"])
    base.main()
