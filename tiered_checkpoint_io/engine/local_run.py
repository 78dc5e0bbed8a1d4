"""What ranks agree on without waiting for each other: the run, and which checkpoint it begins with.

Ranks that save and load local checkpoints make no collective call. Yet all parts of one checkpoint need one
save id, and ranks must not resume from different ones. Both need a word that all have in common: whoever
comes first leaves it in the key-value store that torch.distributed was initialised with, and all others
find it there. That is one question to that store, answered at once; nobody waits for any other rank.

*Save ids.* At its first local save a process learns the id of the run. From it, a save's id follows from
what each rank knows by itself: the series of the name, the step, and how often the series has gone back to
a step that it had saved. So

- after a restart the store is a new one, and so are the run and all ids: parts of two starts never mix,
  even where both saved the same name at the same step. The run's id tells when it began, and is made behind
  all that its maker has seen, so that later starts count as newer;
- a name that is saved again gets another id, because its step does not grow: that is a repeat;
- a save that fails on one rank, or is skipped, does not put later ones out of step: nothing is counted;
- process groups that save side by side, in names of their own, are series of their own.

Steps may fall only together: a rank that goes back alone makes parts that no other has a part for.

*Loads.* The first to have found an intact file of its own leaves word which save it was. The others take
theirs of the same save.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

from tiered_checkpoint_io import ids
from tiered_checkpoint_io.errors import UsageError

_PREFIX = "tiered-checkpoint"
_numbers = itertools.count(1)


class Run:
    """One start of a job, as one process takes part in it."""

    def __init__(self, store: Any) -> None:
        """Takes the store that all ranks share; None for a process alone."""
        self.store = store
        #: Which start it is, in this process.
        self.number = next(_numbers)
        self._lock = threading.Lock()
        self._run_id: str | None = None
        self._saved: dict[tuple[str, str], tuple[int, int]] = {}
        self._loads: Counter[str] = Counter()

    def save_id(self, namespace: str, series: str, step: int, new_run_id: Callable[[], str]) -> str:
        """The id of a save that begins now; to be called once for each save.

        Args:
            namespace: The job's.
            series: Which saves belong together, see :func:`ids.series_of`.
            step: The training step; -1 where it is not known.
            new_run_id: Makes the id of a run, where this rank is the first.

        Raises:
            UsageError: The store could not be asked.
        """
        with self._lock:
            if self._run_id is None:
                # A launcher may keep one store over several attempts.
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                self._run_id = self.first(f"run/{attempt}", new_run_id())
            last, repeat = self._saved.get((namespace, series), (-1, 0))
            if step <= last or (step < 0 and (namespace, series) in self._saved):
                repeat += 1
            self._saved[namespace, series] = step, repeat
            return ids.save_id_of_ranks(self._run_id, f"{namespace}/{series}", repeat, step)

    def begin_load(self, what: str) -> str:
        """The key of a load that begins now: equal on all ranks that load the same as often."""
        with self._lock:
            self._loads[what] += 1
            return f"load/{self._loads[what]}/{what}"

    def chosen(self, load: str) -> str | None:
        """What the first rank has chosen to load; None where this one is the first so far."""
        if self.store is None:
            return None
        key = f"{_PREFIX}/{load}"
        return self._ask(lambda: self.store.get(key) if self.store.check([key]) else None)

    def choose(self, load: str, mine: str) -> str:
        """What all load: ``mine``, or what another rank has chosen before."""
        return self.first(load, mine)

    def first(self, key: str, mine: str) -> str:
        """The word that the first rank to ask for ``key`` has left: ``mine``, where that is this one.

        Raises:
            UsageError: The store could not be asked.
        """
        if self.store is None:
            return mine
        first = self._ask(lambda: self.store.compare_set(f"{_PREFIX}/{key}", "", mine))
        assert first is not None
        return first

    def _ask(self, question: Callable[[], bytes | None]) -> str | None:
        try:
            answer = question()
            return answer.decode() if answer is not None else None
        except Exception as error:
            raise UsageError(
                f"the store of torch.distributed can't be asked: {error}",
                operation="agree",
                hint="local checkpoints need it to name what ranks save together; is its host alive?",
            ) from error


_current: Run | None = None


def current_run() -> Run:
    """The run of this process: a new one where torch.distributed was initialised anew."""
    import torch.distributed as dist

    global _current
    store: Any = None
    if dist.is_available() and dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    if _current is None or _current.store is not store:
        _current = Run(store)
    return _current
