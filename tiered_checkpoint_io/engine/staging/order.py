"""The order of one process's saves: their ids, one turn at a time, and ends that run during training."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.errors import ConfigError, DrainError, SaveError
from tiered_checkpoint_io.logs import Logger
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

        Raises:
            ConfigError: This thread has a turn: a signal handler saves while it interrupts a save.
            SaveError: Another thread's turn has not ended within the bound.
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
        """Runs ``work``, the rest of the save of ``name``, after the work that runs already.

        Returns:
            Its result, or the exception that it raised, which the caller is to show.
        """
        self.wait()
        return self._submit(name, work)

    def after(self, name: str, work: Callable[[], None], *, needs: str = "") -> None:
        """Does something with ``name`` after the running work; at once if none runs. :meth:`show` shows its failure.

        Args:
            name: A checkpoint's name.
            work: Work to do. If the last durable save is :attr:`lost`, it waits for the next; see :meth:`saved`.
            needs: A name: if the save of that name is lost, the work is not done at all.
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

        Args:
            name: Its own; work on an earlier checkpoint of that name is not done any more.
            durable: True if it goes to the durable tier.
        """
        self._put_off.pop(name, None)
        if durable:
            self.lost.clear()
            due, self._put_off = self._put_off, {}
            self._followers.extend(self._submit(each, work) for each, work in due.items())

    def show(self) -> None:
        """Waits for the running work; on its own thread, looks at the work that has ended.

        Raises:
            Exception: Work :meth:`after` a task has failed.
            DrainError: The work has not ended in time.
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
        """Waits for the running work, however it ends; does nothing on its own thread.

        Raises:
            DrainError: The work has not ended in time.
        """
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

        Args:
            clock: When a run begins.
            log: Logger to use.
            held: Ids in this node's memory.
            learnt: The newest id on the durable tier, once another thread knows it.
            met_others: True if other runs may have saved since the last call.
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
