"""Machines of the simulated world: processes of an operating system, each with threads, file locks, and an end.

The engine runs as it is. Its clock starts threads and waits, and gives turns here; what it asks of the operating system
about processes (pids, boots, file locks, new processes) is answered for the simulated process whose turn it is. A
process is killed or stopped with all of its threads. A dead one's file locks end, and no ``finally`` of it runs.
"""

import contextlib
import fcntl
import gc
import math
import os
import shutil
import subprocess
import threading
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

from greenlet import GreenletExit
from sim.world import MemoryStore, Process

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine import leasing, session
from tiered_checkpoint_io.engine.drain import client, log
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.formats import parallel
from tiered_checkpoint_io.memory import node, slots

#: Bounds as in production, except for polls, which would be most of what happens.
TIMING = Timing(
    wait_poll_s=0.5,
    drain_rest_s=3.0,
    full_look_s=10.0,
    heartbeat_s=20.0,
    idle_heartbeat_s=60.0,
    lease_poll_s=15.0,
    redo_first_s=2.0,
)


@dataclass(frozen=True)
class Odds:
    """Probabilities that a process is killed when it waits, and that it is stopped at a request."""

    killed: float = 0.0
    stopped: float = 0.0


class Machine:
    """A node: its memory, its clock, and its processes. A lost one comes back with other hardware."""

    def __init__(self, world, name, folder):
        self.world, self.name, self.folder = world, name, folder
        self.boots = 0
        self.clock = MachineClock(world, self)
        self.processes = []
        self._set_up()

    def _set_up(self):
        os.mkdir(self.folder, 0o700)
        self.boots += 1
        self.boot_id = f"{self.name}-{self.boots}"
        self.skew = self.world.rng.uniform(-1, 1) * self.world.fates.skew

    def start(self, name, work, *, immortal=False):
        """A process that carries out ``work()``."""
        return OsProcess(self, name, work, immortal=immortal)

    def lose(self):
        """All of it is gone; another machine takes its place."""
        self.world.note(f"{self.name} is lost")
        for process in self.processes:
            process.kill()
        shutil.rmtree(self.folder)
        self._set_up()


class OsProcess:
    """A process of a machine. It ends with its first thread, or is killed."""

    def __init__(self, machine, name, work, *, immortal):
        self.world, self.machine, self.name, self._immortal = machine.world, machine, name, immortal
        self.pid = self.world.pids = getattr(self.world, "pids", 1000) + 1
        self.owner = f"{self.world.rng.getrandbits(64):016x}"
        self.stopped_until = 0.0
        #: Number of events that excuse its next failure.
        self.faults = 0
        self.is_over, self.ended_at = False, math.inf
        self.ended = threading.Event()
        machine.processes.append(self)
        self.start_thread(name, work, ends_process=True)

    @property
    def is_alive(self):
        return not self.is_over

    @property
    def is_stopped(self):
        return self.stopped_until > self.world.now

    def start_thread(self, name, work, *, ends_process=False):
        thread = Thread(self, name, work, ends_process=ends_process, immortal=self._immortal)
        self.world.processes.append(thread)
        return thread

    def stop(self, seconds):
        self.faults += 1
        self.stopped_until = self.world.now + seconds
        self.world.note(f"{self.name} is stopped for {seconds:.0f} s")

    def kill(self):
        if self.is_alive:
            self.world.note(f"{self.name} is killed")
            self.end()

    def end(self):
        self.is_over, self.ended_at = True, self.world.now
        self.ended.set()
        self.world.file_locks.end(self)


class Thread(Process):
    """A thread of a process: what the world gives turns to."""

    def __init__(self, process, name, work, *, ends_process, immortal):
        self.process, self._work, self._ends_process = process, work, ends_process
        self._wakes_at = 0.0
        super().__init__(process.world, name, lambda _: self._run(), immortal=immortal)
        # Who starts a thread does not go on where it ends.
        self._greenlet.parent = process.world._hub
        self.ended = threading.Event()

    def _run(self):
        try:
            self._work()
        except Exception as error:
            if self.world.is_over:
                return
            text = "".join(traceback.format_exception(error)[-3:])
            self.world.violation = f"{self.name} has ended by an error: {type(error).__name__}: {error}"
            self.world.note(text)
        if not self.world.is_over:
            self.ended.set()
            self.world.processes.remove(self)
            if self._ends_process:
                self.process.end()

    @property
    def is_alive(self):
        return self.process.is_alive and super().is_alive

    @property
    def is_rung(self):
        return super().is_rung and not self.process.is_stopped

    @property
    def wakes_at(self):
        return max(self._wakes_at, self.process.stopped_until)

    @wakes_at.setter
    def wakes_at(self, when):
        self._wakes_at = when

    def resume(self):
        self.world.current = self
        super().resume()

    def kill(self):
        self.process.kill()

    def end(self):
        with contextlib.suppress(Exception, SystemExit, GreenletExit):
            self._greenlet.throw()

    def wait(self, seconds, event=None):
        """Waits, and may be killed there."""
        world = self.world
        if not self._immortal and world.rng.random() < world.odds.killed:
            self.kill()
        self.sleep(seconds, event)
        return event is not None and event.is_set()

    def request(self, what, effect, *, changes):
        world = self.world
        if not self._immortal and world.rng.random() < world.odds.stopped:
            self.process.stop(world.rng.choice([3.0, 40.0, 300.0, 300.0, 3600.0]))
        try:
            return super().request(what, effect, changes=changes)
        except OSError:
            self.process.faults += 1
            raise


