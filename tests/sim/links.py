"""A stand-in for torch.distributed in the simulated world: its key-value store, collectives, and memories of peers.

The engine's own code runs above it: the meeting, offers, what keeps them, and what loads. The store lives in the process
of rank 0, and ends with it; a request that its machine can't take yet is carried out later, even where its client has
given up by then. The memory of a machine is served also while its process is dead or stopped; nothing comes from there
while the cable between the machines is cut. What comes may be slow, or other bytes.
"""

import contextlib
import math
import threading
import types

import torch.distributed as dist

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.chunks import quarantine_damaged
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.run import LostStoreError, StoreClient
from tiered_checkpoint_io.engine.replication import meeting, replicator
from tiered_checkpoint_io.engine.restore import peers
from tiered_checkpoint_io.errors import RestoreError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.stores.peer import PeerStore


class Job:
    """One start of all ranks: what torch.distributed knows of them."""

    def __init__(self, world, number, machines):
        self.world, self.number, self.size = world, number, len(machines)
        self.ranks = []
        self.store = Values(self)
        self.exchanges = []
        self.machines = machines


def is_cut(world, one, other):
    """Returns True if the cable between two machines is cut."""
    return world.cuts.get(frozenset({one.name, other.name}), 0.0) > world.now


# ------------------------------------------------------------------------------------- the store
class Values:
    """The store of a job; each request is carried out if its host and the network allow it."""

    def __init__(self, job):
        self._job, self._world = job, job.world
        self.values = {}
        self._waiting = []
        #: Answers that did not arrive.
        self.lost = 0

    def ask(self, request, timeout_s):
        """Returns the result of ``request``, carried out at most once; RuntimeError if no answer comes in time."""
        world, thread = self._world, self._world.current
        deadline, host = world.now + timeout_s, self._job.ranks[0]
        world.steps += 1
        answer = types.SimpleNamespace(request=request, machine=thread.process.machine, given=None)
        self._waiting.append(answer)
        thread.wait(world.rng.choice([0.0, 0.01, 0.05]))
        while host.is_alive:
            self._work(host)
            if answer.given is not None:
                if world.rng.random() >= world.fates.failed:
                    return answer.given[0]
                self.lost += 1
                thread.wait(timeout_s)
                raise RuntimeError("the answer is lost")
            if world.now >= deadline:
                raise RuntimeError(f"no answer within {timeout_s:.0f} s")
            thread.wait(min(1.0, deadline - world.now))
        raise RuntimeError("connection reset by peer")

    def _work(self, host):
        if host.is_stopped:
            return
        for answer in [each for each in self._waiting if not is_cut(self._world, each.machine, host.machine)]:
            self._waiting.remove(answer)
            answer.given = (answer.request(),)


class Keys:
    """The keys below a prefix, as torch's PrefixStore has them, seen by the host."""

    def __init__(self, prefix, below):
        self.values, outer = (below, "") if isinstance(below, Values) else (below.values, below.prefix)
        self.prefix = f"{outer}{prefix}/"

    def check(self, keys):
        return all(self.prefix + key in self.values.values for key in keys)

    def get(self, key):
        return self.values.values[self.prefix + key]

    def set(self, key, value):
        self.values.values[self.prefix + key] = str(value).encode()

    def compare_set(self, key, expected, value):
        found = self.values.values.get(self.prefix + key)
        if found is None and expected:
            return expected.encode()
        if (found or b"").decode() == expected:
            self.set(key, value)
        return self.get(key)

    def add(self, key, count):
        total = int(self.values.values.get(self.prefix + key, b"0")) + count
        self.set(key, total)
        return total

    def delete_key(self, key):
        return self.values.values.pop(self.prefix + key, None) is not None


class Client(StoreClient):
    """The engine's client of the store; what makes its requests is no thread, but the world."""

    def ask(self, request):
        try:
            return self._origin.ask(lambda: request(Keys(self._prefix, self._origin)), self._timeout_s)
        except RuntimeError as error:
            raise LostStoreError(f"the store can't be asked: {error}", operation="agree") from error

    def connect(self):
        return self.ask(lambda keys: keys)

    def close(self):
        """Nothing to end."""


# ----------------------------------------------------------------------------------- other memories
def peers_of(world):
    """Returns a stand-in for PeerStore: the memory of another machine, over a network that may be cut, slow, or lie."""

    class Peer(PeerStore):
        def __init__(self, endpoint, *, connections=1, clock, waits=False):
            self._endpoint, self._silence_s = endpoint, clock.timing.peer_silence_s

        def get(self, key):
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

        def _found(self, key):
            save_id, rank, *_ = key.split("/")
            process = world.current.process
            machine = next(each for each in process.job.machines if each.name == self._endpoint.address)
            world.steps += 1
            world.current.wait(world.rng.choice([0.0, 0.01, 0.3]) * machine.slow)
            deadline = world.now + self._silence_s
            while is_cut(world, process.machine, machine):
                if world.now >= deadline:
                    raise StoreError("the peer is lost", operation="read", key=key, reason="unavailable")
                world.current.wait(1.0)
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


# ---------------------------------------------------------------------------------------- waiting
class Condition:
    """A condition of a process whose threads take turns: only who waits gives way."""

    def __init__(self, world):
        self._world, self._rung = world, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def notify_all(self):
        for event in self._rung:
            event.set()
        self._rung.clear()

    def wait(self, seconds=math.inf):
        event = threading.Event()
        self._rung.append(event)
        return self._world.current.wait(seconds, event)

    def wait_for(self, is_so, seconds=math.inf):
        deadline = self._world.now + seconds
        while not is_so() and self._world.now < deadline:
            self.wait(deadline - self._world.now)
        return is_so()


@contextlib.contextmanager
def torch_distributed(world):
    """Answers the engine's calls of torch.distributed for the simulated process whose turn it is."""

    def job():
        return world.current.process.job

    threads = types.SimpleNamespace(Condition=lambda: Condition(world), Event=threading.Event, Lock=threading.Lock)
    peer = peers_of(world)
    changes = [
        (dist, "is_initialized", lambda: True),
        (dist, "get_process_group_ranks", lambda _: list(range(job().size))),
        (dist, "get_world_size", lambda *_: job().size),
        (dist, "get_rank", lambda *_: world.current.process.rank),
        (dist.distributed_c10d, "_get_default_store", lambda: job().store),
        (meeting, "RankGroup", lambda *_: JobGroup(world.current.process)),
        (meeting, "StoreClient", Client),
        (meeting, "interface_for", lambda *_: None),
        (meeting, "atexit", types.SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None)),
        (replicator, "threading", threads),
        (replicator, "PeerStore", peer),
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
