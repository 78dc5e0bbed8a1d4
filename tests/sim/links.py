"""A stand-in for torch.distributed in the simulated world: its key-value store, collectives, and connections of gloo.

The engine's own code runs above it: the meeting, requests, links, senders and receivers. The store lives in the process
of rank 0, and ends with it; a request that its machine can't take yet is carried out later, even where its client has
given up by then. A connection has two ends, each of which has a bound for a message; it breaks where an end's process
dies or gives up, and stands still where the cable between the machines is cut. Those of a machine may be slow.
"""

import contextlib
import itertools
import math
import threading
import types
import weakref

import torch.distributed as dist
from sim.machines import AtOnce

from tiered_checkpoint_io.engine.ranks import transfer
from tiered_checkpoint_io.engine.ranks.coordination import Group
from tiered_checkpoint_io.engine.ranks.store_client import LostStoreError, StoreClient
from tiered_checkpoint_io.engine.replication import local_peers, meeting, peer_link, replica_sender
from tiered_checkpoint_io.errors import RestoreError


class Job:
    """One start of all ranks: what torch.distributed knows of them."""

    def __init__(self, world, number, size):
        self.world, self.number, self.size = world, number, size
        self.ranks = []
        self.store = Values(self)
        self.exchanges = []
        self.made = weakref.WeakValueDictionary()
        self.ids = itertools.count(1)


def is_cut(world, one, other):
    """Whether the cable between two machines is cut."""
    return world.cuts.get(frozenset({one.name, other.name}), 0.0) > world.now


# ------------------------------------------------------------------------------------- the store
class Values:
    """The store of a job; each request is carried out where its host and the network allow it."""

    def __init__(self, job):
        self._job, self._world = job, job.world
        self.values = {}
        self._waiting = []
        #: Answers that did not arrive.
        self.lost = 0

    def ask(self, request, timeout_s):
        """What ``request`` gives, which is carried out at most once; RuntimeError where there is no answer in time."""
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


# ----------------------------------------------------------------------------------- connections
class Connection:
    """One end of what two ranks make by gloo: a message goes over where one end sends and the other receives."""

    def __init__(self, job, keys, rank, bound):
        self._world, self._bound_s = job.world, bound.total_seconds()
        self._process = job.world.current.process
        self._id, self._theirs = str(next(job.ids)), None
        self.rung, self.is_closed, self.posted = threading.Event(), False, None
        job.made[self._id] = self
        deadline = self._world.now + self._bound_s
        keys.values.ask(lambda: keys.set(str(rank), self._id), self._bound_s)
        while True:
            found = keys.values.ask(
                lambda: keys.get(str(1 - rank)) if keys.check([str(1 - rank)]) else None, self._bound_s
            )
            self._theirs = (found or b"").decode()
            other = job.made.get(self._theirs)
            if other is not None and other._theirs == self._id and not other.is_closed and self._reaches(other):
                break
            if self._world.now >= deadline:
                self.is_closed = True
                raise RuntimeError("connect timeout")
            del other
            self._world.current.wait(0.2)
        # Of the other end, only what its process would have on the wire: it closes where its owner drops it.
        self._other = weakref.ref(other)
        other.rung.set()

    def __del__(self):
        self.is_closed = True

    def send(self, tensors, _peer, _tag):
        return types.SimpleNamespace(wait=lambda: self._send(tensors[0]))

    def recv(self, tensors, _peer, _tag):
        return types.SimpleNamespace(wait=lambda: self._receive(tensors[0]))

    def _reaches(self, other):
        return not is_cut(self._world, self._process.machine, other._process.machine)

    def _send(self, data):
        self._until(lambda other: other is not None and other.posted is not None and self._reaches(other))
        other = self._other()
        if other.posted.numel() != data.numel():
            self._world.violation = f"{data.numel()} bytes are sent where {other.posted.numel()} are received"
        other.posted.copy_(data)
        other.posted = None
        other.rung.set()

    def _receive(self, data):
        self.posted = data
        other = self._other()
        if other is not None:
            other.rung.set()
        del other
        self._until(lambda _: self.posted is None)

    def _until(self, is_so):
        """Waits until both ends are so far; RuntimeError where that can't be any more."""
        world = self._world
        deadline = world.now + self._bound_s
        world.steps += 1
        world.current.wait(world.rng.choice([0.0, 0.01, 0.3]) * self._process.machine.slow)
        while not self.is_closed:
            other = self._other()
            if is_so(other):
                return
            is_lost = other is None or other.is_closed or not other._process.is_alive
            # Where the cable is cut, the other end is not informed.
            self.is_closed = is_lost and (other is None or self._reaches(other))
            del other
            if world.now >= deadline:
                self.is_closed = True
            if not self.is_closed:
                self.rung.clear()
                world.current.wait(min(1.0, deadline - world.now), self.rung)
        self.posted = None
        raise RuntimeError("timed out" if world.now >= deadline else "connection closed by peer")


# ------------------------------------------------------------------------------------ collectives
class JobGroup(Group):
    """All ranks of a job, as TorchGroup has them."""

    def __init__(self, node, clock, *, timeout_s, what=""):
        super().__init__(node)
        self._process, self._bound_s = clock.current.process, max(timeout_s, clock.timing.rendezvous_s)
        self._job = self._process.job
        self.rank, self.world_size = self._process.rank, self._job.size

    def _all_gather(self, obj):
        job, world = self._job, self._job.world
        number = self._process.exchanged = getattr(self._process, "exchanged", -1) + 1
        while len(job.exchanges) <= number:
            job.exchanges.append({})
        gathered, deadline = job.exchanges[number], world.now + self._bound_s
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


class Pool(AtOnce):
    """A pool as a context."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@contextlib.contextmanager
def torch_distributed(world):
    """What the engine asks of torch.distributed is answered for the simulated process whose turn it is."""

    def job():
        return world.current.process.job

    threads = types.SimpleNamespace(Condition=lambda: Condition(world))
    gloo = types.SimpleNamespace(
        PrefixStore=Keys, ProcessGroupGloo=lambda keys, rank, _, bound: Connection(job(), keys, rank, bound)
    )
    changes = [
        (dist, "is_initialized", lambda: True),
        (dist, "get_process_group_ranks", lambda _: list(range(job().size))),
        (dist, "get_world_size", lambda *_: job().size),
        (dist, "get_rank", lambda *_: world.current.process.rank),
        (dist.distributed_c10d, "_get_default_store", lambda: job().store),
        (meeting, "TorchGroup", JobGroup),
        (meeting, "StoreClient", Client),
        (meeting, "interface_for", lambda *_: None),
        (meeting, "atexit", types.SimpleNamespace(register=lambda *_: None, unregister=lambda *_: None)),
        (peer_link, "distributed_c10d", gloo),
        (replica_sender, "threading", threads),
        (local_peers, "threading", threads),
        (transfer, "ThreadPoolExecutor", Pool),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, instead in changes:
            setattr(module, name, instead)
        yield
    finally:
        for module, name, original in before:
            setattr(module, name, original)
