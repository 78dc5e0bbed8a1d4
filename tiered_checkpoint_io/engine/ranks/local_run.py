"""Agreement of ranks that don't wait for each other: the run's id.

Ranks that save local checkpoints make no collective call. Yet all parts of one checkpoint need one save id. So the
first rank sets a key in the key-value store of torch.distributed, and all others get its value: one request, answered
at once, without a wait for another rank.

*Save ids.* At its first local save a process learns the id of the run. From it, a save's id follows from what each rank
knows by itself: the series of the name, the step, and how often the series has gone back to a step that it had saved.
So

- after a restart the store is a new one, or its keys are those of another attempt (see ``attempt``), and so are the run
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
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.ranks.attempt import LeftBehindError, check, enter, outlives_attempts
from tiered_checkpoint_io.engine.ranks.store_client import PeerError, StoreClient
from tiered_checkpoint_io.engine.ranks.world import current_rank
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids

_PREFIX = "tiered-checkpoint"
#: Number of saves whose end a late rank may still ask for.
_MAX_ENDS = 16
_numbers = itertools.count(1)

Where = Literal["memory", "durable"]
_T = TypeVar("_T")


class Run:
    """One start of a job, as one process takes part in it.

    Its methods raise ``ConfigError`` if the store does not answer within a bound, or the job has gone on without it.
    """

    def __init__(self, store: Any, clock: Clock = SYSTEM) -> None:
        """Takes the store that all ranks share, None for a single process; and the clock with the bound."""
        self.store = store
        self._clock = clock
        #: Client of the requests, in the process of that id.
        self._client: tuple[int, StoreClient] | None = None
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

        Args:
            namespace: The job's.
            series: Key of the saves that belong together, see :func:`ids.series_of`.
            step: The training step; -1 if it is not known.
        """
        with self._lock:
            last, repeat = self._saved.get((namespace, series), (-1, 0))
            if step <= last or (step < 0 and (namespace, series) in self._saved):
                repeat += 1
            self._saved[namespace, series] = step, repeat
            return repeat

    def save_id(self, namespace: str, series: str, step: int, repeat: int, new_run_id: Callable[[], str]) -> str:
        """Returns the id of a save; with the arguments of :meth:`count_save`.

        Args:
            namespace: The job's.
            series: Key of the saves that belong together.
            step: The training step.
            repeat: Result of :meth:`count_save`.
            new_run_id: Makes the id of a run, if this rank is the first.
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
        return {each for each in save_ids if self._get(_missing_key(each, "memory")) is not None}

    @contextlib.contextmanager
    def watching(self, save_id: str, log: Logger, clock: Clock) -> Iterator[Callable[[], bool]]:
        """Returns a block that learns, during training, if some part of a save will not come to the durable tier.

        If the store does not answer within a bound, this warns once, and no save counts as given up.
        """
        client: StoreClient | None = None
        if self.store is not None:
            client = StoreClient(self.store, _PREFIX, timeout_s=clock.timing.store_answer_s)

        def is_given_up() -> bool:
            nonlocal client
            try:
                return client is not None and client.get(_missing_key(save_id, "durable")) is not None
            except PeerError as error:
                log.warning("could not ask whether a save was given up: %s", error)
                client = None
                return False

        try:
            yield is_given_up
        finally:
            if client is not None:
                client.close()

    def report_end(self, save_id: str, end: str) -> None:
        """Reports to the other ranks how the wait for a save's commit has ended: see :meth:`end_of`."""
        self.first(_end_key(save_id), end)
        if self.store is not None:
            self._ends.append(save_id)
            if len(self._ends) > _MAX_ENDS:
                self._ask(lambda client: client.forget(_end_key(self._ends.popleft())))

    def end_of(self, save_id: str) -> str | None:
        """Returns ``committed``, ``queued``, or the reason why a save is not durable; None while not known."""
        end = self._get(_end_key(save_id))
        if end is None and self._get(_missing_key(save_id, "durable")) is not None:
            end = "a rank has no part of it for the durable tier: see that rank's log"
        return end

    def first(self, key: str, mine: str) -> str:
        """Returns the value that the first rank gave to ``key``: ``mine``, if that is this one."""
        if self.store is None:
            return mine
        return self._ask(lambda client: client.swap(key, "", mine))

    def _get(self, key: str) -> str | None:
        return self._ask(lambda client: client.get(key)) if self.store is not None else None

    @property
    def attempt(self) -> str:
        """The name of this run's attempt, see :mod:`attempt`; asked of the store each time.

        Raises:
            LeftBehindError: Other ranks were started again, and this rank is of an earlier attempt.
        """
        if self.store is None or not outlives_attempts():
            return "0"
        if self._attempt is not None:
            token, named = self._token, self._attempt
            try:
                self._ask(lambda client: check(client, current_rank(), token, named))
            except LeftBehindError:
                if self._run_id is not None:
                    raise
                # That attempt has no run yet.
                self._attempt, self._token = None, self._clock.token(8)
        if self._attempt is None:
            self._attempt = self._ask(lambda client: enter(client, current_rank(), self._token))
        return self._attempt

    def close(self) -> None:
        """Ends the connection to the store, until the next request."""
        if self._client is not None and self._client[0] == os.getpid():
            self._client[1].close()

    def _ask(self, question: Callable[[StoreClient], _T]) -> _T:
        if self._client is None or self._client[0] != os.getpid():
            # A forked child has none of its parent's threads.
            client = StoreClient(self.store, _PREFIX, timeout_s=self._clock.timing.store_answer_s)
            self._client = os.getpid(), client
        try:
            return question(self._client[1])
        except PeerError as error:
            raise ConfigError(
                f"the store of torch.distributed does not answer: {error.message}",
                operation="agree",
                hint="local checkpoints need it to name what ranks save together; is its host alive?",
            ) from error


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
