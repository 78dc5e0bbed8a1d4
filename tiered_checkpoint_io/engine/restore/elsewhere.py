"""Owner of a file: the run at any folder above the file may have saved it. Only that run's manifest can verify it.

A search looks at one dirpath. If neither its tier nor memory knows the name there, and a run at another dirpath has
saved the file, all ranks search once more, at that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.model.manifest import reservation_in
from tiered_checkpoint_io.stores.base import Store

#: Number of folders above a file that are asked for its manifest.
_MOST_FOLDERS = 16


class Elsewhere(Exception):  # noqa: N818 - no failure: names the dirpath to use
    """Signal that the wanted checkpoint belongs to another dirpath; raised on rank 0, for all."""

    def __init__(self, split: ids.Split) -> None:
        super().__init__(split)
        self.split = split


def other_names(place: Place, name: str) -> Mapping[tuple[Place, str], ids.Split]:
    """Returns the other places at which a run may have saved the file of a checkpoint, the nearest to it first."""
    splits = ids.splits(ids.join_url(place.dirpath, name))
    return {(Place(each.dirpath, place.server), each.name): each for each in splits if each.dirpath != place.dirpath}


def committed_elsewhere(store_at: Callable[[str], Store], others: Iterable[ids.Split]) -> ids.Split | None:
    """Returns the nearest of some places that has a manifest.

    Raises:
        StoreError: The durable tier could not be read.
    """
    places = list(others)[:_MOST_FOLDERS]
    if not places:
        return None
    # One store asks for all places, so that one connection does.
    outermost = places[-1]

    def is_there(split: ids.Split) -> bool:
        above = outermost.name.removesuffix(split.name)
        try:
            return not reservation_in(store.get(above + ids.manifest_key(split.name)))
        except TieredCheckpointError as error:
            # Rights often end at a folder: if its manifests can't be read, its checkpoints can't be verified.
            if error.retryable:
                raise
            return False

    try:
        store = store_at(outermost.dirpath)
    except TieredCheckpointError:
        return None
    return next((each for each, there in zip(places, in_parallel(is_there, places), strict=True) if there), None)
