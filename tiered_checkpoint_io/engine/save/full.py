"""Saving a full checkpoint: one rank has the whole state.

The state is captured before a save returns; or, if :mod:`overlap` allows that, on a background task during training.
"""

from __future__ import annotations

from typing import Any

from tiered_checkpoint_io.engine.drain.status import SaveReport
from tiered_checkpoint_io.engine.ranks.run import current_rank
from tiered_checkpoint_io.engine.save.facts import SaveFacts, admit, alone, position, skip
from tiered_checkpoint_io.engine.save.overlap import FOUND_CHANGED, ChangedError, Overlap, Overlapped, say_eager
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.engine.staging.retention import all_complete
from tiered_checkpoint_io.engine.trust import warn_at_first_save
from tiered_checkpoint_io.errors import ConfigError, DrainError
from tiered_checkpoint_io.formats.torch_file import plan
from tiered_checkpoint_io.memory.node import MemoryFullError
from tiered_checkpoint_io.model.manifest import Metric


class FullSaver:
    """Saves full checkpoints of one process.

    Attributes:
        overlap: Captures that may continue after a save has returned; None if all end before.
    """

    def __init__(self, session: Session) -> None:
        """Takes the tiers."""
        self._session = session
        #: Errors of saves that were left to the background.
        self._errors: list[Exception] = []
        self.overlap: Overlap | None = None
        self._has_looked = False
        self._why_eager = "only a Trainer of Lightning's, while it fits, waits for it at optimizer steps"

    def save(
        self,
        state: Any,
        name: str,
        *,
        durable: bool,
        wait: bool,
        metric: tuple[str, float] | None,
        resumable: bool,
    ) -> SaveReport | None:
        """Saves a state: see :meth:`Checkpointer.save`."""
        session, started = self._session, self._session.clock.monotonic()
        with session.turn.taken(name):
            try:
                self.show()
            except DrainError as error:
                # The background work has exceeded its bound: this save can't wait longer.
                self._failed(name, position(state, name)[0], error)
                return None
            # A save whose rest is left to the background looks there, if it comes so far: see :meth:`_complete`.
            looks, self._has_looked = self.overlap is None or not self._has_looked, False
            session.surface(looks=looks)
            session.claims.check()
            if durable and current_rank() == 0:
                session.claims.claim()
        rated, facts = Metric(*metric) if metric is not None else None, None
        try:
            with session.turn.taken(name):
                # Another thread may have had the turn meanwhile.
                session.background.wait()
                rank = current_rank()
                facts = alone(session, name, state, rank=rank, durable=durable, metric=rated, resumable=resumable)
                facts = admit(session, facts)
                part = PartSave(session, facts, rank, None, started=started)
                overlap = None if wait and part.facts.durable else self._find_overlap()
                part.image = plan(state)
                part.reserve()
                if overlap is not None:
                    self._begin(part, overlap)
                    if part.overlapped is not None:
                        return self._leave(part)
                part.fill()
                self._complete(part)
            waited = wait and part.wait()
        except ConfigError:
            raise
        except Exception as error:
            self._failed(name, position(state, name)[0], error, facts)
            return None
        with session.turn.taken(name):
            return part.report(waited=waited)

    def _complete(self, part: PartSave) -> None:
        """Seals the captured part."""
        session = self._session
        if self.overlap is not None:
            # Before this save has an outcome of its own, which is logged by the caller that waits for it.
            self._has_looked = True
            session.look()
        part.seal()
        assert part.image is not None
        warn_at_first_save(session, session.config, session.log, part.facts.name, part.image)
        # Before the next save's slot is prepared: a part that goes may free that slot.
        self._retain(part)
        part.prepare_next()
        session.background.saved(part.facts.name, durable=part.facts.durable)

    def _retain(self, part: PartSave) -> None:
        """Removes parts that memory need not keep, after the new part is there; other saves do so before a capture."""
        held = self._session.open().tier.parts()
        evidence = all_complete(held, part.facts.scope(part.rank, self._session.place))
        part.retain(held, self._session.config.memory_keep_last, evidence)

    def _failed(self, name: str, step: int, error: Exception, facts: SaveFacts | None = None) -> None:
        session = self._session
        if isinstance(error, MemoryFullError) and facts is not None:
            skip(session, facts, error)
        else:
            session.failed(name, step, error)

    # ------------------------------------------------------------------------------- overlapped
    def _find_overlap(self) -> Overlap | None:
        if self.overlap is None:
            say_eager(self._session, self._why_eager)
        return self.overlap

    def _begin(self, part: PartSave, overlap: Overlap) -> None:
        """Begins an overlapped capture of a part that has its slot, unless the capture is to be eager."""
        try:
            assert part.image is not None
            begun = overlap.begin(part.image) if part.image.planned else None
            if begun is not None:
                part.image, part.overlapped = begun
        except BaseException:
            part.give_back()
            raise

    def _leave(self, part: PartSave) -> SaveReport:
        overlapped, session = part.overlapped, self._session
        assert overlapped is not None
        try:
            overlapped.stall_s = session.clock.monotonic() - part.started
            overlapped.made = session.last_save = report = part.make_report()
            session.background.run(part.facts.name, lambda: self._finish(part, overlapped))
        except BaseException:
            overlapped.copied.set()
            part.give_back()
            raise
        return report

    def _finish(self, part: PartSave, overlapped: Overlapped) -> None:
        """Captures the rest and seals it, in the background; a caller that needs either of them waits for it."""
        facts = part.facts
        try:
            overlapped.let_caller_return()
            part.fill_beside(overlapped)
            self._complete(part)
            part.report()
        except Exception as error:
            if facts.durable:
                self._session.background.lost.add(facts.name)
            if isinstance(error, ChangedError):
                # A state that changed once will change again.
                self.overlap, self._why_eager = None, FOUND_CHANGED
            try:
                try:
                    self._failed(facts.name, facts.step, error, facts)
                finally:
                    part.give_back()
            except Exception as shown:
                # A caller whose wait for it failed has raised.
                self._errors += [] if overlapped.is_late else [shown]
        finally:
            # The copies may be as large as a third of the state, and the next save makes its own.
            overlapped.copies = {}
            overlapped.copied.set()

    def show(self) -> None:
        """Waits for all background work.

        Raises:
            SaveError: The work has failed, and ``on_save_error`` is ``raise``.
            DrainError: The work has not ended in time.
        """
        background = self._session.background
        background.wait()
        errors, self._errors = self._errors, []
        for error in errors:
            raise error
        background.show()
