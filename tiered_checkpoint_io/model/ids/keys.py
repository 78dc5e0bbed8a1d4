"""Keys on the durable tier."""

from __future__ import annotations

from collections.abc import Iterable

from tiered_checkpoint_io.model.ids.order import rank_folder, rank_of

#: The prefix of all our objects on the durable tier, besides the checkpoints themselves.
META_PREFIX = ".tiered/"
MANIFEST_PREFIX = META_PREFIX + "manifests/"
SAVES_PREFIX = META_PREFIX + "saves/"
#: The run that writes to the dirpath: see :mod:`lease`.
LEASE_KEY = META_PREFIX + "lease.json"
HOLDS_PREFIX = META_PREFIX + "holds/"
#: Small objects that are written, read and deleted to see whether that is possible.
PREFLIGHT_PREFIX = META_PREFIX + "preflight/"

#: End of a manifest's key, after the checkpoint's name.
MANIFEST_SUFFIX = ".json"
_PART_SUFFIX = ".json"
_INDEX = "index.json"
#: Number of a rank's digits that end its key in a listing of one prefix: a page of S3 has 1,000 keys.
_PAGE_DIGITS = 3


def manifest_key(name: str) -> str:
    """Returns ``.tiered/manifests/<name>.json``: exists if and only if the checkpoint exists."""
    return f"{MANIFEST_PREFIX}{name}{MANIFEST_SUFFIX}"


def name_from_manifest_key(key: str) -> str | None:
    """Returns the inverse of :func:`manifest_key`; None for a key that is not a manifest's."""
    if not (key.startswith(MANIFEST_PREFIX) and key.endswith(MANIFEST_SUFFIX)):
        return None
    return key[len(MANIFEST_PREFIX) : -len(MANIFEST_SUFFIX)] or None


def save_prefix(save_id: str) -> str:
    """Returns ``.tiered/saves/<save_id>/``: the prefix of a save's index and descriptions."""
    return f"{SAVES_PREFIX}{save_id}/"


def index_key(save_id: str) -> str:
    """Returns ``.tiered/saves/<save_id>/index.json``: the files of all parts; written after all descriptions."""
    return save_prefix(save_id) + _INDEX


def description_key(save_id: str, rank: int) -> str:
    """Returns ``.tiered/saves/<save_id>/rank-00003.json``: put once all files of the part are there."""
    return f"{save_prefix(save_id)}{rank_folder(rank)}{_PART_SUFFIX}"


def rank_of_description(key: str) -> int | None:
    """Returns the rank of :func:`description_key`; None for another key."""
    return rank_of(key.rpartition("/")[2].removesuffix(_PART_SUFFIX)) if key.endswith(_PART_SUFFIX) else None


def description_prefixes(save_id: str, ranks: Iterable[int]) -> list[str]:
    """Prefixes below which the descriptions of these ranks lie, at most 1,000 below each."""
    return sorted({save_prefix(save_id) + rank_folder(rank)[:-_PAGE_DIGITS] for rank in ranks})


def hold_prefix(name: str) -> str:
    """Returns ``.tiered/holds/<name>/``: below it lies one object for each hold of a checkpoint."""
    return f"{HOLDS_PREFIX}{name}/"


def preflight_key(token: str) -> str:
    """Returns ``.tiered/preflight/<token>``."""
    return PREFLIGHT_PREFIX + token
