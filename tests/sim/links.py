"""A stand-in for torch.distributed and the network in the simulated world: collectives, and memories of peers.

The engine's own code runs above it: the meeting, the replication of the drains, and loads. The memory of a machine is
served by its drain; nothing comes from there while the drain is dead or stopped, or the cable between the machines is
cut. What comes may be slow, or other bytes.
"""

import contextlib

import torch.distributed as dist

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.chunks import quarantine_damaged
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.replication import meeting, replicas
from tiered_checkpoint_io.engine.restore import peers
from tiered_checkpoint_io.errors import RestoreError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.stores.peer import PeerStore


class Job:
    """One start of all ranks: what torch.distributed knows of them."""

    def __init__(self, world, number, machines):
        self.world, self.number, self.size = world, number, len(machines)
        self.ranks = []
        self.store = object()
        self.exchanges = []


def is_cut(world, one, other):
    """Returns True if the cable between two machines is cut."""
    return world.cuts.get(frozenset({one.name, other.name}), 0.0) > world.now


# ----------------------------------------------------------------------------------- other memories
def peers_of(world):
    """Returns a stand-in for PeerStore: the memory of another machine, over a network that may be cut, slow, or lie."""

    class Peer(PeerStore):
        def __init__(self, endpoint, *, connections=1, clock, waits=False, is_patient=True):
            self._endpoint, self._silence_s = endpoint, clock.timing.peer_silence_s

        def get(self, key):
            if key.startswith("replicas/"):
                _, group, *node = key.split("/")
                found = self._machine(key).replicas.answer(group, int(node[0]) if node else None)
                if found is None:
                    raise StoreNotFoundError("no such group", operation="read", key=key)
                return found
            _, stored = self._found(key)
            return stored.part.to_json()

        def read_pieces(self, key, offset, pieces, filled):
            _, stored = self._found(key)
            entry = stored.part.content.files[int(key.rpartition("/")[2])]
            try:
                data = bytearray(stored.file(entry.basename).read_bytes()[offset:])
            except FileNotFoundError as error:
                raise StoreNotFoundError("the peer no longer has it", operation="read", key=key) from error
            if world.rng.random() < 20 * world.fates.failed:
                world.note(f"{self._endpoint.address} lies")
                world.current.process.faults += 1
                data[len(data) // 2] ^= 1
            for number, piece in enumerate(pieces):
                piece[:], data = data[: len(piece)], data[len(piece) :]
                filled(number)

        def report_damage(self, key):
            with contextlib.suppress(StoreError):
                tier, stored = self._found(key)
                quarantine_damaged(tier, stored)

        def close(self):
            """Nothing to end."""

        def _machine(self, key):
            """Returns the peer's machine, once a request has reached it and the answer has come."""
            here = world.current.process.machine
            machine = next(each for each in world.machines if each.name == self._endpoint.address)
            world.steps += 1
            world.current.wait(world.rng.choice([0.0, 0.01, 0.3]) * machine.slow)
            deadline = world.now + self._silence_s
            while not machine.drain.is_alive or machine.drain.is_stopped or is_cut(world, here, machine):
                if world.now >= deadline or not machine.drain.is_alive:
                    raise StoreError("the peer is lost", operation="read", key=key, reason="unavailable")
                world.current.wait(1.0)
            return machine

        def _found(self, key):
            machine, (save_id, rank, *_) = self._machine(key), key.split("/")
            tier = MemoryTier(namespace_root(machine.folder, "sim"), clock=machine.clock)
            try:
                return tier, tier.find(save_id, int(rank))
            except OSError as error:
                raise StoreNotFoundError("the peer no longer has it", operation="read", key=key) from error

    return Peer


# ------------------------------------------------------------------------------------ collectives
class JobGroup(Group):
    """All ranks of a job, as RankGroup has them."""

    def __init__(self, process):
        self._process, self._job = process, process.job
        self.rank, self.world_size = process.rank, self._job.size
        self.arrive = lambda what: None  # The first exchange waits for all.

    def _all_gather(self, obj):
        job, world = self._job, self._job.world
        number = self._process.exchanged = getattr(self._process, "exchanged", -1) + 1
        while len(job.exchanges) <= number:
            job.exchanges.append({})
        gathered, deadline = job.exchanges[number], world.now + SYSTEM.timing.rendezvous_s
        gathered[self.rank] = obj
        world.steps += 1
        while len(gathered) < self.world_size:
            if world.now > deadline or not all(each.is_alive for each in job.ranks):
                self._is_over = True
                raise RestoreError("the ranks lost each other", operation="meet", rank=self.rank, reason="lost_rank")
            world.current.wait(0.5)
        return [gathered[rank] for rank in range(self.world_size)]


@contextlib.contextmanager
def torch_distributed(world):
    """Answers the engine's calls of torch.distributed for the simulated process whose turn it is."""

    def job():
        return world.current.process.job

    def memory_left():
        return 0 if world.current.process.machine.full_until > world.now else 1 << 30

    peer = peers_of(world)
    changes = [
        (dist, "is_initialized", lambda: True),
        (dist, "get_process_group_ranks", lambda _: list(range(job().size))),
        (dist, "get_world_size", lambda *_: job().size),
        (dist, "get_rank", lambda *_: world.current.process.rank),
        (dist.distributed_c10d, "_get_default_store", lambda: job().store),
        (meeting, "RankGroup", lambda *_: JobGroup(world.current.process)),
        (replicas, "memory_left", memory_left),
        (replicas, "PeerStore", peer),
        (peers, "PeerStore", peer),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, instead in changes:
            setattr(module, name, instead)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
