"""The run: this process's rank, the key-value store of torch.distributed, and the ids that all ranks derive from it.

*The store* answers at once, unless its host can't be reached: then torch's own client waits until the kernel gives the
connection up, a quarter of an hour later. So :class:`StoreClient` makes each request on a thread, with a bound, and the
caller does not wait for a late answer. A late answer ends the connection; the next request is made over another.

*Attempts of torchrun.* torchrun starts ranks again that have failed, or whose number changes, and may keep the store of
torch.distributed, with all its keys. A count of restarts is no name for an attempt: each agent counts for itself, and
the agent of a replacement node begins at 0. So the first rank names an attempt, and each rank enters itself there once.
A rank that finds itself entered is in a later attempt, and names that one. A rank that died before it had entered may
then join the attempt before the latest. That rank is refused as soon as it asks again: a rank whose attempt is not the
latest does not save, and names no other one.

*Agreement.* Ranks that save local checkpoints make no collective call. Yet all parts of one checkpoint need one save
id. So the first rank sets a key in the store, and all others get its value: one request, answered at once, without a
wait for another rank.

*Save ids.* At its first local save a process learns the id of the run. From it, a save's id follows from what each rank
knows by itself: the series of the name, the step, and how often the series has gone back to a step that it had saved.
So

- after a restart the store is a new one, or its keys are those of another attempt, and so are the run
  and all ids: parts of two starts never mix, even if both saved the same name at the same step. The run's id begins
  with the time, and sorts after all ids that its maker has seen, so that later starts count as newer;
- a name that is saved again gets another id, because its step does not grow: this counts as a repeat;
- a save that fails on one rank, or is skipped, does not put later ones out of step: each rank counts it before anything
  can fail;
- process groups that save under names of their own have series of their own.

All ranks must go back to an earlier step together: a rank that does so alone saves parts that match no others.

*Saves that miss a part.* Retention in memory sees one node's parts of a save. A rank that has no room there, or whose
save fails, sets a key for that save. The others get the key at their next save, before they remove older ones, and a
drain that waits for all parts gives up. If nothing fails, each save but the first gets one key.

*Synchronous saves.* The rank that saves shard 0 waits for the commit, and sets a key to its outcome. The others
look for that key once their own parts are uploaded. The keys of the last few saves stay, for ranks that are late.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from datetime import timedelta
from typing import Any, Literal, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids

#: Variables of launchers without LOCAL_RANK: a process's rank, and its rank within its node.
_LAUNCHERS = (
    ("SLURM_PROCID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"),
)


def current_rank() -> int:
    """Returns this process's rank; 0 without torch.distributed."""
    group = _initialized()
    return 0 if group is None else int(group.get_rank())


def current_world_size() -> int:
    """Returns the number of ranks; 1 without torch.distributed."""
    group = _initialized()
    return 1 if group is None else int(group.get_world_size())


def leads_node() -> bool:
    """Returns True for the first rank of a node, as its launcher says; without a launcher, only for rank 0."""
    said = os.environ.get("LOCAL_RANK")
    if said is not None:
        return said == "0"
    rank = current_rank()
    # A task's own child processes have its variables, but other ranks.
    names = [local for of_all, local in _LAUNCHERS if os.environ.get(of_all) == str(rank)]
    return rank == 0 or any(os.environ.get(local) == "0" for local in names)


def may_lead_node() -> bool:
    """Returns :func:`leads_node`, or True if no launcher says which ranks are on this node."""
    rank = str(current_rank())
    is_known = "LOCAL_RANK" in os.environ or any(os.environ.get(of_all) == rank for of_all, _ in _LAUNCHERS)
    return leads_node() or not is_known


def _initialized() -> Any:
    # Asked several times at each save. A process that has not imported it has no ranks.
    found: Any = sys.modules.get("torch.distributed")
    return found if found is not None and found.is_available() and found.is_initialized() else None


_T = TypeVar("_T")
#: Value that no key has; the store returns it for a key without a value, if this value was expected.
_NO_VALUE = "\0"
_PREFIX = "tiered-checkpoint"
#: Key of the newest attempt.
_ATTEMPT = "attempt"
#: Number of saves whose end a late rank may still ask for.
_MAX_ENDS = 16
_numbers = itertools.count(1)


