"""Claims of a process for its launch: a dirpath of the durable tier, and the namespace on this node."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.durable.manifests import newest_save_id
from tiered_checkpoint_io.engine.leasing.keeper import LeaseKeeper
from tiered_checkpoint_io.engine.leasing.namespace_lock import NamespaceLock
from tiered_checkpoint_io.engine.ranks.local_run import current_run
from tiered_checkpoint_io.engine.ranks.world import current_rank, current_world_size
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import is_another_job, job_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store

#: Number of processes, each started by the one before, that are known to belong together.
_ANCESTORS = 32
#: Variable with a process's owner, so that child processes know that they belong to it.
_OWNER_VARIABLE = "TIERED_CHECKPOINT_OWNER"
#: Variable with that owner's job of the scheduler: a submitted job inherits its environment, but is another run.
_JOB_VARIABLE = "TIERED_CHECKPOINT_OWNER_JOB"
#: The owner of a process, by its id: a forked child has its parent's memory, but is another process.
_owners: dict[int, str] = {}
_NOT_LOOKED_UP = "could not look up the newest checkpoint; by a late clock, new ones may count as older: %s"


def owner_of_process(clock: Clock) -> str:
    """Returns this process's launch: a name of its own, after those of the processes that started it.

    Names of another job of the scheduler, which submitted this one, are left out. All ranks of one start have the same,
    by the store of torch.distributed. See :func:`node.are_one`.

    Raises:
        ConfigError: The store does not answer.
    """
    pid = os.getpid()
    job, recorded = job_of(os.environ), os.environ.get(_JOB_VARIABLE)
    is_submitted = recorded is not None and is_another_job(job, recorded)
    if pid not in _owners:
        inherited = "" if is_submitted else os.environ.get(_OWNER_VARIABLE, "")
        line = [*filter(None, inherited.split("/")), clock.token(8)]
        _owners[pid] = "/".join(line[-_ANCESTORS:])
    _owners[pid] = os.environ[_OWNER_VARIABLE] = current_run().first("owner", _owners[pid])
    if recorded is None or is_submitted:
        os.environ[_JOB_VARIABLE] = job
    return _owners[pid]


def launch_rank() -> int:
    """Returns this process' rank as its launcher says, if torch.distributed does not know it yet.

    Slurm counts all its tasks. They form one job if MASTER_ADDR is set.
    """
    names = ["RANK", "LOCAL_RANK", *(["SLURM_PROCID"] if os.environ.get("MASTER_ADDR") else [])]
    ranks = [os.environ.get(name, "") for name in names]
    return max((int(rank) for rank in ranks if rank.isdecimal()), default=0)


class Claims:
    """The lease and the namespace lock of one process, each taken when it is first needed.

    Attributes:
        newest: The newest save id on the durable tier, once a look before the first save there has found it.
    """

    def __init__(
        self,
        config: TieredCheckpointConfig,
        log: Logger,
        clock: Clock,
        *,
        root: Callable[[], Path],
        store: Callable[[], Store],
        in_time: Callable[[float], float],
        follows: Callable[[], bool] = lambda: False,
    ) -> None:
        """Claims nothing yet; ``in_time`` shortens waits, ``follows`` says if save ids sort after existing ones."""
        self._config = config
        self._log = log
        self._clock = clock
        self._root = root
        self._store = store
        self._in_time = in_time
        self._follows = follows
        self.newest: str | None = None
        #: The look for that id; None before it begins, and once all was given back.
        self._looking: object | None = None
        self._lease: LeaseKeeper | None = None
        self._met = 0
        self._namespace: NamespaceLock | None = None

    def claim(self, *, saves: bool = True) -> None:
        """Claims the dirpath for this launch, in the background; a repeated call looks at the result.

        The first call waits for the first look, which finds nearly every other run, for ``lease_first_look_s``, and
        ``durable_timeout_s`` at most. A rank other than 0 that torch.distributed does not know yet claims nothing.

        Args:
            saves: True if a save follows, which has to sort after the existing saves.

        Raises:
            ConfigError: Another live run writes there.
        """
        self.check()
        began = self._clock.monotonic()
        patience_s = self._in_time(min(self._clock.timing.lease_first_look_s, self._config.support.durable_timeout_s))
        is_new = self._lease is None
        if self._lease is None:
            if current_world_size() == 1 and launch_rank() > 0:
                return
            owner = owner_of_process(self._clock)
            lease = LeaseKeeper(self._store, self._config.namespace, self._log, owner=owner, clock=self._clock)
            try:
                lease.start()
            except OSError as error:
                # A failure here is no reason to stop training: the next save claims.
                self._log.warning("could not check whether another run uses this dirpath: %s", error)
                return
            self._lease = lease
        looking = self._look_for_newest() if saves else None
        self._lease.check(patience_s if is_new else 0.0)
        if looking is not None:
            self._clock.join(looking, max(0.0, began + patience_s - self._clock.monotonic()))

    def _look_for_newest(self) -> threading.Thread | None:
        """Begins the look, unless the newest id is known: with a clock that is behind, new saves would be older."""
        if self._looking is not None or self._follows():
            return None
        self._looking = look = object()
        try:
            return self._clock.start(lambda: self._ask_for_newest(look), "tiered-newest")
        except OSError as error:
            # The next save looks.
            self._looking = None
            self._log.warning(_NOT_LOOKED_UP, error)
            return None

    def _ask_for_newest(self, look: object) -> None:
        try:
            newest = newest_save_id(self._store())
        except Exception as error:
            if self._looking is look:
                self._log.warning(_NOT_LOOKED_UP, error)
            return
        if self._looking is look:
            self.newest = newest

    def check(self) -> None:
        """Looks at the result of the claim, if one was made; and, once, at the owner of this namespace's memory.

        Raises:
            ConfigError: Another live run writes to the same dirpath, or, on this node, another live job to the same
                namespace.
        """
        if self._namespace is None and current_rank() == 0 and (current_world_size() > 1 or launch_rank() == 0):
            self._namespace = self._lock_namespace()
        if self._lease is not None:
            self._lease.check()

    def look(self) -> None:
        """Looks whether the namespace's file, which names its owner, was removed: the next check makes it again."""
        namespace = self._namespace
        # The save raises other errors of memory.
        with contextlib.suppress(OSError):
            if namespace is not None and namespace.is_lost:
                namespace.close()
                if self._namespace is namespace:
                    self._namespace = None

    @property
    def owner(self) -> str | None:
        """The launch that this process claimed the dirpath for; None if it has claimed none."""
        return None if self._lease is None else self._lease.owner

    def met_others(self) -> bool:
        """Returns True if other runs may have saved to the dirpath since the last call."""
        met = 0 if self._lease is None else 1 + self._lease.met
        is_new, self._met = met != self._met, met
        return is_new

    def show(self) -> None:
        """Raises the error of :meth:`check`, if the lease has not raised it yet."""
        if self._lease is not None:
            self._lease.show()

    def release_lease(self) -> None:
        """Gives the lease back, within ``lease_close_s`` seconds."""
        if self._lease is not None:
            self._lease.close(self._in_time(self._clock.timing.lease_close_s))
            self._lease = None

    def close(self) -> None:
        """Gives lease and lock back."""
        # Other processes may save before this process' next save.
        self._looking, self.newest = None, None
        self.release_lease()
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None

    def _lock_namespace(self) -> NamespaceLock | None:
        try:
            root, owner = self._root(), owner_of_process(self._clock)
        except (OSError, TieredCheckpointError):
            # The save that follows fails for the same reason, and reports it.
            return None
        if not self._config.is_named:
            self._log.info("no namespace was given: checkpoints are in node memory under %s", root.name)
        return NamespaceLock(root, self._config.dirpath, owner, self._log, self._clock)
