"""A cache of small documents next to the checkpoints: a look is one list, and a read of the changed documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.stores.base import ObjectInfo, Store

_T = TypeVar("_T")
#: Listings have times in whole seconds: a document read so soon after a change may change again unseen. Measured by the
#: listing's times, or by how long the document has been unchanged.
_SETTLED_S = 2.0


class _Known(NamedTuple):
    """One document: its listing, since when, whether a later change would show, and its value."""

    entry: ObjectInfo
    since: float
    is_settled: bool
    value: Any


@dataclass(slots=True)
class DocumentCache(Generic[_T]):
    """The documents below a prefix, as they were last read.

    Attributes:
        prefix: Prefix of the documents' keys.
        parse: Makes a document of its bytes and its key; raises CorruptCheckpointError if they can't be understood.
    """

    prefix: str
    parse: Callable[[bytes, str], _T]
    _read: dict[str, _Known] = field(default_factory=dict)

    def read(self, store: Store, clock: Clock = SYSTEM) -> Mapping[str, _T | CorruptCheckpointError]:
        """Returns all documents, by key: one list, and a GET for each that is new, or may have changed.

        Raises:
            StoreError: The tier could not be read.
        """
        now = clock.monotonic()
        listed = {entry.key: entry for entry in store.list(self.prefix)}
        latest = max((entry.modified for entry in listed.values()), default=0.0)
        kept = {key: each for key, each in self._read.items() if listed.get(key) == each.entry}
        fresh = [key for key in listed if key not in kept or not kept[key].is_settled]

        def read(key: str) -> list[_T | CorruptCheckpointError]:
            try:
                return [self.parse(store.get(key), f"{store.url}/{key}")]
            except CorruptCheckpointError as error:
                return [error]
            except StoreNotFoundError:
                return []
            except (ConfigError, StoreError) as error:
                if isinstance(error, StoreError) and error.reason != "archived":
                    raise
                # The other documents are there all the same.
                where = error.key or key
                return [CorruptCheckpointError(error.message, operation="read", key=where, hint=error.hint)]

        for key, values in zip(fresh, in_parallel(read, fresh), strict=True):
            before, entry = kept.pop(key, None), listed[key]
            since = now if before is None else before.since
            is_settled = entry.modified < latest - _SETTLED_S or now - since > _SETTLED_S
            for value in values:
                kept[key] = _Known(entry, since, is_settled, value)
        self._read = kept
        return {key: each.value for key, each in kept.items()}
