"""Abilities that only some stores have, for all stores: by a store's own method, else by the protocol's.

A store may have these methods beyond those of :class:`Store`:

- ``folders(prefix)``, ``children(prefix)``: a listing by a delimiter; see :func:`folders_of`, :func:`children_of`.
- ``read_pieces(key, offset, pieces, filled)``: see :func:`read_pieces`.
- ``copy(source, target, size, check=, journal=, progress=)``: sends no bytes; see :func:`copy_to`.
- ``delete_all(keys)``: as ``delete``, by few requests.
- the methods of :class:`ConditionalStore`; see :func:`conditional`.
- ``try_multipart(key)``: tests the further rights that large objects need.
- ``abort_stale_uploads()``: ends uploads that no process continues any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import (
    ConditionalStore,
    CopyRefusedError,
    Readable,
    ServerCopy,
    Store,
    UploadContent,
    UploadJournal,
)


class Unconditional:
    """The methods of a ConditionalStore for a store without them: conditions are not looked at."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def tag(self, key: str) -> str | None:
        try:
            self._store.size(key)
        except StoreNotFoundError:
            return None
        return ""

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        return self._store.get(key), ""

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:  # noqa: ARG002
        self._store.put(key, data)
        return ""

    def upload_if(
        self,
        key: str,
        data: UploadContent,
        expected: str | None,  # noqa: ARG002
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        if look is not None:
            look()
        self._store.upload(key, data, journal=journal, progress=progress)

    def delete_if(self, key: str, expected: str) -> None:  # noqa: ARG002
        self._store.delete(key)


def conditional(store: Store) -> ConditionalStore | Unconditional:
    """Returns the same store for writes on a condition; if it can't, they are unconditional."""
    return store if isinstance(store, ConditionalStore) else Unconditional(store)


def folders_of(store: Store, prefix: str) -> set[str]:
    """Returns the folders below a prefix with a slash: few answers if a store can list them, else a list of all.

    Raises:
        StoreError: The listing failed.
    """
    folders = getattr(store, "folders", None)
    if folders is not None:
        return set(folders(prefix))
    below = (entry.key[len(prefix) :] for entry in store.list(prefix))
    return {key.partition("/")[0] for key in below if "/" in key}


def children_of(store: Store, prefix: str) -> set[str]:
    """Returns the names right below a prefix, folders with a slash: few answers if a store can list them so.

    Args:
        store: Store to look at.
        prefix: Empty, or ends with a slash.

    Raises:
        StoreError: The listing failed.
    """
    children = getattr(store, "children", None)
    if children is not None:
        return set(children(prefix))
    return {"".join(entry.key[len(prefix) :].partition("/")[:2]) for entry in store.list(prefix)}


def copy_to(
    store: Store,
    key: str,
    copy: ServerCopy,
    *,
    journal: UploadJournal | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Has the store copy bytes over any object at ``key``; atomic, and with a journal as :meth:`Store.upload`.

    Raises:
        CopyRefusedError: The store can't copy, or refuses to. The old object is as it was.
        StoreNotFoundError: There is no source.
    """
    by_store = getattr(store, "copy", None)
    if by_store is None:
        raise CopyRefusedError("this kind of store can't copy", operation="copy", key=key)
    try:
        by_store(copy.source, key, copy.size, check=copy.check, journal=journal, progress=progress)
    except StoreError as error:
        if error.retryable or isinstance(error, StoreNotFoundError | CopyRefusedError):
            raise
        raise CopyRefusedError(error.message, operation="copy", key=key, hint=error.hint) from error


def read_pieces(
    store: Readable, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]
) -> None:
    """Fills several buffers, one after the other, from byte ``offset`` of an object on; raises as ``read_into``.

    ``filled(index)`` is called right after each, in their order, while its bytes are in the processor's cache. If an
    attempt fails, the next one begins again with index 0. Only if the store has ``read_pieces`` itself do the bytes
    go there straight from the connection or the disk.
    """
    read = getattr(store, "read_pieces", None)
    if read is not None:
        read(key, offset, pieces, filled)
        return
    with memoryview(bytearray(sum(len(piece) for piece in pieces))) as whole:
        store.read_into(key, offset, whole)
        at = 0
        for index, piece in enumerate(pieces):
            piece[:] = whole[at : at + len(piece)]
            at += len(piece)
            filled(index)
