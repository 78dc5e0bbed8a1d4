"""Events that a training adds to the record of its node."""

from __future__ import annotations

from pathlib import Path

from tiered_checkpoint_io.engine.drain.events import note
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import TieredCheckpointError

#: How often the step that training has reached is noted: as often as metrics are asked for.
_STEP_EVERY_S = 15.0


class Recording:
    """The record of one training, by the first rank of each node; on the others it does nothing."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._noted = 0.0

    def begin(self, local_rank: int, step: int, session: Session) -> None:
        """Notes that training starts.

        Args:
            local_rank: Of this process on its node.
            step: From which training starts.
            session: The job's.
        """
        if local_rank != 0:
            return
        try:
            root = self._root = session.open().tier.root
        except TieredCheckpointError as error:
            # The first save meets it as well, and does what it has to do then.
            session.log.error("no metrics of this node: %s", error)
            return
        note(root, "start", clock=session.clock, step=step)

    def reach(self, step: int, session: Session) -> None:
        """Notes the step that training has reached, every few seconds; the same one while it is validated."""
        now = session.clock.monotonic()
        if self._root is not None and now - self._noted >= _STEP_EVERY_S:
            self._noted = now
            note(self._root, "step", clock=session.clock, step=step)

    def end(self, step: int, session: Session, error: BaseException | None = None) -> None:
        """Notes that training has ended, and by what."""
        if self._root is not None:
            why = type(error).__name__ if error is not None else ""
            note(self._root, "end", clock=session.clock, step=step, error=why)
        self._root = None
