"""The asynchronous saves of this process, and their failures, each shown once."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from tiered_checkpoint_io.adapters.groups import ranks_of
from tiered_checkpoint_io.engine.drain.status import say_outcome
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import DrainError, SaveError
from tiered_checkpoint_io.model import ids

#: Number of ended saves that are kept for a caller that may ask for them.
_KEPT = 32


class AsyncSave(Future[Any]):
    """A future of one save: done once the checkpoint is durable, or in memory if it is memory-only.

    Args:
        session: This process's session of the job.
        name: The checkpoint's name.
        step: Its training step; -1 if it is not known.
        groups: The groups that take part in the save: process groups, or global ranks.

    Attributes:
        name: The checkpoint's name.
        step: Its training step; -1 if it is not known.
        groups: The global ranks of each group that takes part in the save, sorted.
        shown: True if its failure, if any, was logged, raised, or returned.
    """

    def __init__(self, session: Session, name: str, step: int, groups: tuple[Any, ...] = ()) -> None:
        super().__init__()
        self.name = name
        self.step = step
        self.groups = tuple(map(ranks_of, groups))
        self.shown = False
        self._session = session
        # The save continues even if its waiter is cancelled, as asyncio does.
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Waits for the save's end, and returns its result.

        Args:
            timeout: Seconds to wait; None for as long as it takes, which ``wait_timeout_s`` bounds.

        Raises:
            SaveError: The checkpoint did not reach a tier.
            TimeoutError: The save has not ended within ``timeout``.
        """
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the failure of the save, once it has ended; None if there is none."""
        error = super().exception(timeout)
        self.shown |= error is not None
        return error

    @property
    def bound_s(self) -> float:
        """Seconds to wait for it: the save ends by ``wait_timeout_s`` itself, and reports a little later."""
        return float(self._session.config.support.wait_timeout_s) + self._session.clock.timing.future_slack_s

    def follow(self, sealing: Future[str | None] | None, op_id: str | None, value: Any) -> None:
        """Ends, with ``value`` or an error, once this rank's part is sealed and the drain's operation has ended.

        ``sealing`` is the task that seals the part and returns the operation; ``op_id`` is that of a sealed part.
        """
        if sealing is None and op_id is None:
            self.set_result(value)
            return

        def wait() -> None:
            try:
                uploads = op_id if sealing is None else sealing.result(self._session.config.support.wait_timeout_s)
                if uploads is not None:
                    self._wait_for(uploads)
                self.set_result(value)
            except BaseException as error:
                self.set_exception(error)

        threading.Thread(target=wait, name="tiered-async-save", daemon=True).start()

    def _wait_for(self, op_id: str) -> None:
        session = self._session
        outcome = session.open().drain.wait(op_id, float(session.config.support.wait_timeout_s))
        if outcome.state != "committed":
            given_up = "it is given up, and not tried again"
            raise SaveError(
                f"{self.name} did not reach the durable tier: {outcome.error}",
                operation="save",
                tier="durable",
                key=session.dirpath,
                step=ids.known(self.step),
                hint=given_up if outcome.state == "skipped" else "it stays in node memory and is tried again",
            )
        say_outcome(session.log, outcome, session.config)

    def show(self) -> SaveError | None:
        """Logs and counts a failure that was not shown yet; returns it if ``on_save_error`` is ``raise``."""
        error = super().exception(0) if self.done() and not self.shown else None
        if error is None:
            return None
        self.shown = True
        failure = error if isinstance(error, Exception) else SaveError(str(error), operation="save")
        try:
            # The rank that it began on has noted it there, or its drain has.
            self._session.failed(self.name, self.step, failure, shared=True)
        except SaveError as raised:
            return raised
        return None


_lock = threading.Lock()
_saves: list[AsyncSave] = []


def register(save: AsyncSave) -> None:
    """Takes note of a save that has begun."""
    with _lock:
        _saves.append(save)
        ended = [each for each in _saves if each.done()]
        for each in ended[: max(0, len(ended) - _KEPT)]:
            _saves.remove(each)


def show_failures() -> None:
    """Shows failures of saves that have ended, each once; raises the first if ``on_save_error`` is ``raise``."""
    with _lock:
        saves = list(_saves)
    _show(saves)


def _show(saves: Iterable[AsyncSave]) -> None:
    # All are logged and counted, one can be raised.
    failures = [failure for save in saves if (failure := save.show()) is not None]
    if failures:
        raise failures[0]


def was_shown(error: BaseException | None) -> None:
    """Takes note that this failure was shown."""
    with _lock:
        for save in _saves:
            save.shown |= error is not None and save.done() and Future.exception(save) is error


def maybe_finalize_async_calls(blocking: bool = False, process_group: Any = None) -> list[AsyncSave]:
    """Collects the asynchronous saves of this process that have ended, and shows each failure once.

    Args:
        blocking: True to wait for the others, each within the ``wait_timeout_s`` of its configuration.
        process_group: Only saves in which these ranks took part, as process group or replication group: a process
            group, or global ranks. None for all saves.

    Returns:
        The saves that have ended since the last call, in the order of their beginning.

    Raises:
        SaveError: A save failed, and ``on_save_error`` is ``raise``.
        DrainError: A save has not ended in time.
    """
    ranks = None if process_group is None else ranks_of(process_group)
    with _lock:
        mine = [save for save in _saves if ranks is None or ranks in save.groups]
    if blocking and mine:
        bound = max(save.bound_s for save in mine)
        _, late = concurrent.futures.wait(mine, bound)
        if late:
            names = ", ".join(sorted(save.name for save in mine if save in late))
            raise DrainError(f"saves have not ended within {bound:.0f} s: {names}", operation="finalize")
    ended = [save for save in mine if save.done()]
    with _lock:
        _saves[:] = [save for save in _saves if save not in ended]
    _show(ended)
    return ended