class LeftBehindError(ConfigError):
    """Other ranks of the job were started again, and this one was not."""


class StoreClient:
    """A connection to the store, for many threads; requests raise ConfigError without an answer within a bound."""

    def __init__(self, origin: Any, prefix: str, *, timeout_s: float) -> None:
        self._origin = origin
        self._prefix = prefix
        self._timeout_s = timeout_s
        #: The client's own connection, because each call locks its connection; and the process that has made it.
        self._connection: tuple[int, Any] = 0, None

    def get(self, key: str) -> str | None:
        """Returns the value of a key; None if it has none."""
        # The store's own get waits for a key that is not there, also for one that is removed right after a look.
        found = self.swap(key, _NO_VALUE, _NO_VALUE)
        return found if found != _NO_VALUE else None

    def swap(self, key: str, expected: str, value: str) -> str:
        """Sets a key if it has the expected value; returns the value that it has then. No value may be empty."""
        found: bytes = self.ask(lambda store: store.compare_set(key, expected, value))
        return found.decode()

    def forget(self, key: str) -> None:
        """Removes a key that no rank needs any more; does nothing if the store can't, or does not answer."""
        with contextlib.suppress(ConfigError):
            self.ask(lambda store: store.delete_key(key))

    def ask(self, request: Callable[[Any], _T]) -> _T:
        """Returns the result of ``request``, a call that takes the store."""
        answer: Future[_T] = Future()

        def work() -> None:
            try:
                answer.set_result(request(self._connected()))
            except BaseException as error:
                answer.set_exception(error)

        try:
            # A daemon: a call without an answer must not keep the process alive.
            threading.Thread(target=work, name="tiered-store", daemon=True).start()
            return answer.result(self._timeout_s)
        except Exception as error:
            self.close()
            late = isinstance(error, LateError)
            why = f"no answer within {self._timeout_s:.0f} s" if late else str(error).partition("\n")[0]
            raise ConfigError(
                f"the store of torch.distributed can't be asked: {why}",
                operation="agree",
                hint="local checkpoints need it to name what ranks save together; is its host alive?",
            ) from error

    def close(self) -> None:
        """Ends the connection, until the next request."""
        self._connection = 0, None

    def _connected(self) -> Any:
        from torch.distributed import distributed_c10d

        # A forked child needs a connection of its own.
        process, store = self._connection
        if process != os.getpid():
            store = self._origin
            if hasattr(store, "clone"):
                store = store.clone()
                store.set_timeout(timedelta(seconds=self._timeout_s))
            store = distributed_c10d.PrefixStore(self._prefix, store)
            self._connection = os.getpid(), store
        return store


Where = Literal["memory", "durable"]


