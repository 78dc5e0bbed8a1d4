"""Small documents beside the checkpoints, read again and again: one list, and those that have changed since."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tiered_checkpoint_io.errors import ManifestError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.stores.base import ObjectInfo, Store

_T = TypeVar("_T")
#: A listing tells times in whole seconds: what was read so soon behind a change may change again unseen.
_SETTLED_S = 2.0


@dataclass(slots=True)
class Notes(Generic[_T]):
    """The documents below a prefix, as they were read last.

    Attributes:
        prefix: Where they are.
        parse: Makes one of its bytes and its key; raises ManifestError where they can't be understood.
    """

    prefix: str
    parse: Callable[[bytes, str], _T]
    _read: dict[str, tuple[ObjectInfo, bool, _T | ManifestError]] = field(default_factory=dict)

    def read(self, store: Store) -> Mapping[str, _T | ManifestError]:
        """All that are there, by key: one list, and a GET for each that is new, or may have changed.

        Raises:
            StoreError: The tier could not be asked.
        """
        listed = {entry.key: entry for entry in store.list(self.prefix)}
        now = max((entry.modified for entry in listed.values()), default=0.0)
        fresh = [key for key, entry in listed.items() if self._is_new(entry)]

        def read(key: str) -> list[_T | ManifestError]:
            try:
                return [self.parse(store.get(key), f"{store.url}/{key}")]
            except ManifestError as error:
                return [error]
            except StoreNotFoundError:
                return []

        found = dict(zip(fresh, in_parallel(read, fresh), strict=True))
        kept = {key: each for key, each in self._read.items() if key in listed and key not in found}
        new = {
            key: (listed[key], listed[key].modified < now - _SETTLED_S, value)
            for key, values in found.items()
            for value in values
        }
        self._read = kept | new
        return {key: value for key, (_, _, value) in self._read.items()}

    def _is_new(self, entry: ObjectInfo) -> bool:
        known = self._read.get(entry.key)
        return known is None or known[0] != entry or not known[1]
