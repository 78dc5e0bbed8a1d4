"""Staging of one process's saves: their order, and their capture into slots of node memory.

Saves have ids, take one turn at a time, and may end during training. A planned file is copied into a slot, for which
retention makes room; for a GPU, the slot is pinned.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar, cast

import torch

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.retention import Rules, acquire
from tiered_checkpoint_io.errors import ConfigError, DrainError, SaveError
from tiered_checkpoint_io.formats.image import PINNED_PIECE, Image, Untouched, is_plain
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.slots import Slot, are_slow
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids


class Turn:
    """Ids, slots and retention are of one operation at a time: other threads wait for their turn."""

    def __init__(self, timeout_s: float) -> None:
        """Takes the bound of each wait, seconds."""
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextlib.contextmanager
    def taken(self, name: str) -> Iterator[None]:
        """Runs the block while no other thread has a turn; ``name`` is the checkpoint's, for errors.

        Raises ConfigError if this thread has a turn (a signal handler saves while it interrupts a save), and SaveError
        if another thread's turn has not ended within the bound.
        """
        if self._thread == threading.get_ident():
            raise ConfigError(
                f"{name} is to be saved or removed in the middle of another save of the same thread",
                operation="save",
                hint="a signal handler should only note the signal, and save later, as PreemptionCheckpoint does",
            )
        if not self._lock.acquire(timeout=self._timeout_s):
            raise SaveError(
                f"{name} has waited {self._timeout_s:.0f} s for the save of another thread",
                operation="save",
                hint="see whether the node is out of memory or of processor time",
            )
        try:
            self._thread = threading.get_ident()
            yield
        finally:
            self._thread = None
            self._lock.release()


T = TypeVar("T")


class BackgroundTask:
    """Runs at most one end of a save at a time, and the work that follows it, on a thread of its own.

    Opening the session waits for it, so the next restore, delete or save finds all parts in memory. A process that
    ends waits for it too. The thread waits for the next task: to start one, a caller would wait for a core.

    Attributes:
        lost: Names whose durable saves failed here, or were left out: their callers took them for saved.
    """

    def __init__(self, timeout_s: float, log: Logger) -> None:
        """Takes the bound of each wait, seconds, and the logger."""
        self._timeout_s = timeout_s
        self._log = log
        self.lost: set[str] = set()
        self._followers: deque[Future[None]] = deque()
        #: Work that follows a later durable save that has succeeded, by name.
        self._put_off: dict[str, Callable[[], None]] = {}
        self._tasks: dict[Future[Any], str] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._thread: int | None = None

    def run(self, name: str, work: Callable[[], T]) -> Future[T]:
        """Runs ``work``, the rest of the save of ``name``, after the running work; its caller shows its exception."""
        self.wait()
        return self._submit(name, work)

    def after(self, name: str, work: Callable[[], None], *, needs: str = "") -> None:
        """Does something with ``name`` after the running work; at once if none runs. :meth:`show` shows its failure.

        If the last durable save is :attr:`lost`, the work waits for the next, see :meth:`saved`; if it ``needs`` the
        save of a lost name, it is not done at all.
        """

        def unless_lost() -> None:
            if self.lost and (not needs or needs in self.lost):
                lost = ", ".join(sorted(self.lost))
                self._log.warning("%s stays as it is: the durable tier does not get %s", name, lost)
                if not needs:
                    self._put_off[name] = work
                return
            self._put_off.pop(name, None)
            work()

        if self.is_busy:
            self._followers.append(self._submit(name, unless_lost))
        else:
            unless_lost()

    def saved(self, name: str, *, durable: bool) -> None:
        """Takes note of a save: after a durable one, work that was put off for a :attr:`lost` one is done.

        Work on an earlier checkpoint of that name is not done any more.
        """
        self._put_off.pop(name, None)
        if durable:
            self.lost.clear()
            due, self._put_off = self._put_off, {}
            self._followers.extend(self._submit(each, work) for each, work in due.items())

    def show(self) -> None:
        """Waits for the running work; on its own thread, looks at the work that has ended.

        Raises the failures of work :meth:`after` a task, and DrainError if the work has not ended in time.
        """
        self.wait()
        while self._followers and self._followers[0].done():
            self._followers.popleft().result()

    def _submit(self, name: str, work: Callable[[], T]) -> Future[T]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "tiered-seal", self._begin)
        future = self._pool.submit(work)
        self._tasks[future] = name
        # Asked several times at each save: work that has ended is not looked at again.
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: Future[Any]) -> None:
        self._tasks.pop(future, None)

    def _begin(self) -> None:
        self._thread = threading.get_ident()

    def wait(self) -> None:
        """Waits for the running work, however it ends, or raises DrainError; does nothing on its own thread."""
        if not self._tasks or threading.get_ident() == self._thread:
            return
        # A running task may leave more to do.
        while self.is_busy:
            tasks = dict(self._tasks)
            _, left = wait(tasks, self._timeout_s)
            if left:
                name = next(name for future, name in tasks.items() if future in left)
                raise DrainError(
                    f"{name} is not complete in memory after {self._timeout_s:.0f} s",
                    operation="save",
                    tier="memory",
                    hint="see whether the node is out of memory or of processor time",
                )

    @property
    def is_busy(self) -> bool:
        """True if any task runs."""
        return any(not future.done() for future in list(self._tasks))

    def is_running(self, name: str) -> bool:
        """Returns True if the end of the save of that name still runs."""
        return any(task == name and not future.done() for future, task in list(self._tasks.items()))

    def close(self) -> None:
        """Ends the thread, once it has nothing to do; a later task begins another."""
        pool, self._pool = self._pool, None
        if pool is not None:
            # Work that has hung is not waited for once more.
            pool.shutdown(wait=not self.is_busy)
            self._thread = None


class SaveIds:
    """Gives out save ids.

    Attributes:
        seen: The newest id that was seen in any tier, and not given out by this process itself.
    """

    def __init__(
        self,
        clock: Clock,
        log: Logger,
        *,
        held: Callable[[], Iterable[str]],
        learnt: Callable[[], str | None] = lambda: None,
        met_others: Callable[[], bool] = lambda: False,
    ) -> None:
        """Takes the sources of others' ids.

        Ids of others are ``held`` in this node's memory, or ``learnt``: the newest on the durable tier, once another
        thread knows it. ``met_others`` says if other runs may have saved since the last call.
        """
        self._clock = clock
        self._log = log
        self._held = held
        self._learnt = learnt
        self._met_others = met_others
        self._run_id: str | None = None
        self._counter = 0
        self.seen: str | None = None

    @property
    def newest(self) -> str | None:
        """The newest that this process knows of others."""
        return max(filter(None, (self.seen, self._learnt())), default=None)

    def next(self) -> str:
        """Returns the id of the next operation of this process."""
        newest, own = self.newest, None
        if self._run_id is not None:
            own = ids.save_id(self._run_id, self._counter + 1)
        if own is not None and own <= (newest or ""):
            # Other runs have saved since this process' first save, which continued theirs.
            self.restart()
            if newest and newest != self.seen and ids.new_run_id(clock=self._clock) < newest:
                self._log.warning(
                    "this node's clock is behind that of the node which made save %s: what this run saved so far counts"
                    " as older, and what it saves from now on as newer",
                    newest,
                )
        elif own is not None and self._met_others():
            # This process's next save is newer than any save of theirs.
            self.restart()
        if self._run_id is None:
            self._run_id = self.new_run([newest, own, *self._held()])
        self._counter += 1
        return ids.save_id(self._run_id, self._counter)

    def new_run(self, seen: Iterable[str | None]) -> str:
        """Returns the id of a run that begins now, after all save ids that were seen."""
        return ids.new_run_id(after=max(filter(None, seen), default=None), clock=self._clock)

    def follow(self, *seen: str | None) -> None:
        """Makes the next ids sort after the seen ones; None for no id."""
        self.seen = max(filter(None, (self.seen, *seen)), default=None)

    def restart(self) -> None:
        """Begins another run: if others save before the next id is given out, that id is newer."""
        self._run_id, self._counter = None, 0


#: CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


class HostPins:
    """Registers slots as pinned memory, once each, so that a GPU copies into them at full speed.

    Attributes:
        device: GPU of the last call's context: a thread's own is that of the first GPU, in which most ranks have
            none, and would get one, of hundreds of megabytes.
    """

    def __init__(self) -> None:
        self.device: int | None = None
        self._lock = threading.Lock()
        #: Bytes and context of each piece, by its address.
        self._pinned: dict[int, tuple[int, int]] = {}

    def pin(self, view: memoryview) -> int:
        """Registers the whole pages of ``view``, a :data:`PINNED_PIECE` at a time, as far as they are not yet.

        Returns the number of bytes, from the first on, that are registered. A refusal only costs speed.
        """
        return self._pin(view, len(view))[0]

    def pin_piece(self, view: memoryview) -> bool:
        """Registers one more piece; returns whether there is another."""
        done, made = self._pin(view, 1)
        return made > 0 and len(view) - done >= mmap.PAGESIZE

    def _pin(self, view: memoryview, most: int) -> tuple[int, int]:
        address, made = torch.frombuffer(view, dtype=torch.uint8).data_ptr(), 0
        whole = len(view) - len(view) % mmap.PAGESIZE
        with self._lock:
            self.device = torch.cuda.current_device()
            for start in range(0, whole, PINNED_PIECE):
                wanted = min(PINNED_PIECE, whole - start)
                before, _ = self._pinned.get(address + start, (0, 0))
                if before >= wanted:
                    continue
                if made == most:
                    return start, made
                if before:
                    self._end(address + start)
                if int(_runtime().cudaHostRegister(address + start, wanted, 0)) != 0:
                    # CUDA remembers the error for this thread, and torch would raise it after the next kernel that
                    # training launches here. torch has no cudaGetLastError; its own check of a kernel takes it as well.
                    with contextlib.suppress(RuntimeError):
                        torch.ones(1, device="cuda").neg_()
                    return start, 0
                self._pinned[address + start] = wanted, self.device
                made += 1
        return whole, made

    def unpin(self, view: memoryview, left: int = 0) -> None:
        """Ends the registration of the pages of a mapping of which only the first bytes keep theirs."""
        if not self._pinned:
            return
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        with self._lock:
            for start in range(0, len(view), PINNED_PIECE):
                nbytes, _ = self._pinned.get(address + start, (0, 0))
                if nbytes and start + nbytes > left:
                    self._end(address + start)

    def _end(self, address: int) -> None:
        _, device = self._pinned.pop(address)
        with torch.cuda.device(device):
            _runtime().cudaHostUnregister(address)


def _runtime() -> Any:
    return cast("Any", torch.cuda).cudart()


@contextlib.contextmanager
def beside_graphs() -> Iterator[bool]:
    """Lets this thread use a GPU while another one captures a CUDA graph; yields whether that is possible.

    By default, a capture forbids all threads of the process calls that might wait for it, such as to register memory or
    to wait for an event, and fails itself if one tries to.
    """
    mode, driver = ctypes.c_int(_RELAXED), None
    # There is no such library if torch's GPUs are not NVIDIA's.
    with contextlib.suppress(OSError, AttributeError):
        found = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        if found(ctypes.byref(mode)) == 0:
            driver = found
    try:
        yield driver is not None
    finally:
        if driver is not None:
            # The call has left the former mode there.
            driver(ctypes.byref(mode))


#: If huge pages are slow, a caller that saves again within so many seconds does not wait for a piece of them.
_PAUSE_S = 0.25
#: The lowest priority.
_IDLE = 19
#: Interval at which the thread that pins a slot looks whether it is touched, seconds.
_LOOK_S = 0.05


class Capturer:
    """Takes, fills and prepares slots of one process' memory tier."""

    def __init__(self, tier: MemoryTier, pins: HostPins | None = None, clock: Clock = SYSTEM) -> None:
        """Takes an open tier.

        The tier reports ending mappings to ``pins``.
        """
        self._clock = clock
        self._tier = tier
        self._pins = pins or HostPins()
        self._preparing: threading.Thread | None = None
        self._stopped = threading.Event()

    def acquire(self, size: int, rules: Rules, *, spills: bool = False) -> Slot:
        """Does :func:`retention.acquire`; a slot that is prepared by now is taken."""
        self._stopped.set()
        return acquire(self._tier, size, rules, spills=spills)

    def fill(self, image: Image, slot: Slot, *, threads: int | None = None, hashed: bool = True) -> tuple[str, ...]:
        """Copies a planned file into a slot, and returns the hashes of its chunks, or none.

        The caller commits the slot, or gives it back. If the copy fails, the slot is given back here.
        """
        # Pages of a file on disk are written back, and not to be pinned.
        pin = None if self._tier.is_spilled(slot.path) else self._pins.pin
        untouched = None
        if slot.touched < image.size and is_plain(image.regions):
            untouched = Untouched(slot.descriptor, slot.touched)
        try:
            hashes = image.fill(slot.view, threads=threads, pin=pin, hashed=hashed, untouched=untouched)
        except BaseException:
            self._tier.give_back(slot)
            raise
        if untouched is None:
            slot.touched = max(slot.touched, image.size)
        return hashes

    def prepare(self, size: int, *, first: bool = False) -> None:
        """Makes a slot for the next file of this size, in the background; the next save takes it as far as it is made.

        The slot is pinned, too, if the state is on a GPU. If the thread that trains asks for the ``first`` one, before
        the first save, it is made at the lowest priority.
        """
        self._stopped.set()
        if self._tier.pool.is_prepared(size):
            # Retention has freed the slot of an earlier save, as it mostly has.
            return
        self._stopped = stopped = threading.Event()
        before = self._preparing

        def touch() -> None:
            if before is not None:
                # The thread was stopped, and ends after a piece.
                self._clock.join(before, self._clock.timing.space_wait_s)
            if first and sys.platform == "linux":
                # Training has the cores. Only Linux has a priority for one thread.
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _IDLE)
            if are_slow() and self._clock.wait(stopped, _PAUSE_S):
                return
            self._tier.pool.prepare(size, stopped.is_set)

        # If no thread is left for it, the next save takes its pages itself, and this one is there.
        with contextlib.suppress(OSError):
            self._preparing = touching = self._clock.start(touch, "tiered-prepare")
            device = self._pins.device
            if first and cast("Any", torch.cuda).is_initialized():
                device = torch.cuda.current_device()
            if device is not None:
                # A thread of ordinary priority: training may wait for a lock that this thread has in the GPU's driver.
                self._preparing = self._clock.start(lambda: self._pin(touching, size, stopped, device), "tiered-pin")

    def _pin(self, touching: threading.Thread, size: int, stopped: threading.Event, device: int) -> None:
        """Pins a slot that another thread touches, once it has."""
        while touching.is_alive() and not stopped.is_set():
            self._clock.join(touching, _LOOK_S)
        with torch.cuda.device(device), beside_graphs() as may:
            if may:
                self._tier.pool.prepare(size, stopped.is_set, self._pins.pin_piece)

    def close(self) -> None:
        """Ends background preparation."""
        self._stopped.set()
        if self._preparing is not None:
            self._clock.join(self._preparing, self._clock.timing.space_wait_s)
            self._preparing = None
