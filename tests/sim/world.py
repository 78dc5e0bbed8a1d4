"""One thread, one virtual clock, one seed: processes of several nodes by turns, over a store in memory.

A *process* runs real code of the engine on a greenlet of its own. It gives way at each request to the store, and where it
sleeps or waits by its clock; the world then takes the next one by a seeded draw. A process may be *killed* there (its
greenlet is never resumed: no ``finally`` runs), *stopped* for up to hours, and a request may *fail*, before or behind
its effect. The same seed gives the same history; ``World.digest`` tells whether it did.
"""

import contextlib
import hashlib
import logging
import random
import sys
from dataclasses import dataclass

from greenlet import getcurrent, greenlet

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.stores.base import Metrics, ObjectInfo, changed

logging.getLogger("tiered_checkpoint_io").addHandler(logging.NullHandler())
START = 1_767_225_600.0  # 2026-01-01


@dataclass(frozen=True)
class Fates:
    """Probabilities of faults at a request, and the largest error of clocks, seconds."""

    killed: float = 0.02
    failed: float = 0.0
    stopped: float = 0.01
    skew: float = 0.0


class World:
    """The scheduler, the time, and all processes."""

    def __init__(self, seed, fates=Fates(), timing=None):
        self.rng = random.Random(seed)
        self.fates = fates
        self.timing = timing or Timing()
        self.now = START
        self.steps = 0
        self.objects = {}
        self.processes = []
        self.history = []
        self.violation = ""
        self.is_over = False
        self.check = lambda: None
        self._hub = getcurrent()
        self._digest = hashlib.sha256()

    # -------------------------------------------------------------------------------- processes
    def spawn(self, name, work, *, immortal=False):
        """A process that carries out ``work(process)``, from now on."""
        process = Process(self, name, work, immortal=immortal)
        self.processes.append(process)
        return process

    def run(self, until, limit_s):
        """Until it is so, looked at now and then, or something is violated; False if the time is up."""
        end, turn = self.now + limit_s, 0
        while not self.violation:
            turn += 1
            if turn % 20 == 0 and until():
                break
            alive = [process for process in self.processes if process.is_alive]
            ready = [process for process in alive if process.wakes_at <= self.now or process.is_rung]
            if not ready:
                assert alive, "no process is left"
                self.now = min(process.wakes_at for process in alive)
                if self.now > end:
                    return False
                continue
            self.rng.choice(ready).resume()
        return True

    def judge(self):
        """Has what is there now checked. What the check itself raises must not reach the engine, which may catch it."""
        try:
            self.check()
        except Exception as error:
            self.violation = f"{type(error).__name__}: {error}"

    def give_way(self):
        self._hub.switch()

    def close(self):
        """Ends what was killed or still runs; what its ``finally`` blocks then do counts no more."""
        self.is_over = True
        self.check = lambda: None
        for process in self.processes:
            process.end()

    # ---------------------------------------------------------------------------------- history
    def note(self, line):
        self.history.append(f"{self.now - START:10.2f} {line}")
        self._digest.update(self.history[-1].encode())

    @property
    def digest(self):
        """Digest of all that happened, and of the next random number."""
        self._digest.update(repr(self.rng.random()).encode())
        return self._digest.hexdigest()


class Process:
    """A process of a node: its greenlet, its clock."""

    def __init__(self, world, name, work, *, immortal):
        self.world, self.name, self._immortal = world, name, immortal
        self.clock = ProcessClock(world, self, world.rng.uniform(-1, 1) * world.fates.skew)
        self.wakes_at = world.now
        self.event = None
        self.is_killed = False
        self._greenlet = greenlet(lambda: work(self))

    @property
    def is_alive(self):
        return not self.is_killed and not self._greenlet.dead

    @property
    def is_rung(self):
        return self.event is not None and self.event.is_set()

    def resume(self):
        self._greenlet.switch()

    def kill(self):
        self.is_killed = True
        self.world.note(f"{self.name} is killed")

    def end(self):
        with contextlib.suppress(Exception):
            self._greenlet.throw()

    def sleep(self, seconds, event=None):
        if self.world.is_over:
            raise SystemExit
        self.wakes_at, self.event = self.world.now + max(0.0, seconds), event
        self.world.give_way()
        self.event = None

    def request(self, what, effect, *, changes):
        """One request to the store: at its time, with its fate."""
        world, rng, fates = self.world, self.world.rng, self.world.fates
        if rng.random() < fates.stopped:
            self.sleep(rng.choice([5.0, 120.0, 1000.0, 7200.0]))
        else:
            self.sleep(rng.choice([0.0, 0.01, 0.05]))
        world.steps += 1
        draw, behind = rng.random(), rng.random() < 0.5
        dies = draw < fates.killed and not self._immortal
        fails = fates.killed <= draw < fates.killed + fates.failed
        fate = " and is killed" if dies else " and fails" if fails else ""
        world.note(f"{self.name}: {what}{fate}{'' if not fate else ' behind' if behind else ' before'}")
        missing = result = None
        if behind or not fate:
            try:
                result = effect()
            except StoreError as error:
                if error.reason not in ("missing", "changed"):
                    raise
                missing = error
            if changes:
                world.judge()
        if dies:
            self.kill()
            while True:
                self.sleep(0.0)
        if fails:
            raise StoreError("injected", operation=what, reason="unavailable")
        if missing is not None:
            raise missing
        return result


