"""The way of a part for which neither memory nor the spill has room: from the live state to the durable tier.

The save blocks: it waits until the drain of this node has done with the checkpoint's name, sends the part by the same
steps as the drain, and, where the part is the coordinator's, waits for the others and commits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.durable.arrivals import Arrivals
from tiered_checkpoint_io.engine.durable.commit import commit, put_part
from tiered_checkpoint_io.engine.durable.garbage import clear_up
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.index import IndexRow
from tiered_checkpoint_io.model.manifest import Part
from tiered_checkpoint_io.stores import UploadContent

#: Tells, while the block runs, whether some part of the save will not come.
Watching = Callable[[], contextlib.AbstractContextManager[Callable[[], bool]]]


def nothing_missing() -> contextlib.AbstractContextManager[Callable[[], bool]]:
    """A :data:`Watching` where ranks can't say that a part will not come."""
    return contextlib.nullcontext(lambda: False)


class _Journal:
    """What an upload notes of itself; no other process resumes this one, for what it uploads dies with the process."""

    def __init__(self) -> None:
        self._state: dict[str, object] | None = None

    def read(self) -> dict[str, object] | None:
        return self._state

    def write(self, state: dict[str, object]) -> None:
        self._state = state

    def clear(self) -> None:
        self._state = None


class Stream:
    """One part on its way from this process to the durable tier: sent, and then, by the coordinator's, committed."""

    def __init__(self, session: Session, part: Part, watching: Watching) -> None:
        """Takes the part.

        Args:
            session: Both tiers.
            part: Its description.
            watching: Asked while the parts of other ranks are waited for.
        """
        self._session = session
        self._part = part
        self._watching = watching
        self._journal = _Journal()

    def send(self, files: Mapping[str, UploadContent]) -> None:
        """Sends the files, by basename, and the description; of a checkpoint of one part, :meth:`commit` does.

        Raises:
            SaveError: A later save has taken the name.
            DrainError: The drain has not finished earlier saves of the name within ``wait_timeout_s``.
            StoreError, TieredCheckpointError: The durable tier refused it.
        """
        session, part = self._session, self._part
        timeout_s = float(session.config.support.wait_timeout_s)
        session.open().drain.make_way(part.name, part.save_id, timeout_s, session.save_ids.next)
        if part.content.parts > 1:
            self._check(put_part(session.durable(), part, files, journal=self._journal, clock=session.clock))

    def commit(self, files: Mapping[str, UploadContent]) -> None:
        """Waits for the parts of all other ranks, and commits; does nothing for a part that is not the coordinator's.

        Raises:
            SaveError: The other parts will not come, or have not within ``wait_timeout_s``; or a later save has taken
                the name.
            StoreError, TieredCheckpointError: The durable tier refused it.
        """
        session, part = self._session, self._part
        if not part.commits:
            return
        (tier, _, drain), store = session.open(), session.durable()
        rows = self._await_others() if part.content.parts > 1 else None
        self._check(commit(store, part, files, rows, journal=self._journal, clock=session.clock))
        if rows is not None:
            # What waits on this node may still become complete.
            busy = {stored.part.name for stored in tier.parts() if stored.pending}
            patience_s = float(session.config.support.wait_timeout_s)
            survey, clock = session.survey, session.clock
            clear_up(store, part, patience_s=patience_s, busy=busy, log=session.log, survey=survey, clock=clock)
        name, content = part.name, part.content
        done = Outcome(
            part.save_id,
            "save",
            name,
            content.step,
            "committed",
            bytes=content.size,
            dirpath=part.dirpath,
            server=part.server,
            series=part.series,
        )
        # The save itself says that it is durable.
        drain.skip(done)
        has_deletes = True
        try:
            has_deletes = any(each.action == "delete" for each in drain.queue.requests())
            drain.queue.finish(done)
        except OSError as error:
            if has_deletes:
                session.log.warning("deletes that wait for %s may stay undone: %s", name, error)

    def _await_others(self) -> dict[int, IndexRow]:
        clock, timeout_s = self._session.clock, self._session.config.support.wait_timeout_s
        arrivals, store = Arrivals(self._part), self._session.durable()
        end, pause = clock.monotonic() + timeout_s, clock.timing.gather_first_s
        with self._watching() as is_hopeless:
            while True:
                # Asked first: what arrived before another rank gave up is not lost.
                gives_up = is_hopeless()
                arrivals.look(store)
                missing = arrivals.missing
                if not missing:
                    return arrivals.rows
                if gives_up or clock.monotonic() >= end:
                    named = ", ".join(map(str, missing[:16]))
                    why = "are not there, and some were given up" if gives_up else f"have not come within {timeout_s} s"
                    raise self._refused(
                        f"the parts of {len(missing)} of {self._part.content.parts} ranks {why}: {named}",
                        "see the logs of those ranks and of the drains of their nodes",
                    )
                clock.sleep(pause)
                pause = min(clock.timing.gather_max_s, 2 * pause)

    def _check(self, fate: str) -> None:
        if fate == "replaced":
            raise self._refused("a later save has taken its name", "give each save a name of its own")

    def _refused(self, what: str, hint: str) -> SaveError:
        part = self._part
        return SaveError(
            what,
            operation="commit",
            tier="durable",
            key=ids.join_url(part.dirpath, part.name),
            rank=part.rank,
            step=part.content.step,
            hint=hint,
        )