class Run:
    """One start of a job, as one process takes part in it.

    Its methods raise ``ConfigError`` if the store does not answer within a bound, or the job has gone on without it.
    """

    def __init__(self, store: Any, clock: Clock = SYSTEM) -> None:
        """Takes the store that all ranks share; None for a single process."""
        self.store = store
        self._clock = clock
        self._client = StoreClient(store, _PREFIX, timeout_s=clock.timing.store_answer_s)
        #: Number of the start, in this process.
        self.number = next(_numbers)
        self._lock = threading.Lock()
        self._token = clock.token(8)
        self._attempt: str | None = None
        self._run_id: str | None = None
        self._saved: dict[tuple[str, str], tuple[int, int]] = {}
        #: Saves whose end this rank has reported.
        self._ends: deque[str] = deque()

    def count_save(self, namespace: str, series: str, step: int) -> int:
        """Counts a save that begins now: returns how often its series has gone back to a step that it had saved.

        Call this once for each save, before anything that can fail on one rank: later saves' ids depend on the count.
        """
        with self._lock:
            last, repeat = self._saved.get((namespace, series), (-1, 0))
            if step <= last or (step < 0 and (namespace, series) in self._saved):
                repeat += 1
            self._saved[namespace, series] = step, repeat
            return repeat

    def save_id(self, namespace: str, series: str, step: int, repeat: int, new_run_id: Callable[[], str]) -> str:
        """Returns the id of a save; with the arguments of :meth:`count_save`.

        ``new_run_id`` makes the id of a run, if this rank is the first.
        """
        with self._lock:
            attempt = self.attempt
            if self._run_id is None:
                self._run_id = self.first(f"run/{attempt}", new_run_id())
            return ids.save_id_of_ranks(self._run_id, f"{namespace}/{series}", repeat, step)

    def report_missing(self, save_id: str, where: Where) -> None:
        """Reports to the other ranks that this rank's part is not in memory, or will not come to the durable tier."""
        self.first(_missing_key(save_id, where), "-")

    def lacking(self, save_ids: Iterable[str]) -> set[str]:
        """Returns the saves of which some node's memory has no part; to be asked when a later save begins.

        Ranks are at most one save apart: each has reported by then on all its parts except the last.
        """
        return {each for each in save_ids if self.is_missing(each, "memory")}

    def is_missing(self, save_id: str, where: Where) -> bool:
        """Returns True if some rank has reported that it has no part of a save."""
        return self.store is not None and self._client.get(_missing_key(save_id, where)) is not None

    def report_end(self, save_id: str, end: str) -> None:
        """Reports to the other ranks how the wait for a save's commit has ended: see :meth:`end_of`."""
        self.first(_end_key(save_id), end)
        if self.store is not None:
            self._ends.append(save_id)
            if len(self._ends) > _MAX_ENDS:
                self._client.forget(_end_key(self._ends.popleft()))

    def end_of(self, save_id: str) -> str | None:
        """Returns ``committed``, ``queued``, or the reason why a save is not durable; None while not known."""
        end = self._client.get(_end_key(save_id)) if self.store is not None else None
        if end is None and self.is_missing(save_id, "durable"):
            end = "a rank has no part of it for the durable tier: see that rank's log"
        return end

    def first(self, key: str, mine: str) -> str:
        """Returns the value that the first rank gave to ``key``: ``mine``, if that is this one."""
        return mine if self.store is None else self._client.swap(key, "", mine)

    @property
    def attempt(self) -> str:
        """This run's attempt, asked of the store each time; LeftBehindError if others are in a later one."""
        # The store of torchrun's agents is kept from one attempt to the next.
        if self.store is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True):
            return "0"
        if self._attempt is not None:
            newest = self._client.get(_ATTEMPT) or self._attempt
            if newest == self._attempt:
                return newest
            # The next process of this rank is to find that it was in that attempt.
            self._enter(newest)
            if self._run_id is not None:
                raise LeftBehindError(
                    "other ranks of this job were restarted, and this one was not",
                    operation="agree",
                    rank=current_rank(),
                    hint="end this process: torchrun starts all ranks again once one has ended",
                )
            # That attempt has no run yet.
            self._attempt, self._token = None, self._clock.token(8)
        named = ""
        while self._attempt is None:
            named = self._client.swap(_ATTEMPT, named, self._token)
            if self._enter(named):
                self._attempt = named
        return self._attempt

    def _enter(self, attempt: str) -> bool:
        """Enters this rank into an attempt; returns False if an earlier process of this rank was in it.

        An answer may have been lost: a process that asks again has the same token.
        """
        return self._client.swap(f"{_ATTEMPT}/{attempt}/{current_rank()}", "", self._token) == self._token

    def close(self) -> None:
        """Ends the connection to the store, until the next request."""
        self._client.close()


def _missing_key(save_id: str, where: Where) -> str:
    return f"missing/{where}/{save_id}"


def _end_key(save_id: str) -> str:
    return f"end/{save_id}"


_current: Run | None = None


def current_run() -> Run:
    """Returns the run of this process: a new one if torch.distributed was initialised again."""
    import torch.distributed as dist

    global _current
    store: Any = None
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    if _current is None or _current.store is not store:
        if _current is not None:
            _current.close()
        _current = Run(store)
    return _current
