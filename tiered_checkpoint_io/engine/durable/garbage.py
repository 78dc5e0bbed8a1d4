"""What is left on the durable tier of saves that never became complete, and will not."""

from __future__ import annotations

from collections.abc import Collection

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.engine.durable.files import paths_in
from tiered_checkpoint_io.engine.durable.manifests import Manifests, contents_of, if_intact
from tiered_checkpoint_io.engine.durable.removal import remove_save, remove_unnamed
from tiered_checkpoint_io.engine.durable.survey import Survey
from tiered_checkpoint_io.errors import CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA, Manifest, Part
from tiered_checkpoint_io.stores.base import ObjectInfo, Store
from tiered_checkpoint_io.stores.fallbacks import folders_of
from tiered_checkpoint_io.stores.refusals import Refusals


def collect(
    store: Store,
    committed: Part,
    *,
    patience_s: float,
    busy: Collection[str] = (),
    survey: Survey | None = None,
    clock: Clock = SYSTEM,
) -> list[tuple[str, str]]:
    """Removes what is left of older saves that never became complete.

    Those of the same run and series go at once, for these are committed in order; all others, which may have a
    coordinator of their own at work, once nothing of them has moved for a while.

    Args:
        store: Where.
        committed: The coordinator's part of the save that was committed just now.
        patience_s: How long other saves are left alone, seconds.
        busy: Names with saves under way, which may share files with their older ones: left alone.
        survey: What earlier calls found.
        clock: Tells which manifests may have changed again within the second of their last change.

    Returns:
        Id and name of the saves that are gone.

    Raises:
        CorruptCheckpointError: A manifest is damaged, so that it is not known which save it names. Nothing was removed.
        StoreError: The tier could not be asked, or refuses to remove some; all others are gone.
    """
    gone, refused = _collect(store, committed, patience_s, busy, survey or Survey(), clock)
    refused.raise_first()
    return gone


def _collect(
    store: Store, committed: Part, patience_s: float, busy: Collection[str], survey: Survey, clock: Clock
) -> tuple[list[tuple[str, str]], Refusals]:
    """What :func:`collect` gives, and what the server refuses."""
    gone: list[tuple[str, str]] = []
    refused = Refusals()
    # First these, then the manifests: a save that is committed in between is among those that they name.
    saves = sorted(save_id for save_id in folders_of(store, ids.SAVES_PREFIX) if ids.is_save_id(save_id))
    # Of what is gone from there, nothing need be known.
    survey.settled.intersection_update(saves)
    found = [save_id for save_id in saves if save_id < committed.save_id and save_id not in survey.settled]
    if not found:
        survey.settled.add(committed.save_id)
        return gone, refused
    manifests = _manifests(survey, store, clock)
    survey.settled |= {content.save_id for content in contents_of(manifests)}
    left = [save_id for save_id in found if save_id not in survey.settled]
    before = _time_of(store, committed) - patience_s if left else 0.0
    for save_id in left:
        objects = list(store.list(ids.save_prefix(save_id)))
        if not objects:
            # A directory keeps empty folders.
            survey.settled.add(save_id)
            continue
        try:
            part = _part_in(store, objects)
        except CorruptCheckpointError as error:
            if error.reason != "format":
                raise
            continue
        name = part.name if part is not None else ""
        if (_goes_at_once(part, committed) or _rests(objects, before)) and name not in busy:
            mine, switch = Manifests(store, committed.save_id), f"{name}/{METADATA}"
            found_now = [mine.current(name)] if name else []
            named = contents_of(
                each for each in [*found_now, *manifests] if each and name in (each.name, each.alias_of)
            )
            if any(content.save_id == save_id for content in named):
                # Committed since: a store that tells no times does not show that a manifest has changed.
                survey.settled.add(save_id)
                continue
            live = paths_in(store, named)
            if live is not None:
                refusals = len(refused)
                with refused.kept():
                    if name and switch not in live:
                        remove_unnamed(mine, name, switch)
                    remove_save(store, name, save_id, live, {switch: None})
                    gone.append((save_id, name))
                if len(refused) > refusals:
                    # It would be refused after each further save.
                    survey.settled.add(save_id)
    return gone, refused


def clear_up(
    store: Store,
    committed: Part,
    *,
    patience_s: float,
    busy: Collection[str],
    log: Logger,
    survey: Survey,
    clock: Clock,
) -> None:
    """:func:`collect` after a commit, which an error of it does not undo; logs what was removed."""
    try:
        gone, refused = _collect(store, committed, patience_s, busy, survey, clock)
    except TieredCheckpointError as error:
        # A manifest that can't be read stays so from save to save.
        if str(error) != survey.told:
            log.warning("could not remove what is left of incomplete saves: %s", error)
        survey.told = str(error)
        return
    if refused:
        log.warning("could not remove all that is left of incomplete saves: %s", refused[0])
    for save_id, name in gone:
        log.warning("save %s of %s never became complete: removed its objects", save_id, name)


def _manifests(survey: Survey, store: Store, clock: Clock) -> list[Manifest]:
    """All manifests; raises as :func:`collect`."""
    manifests = []
    for each in survey.manifests(store, clock).values():
        if isinstance(each, CorruptCheckpointError):
            raise each
        manifests.append(each)
    return manifests


def _time_of(store: Store, committed: Part) -> float:
    """When a save was committed, by the store's own clock."""
    return max((entry.modified for entry in store.list(ids.index_key(committed.save_id))), default=0.0)


def _goes_at_once(part: Part | None, committed: Part) -> bool:
    """Whether the save of a part can't become complete any more, now that another one is committed."""
    if part is None or ids.run_id_of(part.save_id) != ids.run_id_of(committed.save_id):
        return False
    return part.series_key._replace(place=committed.place) == committed.series_key


def _rests(objects: list[ObjectInfo], before: float) -> bool:
    """Whether none of these has changed since."""
    return max((entry.modified for entry in objects), default=0.0) < before


def _part_at(store: Store, key: str) -> Part:
    return Part.from_json(store.get(key), where=key)


def _part_in(store: Store, objects: list[ObjectInfo]) -> Part | None:
    """Returns a part of a save; None if no description is intact. Raises as :func:`if_intact`."""
    parts = (if_intact(_part_at, store, entry.key) for entry in objects)
    return next((part for part in parts if part is not None), None)