class ProcessClock(Clock):
    """The virtual time as a process sees it. Polls are stretched at random: most steps would be polls otherwise."""

    def __init__(self, world, process, skew):
        super().__init__(world.timing, world.rng)
        self.__dict__.update(_world=world, _process=process, _skew=skew)

    def wall(self):
        return self._world.now + self._skew

    def monotonic(self):
        return self._world.now

    since_boot = monotonic

    def sleep(self, seconds):
        self._process.sleep(seconds)

    def wait(self, event, seconds):
        if not event.is_set():
            self._process.sleep(seconds * self._world.rng.choice([1, 10, 100]), event)
        return event.is_set()

    def join(self, thread, seconds):
        raise AssertionError(f"a process of the simulation has a thread: {thread}, {seconds}")


class MemoryStore:
    """The world's objects, as one process reaches them, by a server that keeps conditions of writes."""

    url = "s3://simulated/run"

    def __init__(self, world, process=None):
        self._process = process
        self._world = world
        self._objects = world.objects
        self.metrics = Metrics()

    def _do(self, what, key, effect, *, changes=False):
        return self._process.request(f"{what} {key}", effect, changes=changes)

    def _get(self, key):
        try:
            return self._objects[key][0]
        except KeyError:
            raise StoreNotFoundError("it is not there", operation="get", tier="durable", key=key) from None

    def list(self, prefix):
        def found():
            return [
                ObjectInfo(key, len(data), modified)
                for key, (data, modified) in sorted(self._objects.items())
                if key.startswith(prefix)
            ]

        return iter(self._do("list", prefix, found))

    def get(self, key):
        return self._do("get", key, lambda: self._get(key))

    def size(self, key):
        return self._do("size", key, lambda: len(self._get(key)))

    def read_into(self, key, offset, buffer):
        def read():
            buffer[:] = self._get(key)[offset : offset + len(buffer)]

        self._do("read", key, read)

    def put(self, key, data):
        copied = bytes(data)
        self._do("put", key, lambda: self._objects.__setitem__(key, (copied, self._world.now)), changes=True)

    def upload(self, key, data, *, journal=None, progress=None):
        with data[0 : len(data)] as piece:
            copied = bytes(piece)
        self._do("upload", key, lambda: self._objects.__setitem__(key, (copied, self._world.now)), changes=True)
        if progress is not None:
            progress(len(copied))
        if journal is not None:
            journal.clear()

    def abandon(self, key, journal):
        self._do("abandon", key, journal.clear)

    def delete(self, key):
        self._do("delete", key, lambda: self._objects.pop(key, None), changes=True)

    def close(self):
        """Nothing to free."""

    # ------------------------------------------------------------------------------- conditions
    def _tag(self, key):
        return hashlib.md5(self._get(key), usedforsecurity=False).hexdigest() if key in self._objects else None

    def _check(self, what, key, expected):
        if self._tag(key) != expected:
            raise changed(what, key)

    def tag(self, key):
        return self._do("size", key, lambda: self._tag(key))

    def get_tagged(self, key):
        return self._do("get", key, lambda: (self._get(key), self._tag(key)))

    def put_if(self, key, data, expected):
        return self._write_if("put", key, bytes(data), expected)

    def upload_if(self, key, data, expected, *, journal=None, progress=None, look=None):
        if look is not None:
            look()
        with data[0 : len(data)] as piece:
            copied = bytes(piece)
        self._write_if("upload", key, copied, expected)
        if progress is not None:
            progress(len(copied))
        if journal is not None:
            journal.clear()

    def _write_if(self, what, key, data, expected):
        def write():
            if self._tag(key) == expected:
                self._objects[key] = (data, self._world.now)
            elif self._objects.get(key, (None, 0.0))[0] != data:
                raise changed(what, key)
            return self._tag(key)

        return self._do(what, key, write, changes=True)

    def delete_if(self, key, expected):
        def delete():
            if key in self._objects:
                self._check("delete", key, expected)
                del self._objects[key]

        self._do("delete", key, delete, changes=True)


class Peek(MemoryStore):
    """The objects as a judge sees them: at once, and without a fate."""

    def _do(self, what, key, effect, *, changes=False):
        return effect()


class Serial:
    """Replaces pools of threads by loops, wherever the package has them, while it is entered."""

    def __enter__(self):
        def in_loop(work, items, *_):
            return [work(each) for each in items]

        self._modules = [
            module
            for name, module in list(sys.modules.items())
            if name.startswith("tiered_checkpoint_io.") and getattr(module, "in_parallel", None) is in_parallel
        ]
        for module in self._modules:
            module.in_parallel = in_loop
        return self

    def __exit__(self, *_):
        for module in self._modules:
            module.in_parallel = in_parallel