class MachineClock(Clock):
    """The virtual time as a machine shows it to the thread whose turn it is."""

    def __init__(self, world, machine):
        super().__init__(TIMING, world.rng)
        self.__dict__.update(_world=world, _machine=machine)

    def wall(self):
        return self._world.now + self._machine.skew

    def monotonic(self):
        return self._world.now

    since_boot = monotonic

    def sleep(self, seconds):
        self._world.current.wait(seconds)

    def wait(self, event, seconds):
        return event.is_set() or self._world.current.wait(seconds, event)

    def start(self, work, name, *, daemon=True):
        process = self._world.current.process
        return Started(process.start_thread(f"{process.name}/{name.removeprefix('tiered-')}", work))

    def join(self, thread, seconds):
        if thread.is_alive():
            self._world.current.wait(seconds, thread.ended)


class Started:
    """A thread as the engine sees it."""

    def __init__(self, thread):
        self._thread = thread
        self.ended = thread.ended

    def is_alive(self):
        return self._thread.is_alive


class Store(MemoryStore):
    """The world's objects, as the thread whose turn it is reaches them."""

    def _do(self, what, key, effect, *, changes=False):
        return self._world.current.request(f"{what} {key}", effect, changes=changes)


class Child:
    """The process of a drain as its trainer sees it."""

    def __init__(self, process):
        self._process = process

    def poll(self):
        return None if self._process.is_alive else 0

    def wait(self, seconds):
        self._process.world.current.wait(seconds, self._process.ended)
        if self._process.is_alive:
            raise subprocess.TimeoutExpired("drain", seconds)


def start_drain(machine, root, logger, *, immortal=False):
    """A drain of a machine, as the command line runs it for a trainer."""

    def work():
        drain = Drain(
            root,
            logger=logger,
            for_trainer=not immortal,
            open_store=lambda *_: Store(machine.world),
            clock=machine.clock,
        )
        while not drain.run() and drain.follows():
            machine.clock.sleep(1.0)

    return machine.start(f"drain of {machine.name}", work, immortal=immortal)


class FileLocks:
    """Locks of processes on descriptors: a process's locks end with it, even if others have the file open."""

    def __init__(self, world):
        self._world = world
        self._held = {}
        self._flock, self._close = fcntl.flock, os.close

    def flock(self, file, operation):
        self._flock(file, operation)
        if operation & fcntl.LOCK_UN:
            self._held.pop(file, None)
        else:
            self._held[file] = self._world.current.process

    def close(self, file):
        self._held.pop(file, None)
        self._close(file)

    def end(self, process):
        for file in [file for file, holder in self._held.items() if holder is process]:
            del self._held[file]
            self._flock(file, fcntl.LOCK_UN)


class Idle:
    """A thread that takes no work, so that the caller's does it all."""

    ident = None

    def __init__(self, *_, **__):
        pass

    def start(self):
        pass

    def join(self):
        pass


@contextlib.contextmanager
def operating_system(world, logger):
    """Answers what the engine asks of the operating system for the simulated process whose turn it is."""
    world.file_locks = locks = FileLocks(world)

    def here():
        return world.current.process

    def born(pid):
        alive = (process for process in here().machine.processes if process.is_alive)
        return next((process.pid for process in alive if process.pid == pid), None)

    changes = [
        (fcntl, "flock", locks.flock),
        (os, "close", locks.close),
        (os, "getpid", lambda: here().pid),
        (node, "_born", born),
        (node, "_pid_ns", lambda: "pid:[1]"),
        (node, "boot_id", lambda: here().machine.boot_id),
        (leasing, "owner_of_process", lambda _: here().owner),
        (session, "open_store", lambda *_, **__: Store(world)),
        (client, "start_process", lambda root, _: Child(start_drain(here().machine, root, logger))),
        (parallel, "threading", SimpleNamespace(Thread=Idle, Event=threading.Event)),
        # Small states need neither.
        (slots, "_ROUND", 1 << 12),
        (log, "_HALF", 1 << 16),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in changes]
    try:
        for module, name, instead in changes:
            setattr(module, name, instead)
        # What a cycle keeps open must not depend on when it is found.
        gc.disable()
        yield
    finally:
        gc.enable()
        for module, name, original in before:
            setattr(module, name, original)
