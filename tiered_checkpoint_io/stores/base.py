"""Store: the operations that the engine needs from a durable tier.

Policy (commit order, retention, verification, choice of ranges) is in the engine, above this protocol. A store moves
bytes and reports errors truthfully. Keys are ``str``, relative to the store's root: ``Path`` mangles URLs.

Promises of every store (``tests/support/store_contract.py`` checks them):

- ``put`` and ``upload`` are atomic: a reader sees the old object or the new one, whole, and a
  failed or killed write leaves the old one as it was.
- A read or a list after the return of a write sees the written object.
- ``delete`` of a missing object succeeds.
- Errors are those of ``tiered_checkpoint_io.errors``, translated next to the import of the client library, by code and
  never by text; ``StoreError.retryable`` is true if a retry may help.
- All methods may be called from several threads at once.
- No reference to a caller's buffer is kept after a call returns.

A store may have these methods beyond those of :class:`Store`:

- ``children(prefix)``: a listing by a delimiter; see :func:`children_of`.
- ``read_pieces(key, offset, pieces, filled)``: see :func:`read_pieces`.
- ``copy(source, target, size, check=, journal=, progress=)``: sends no bytes; see :func:`copy_to`.
- ``delete_all(keys)``: as ``delete``, by few requests.
- the methods of :class:`ConditionalStore`; see :func:`conditional`.
- ``try_multipart(key)``: tests the further rights that large objects need.
- ``abort_stale_uploads()``: ends uploads that no process continues any more.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, Reason, StoreError, StoreNotFoundError
from tiered_checkpoint_io.formats.parallel import in_parallel


def validate_key(key: str) -> str:
    """Returns ``key`` if it names an object below a store's root, and can name no other.

    Raises:
        ConfigError: Empty, absolute, or with an empty, ``.`` or ``..`` component.
    """
    if "\0" in key or any(part in ("", ".", "..") for part in key.split("/")):
        raise ConfigError(
            f"invalid key {key!r}", hint="keys are relative to the store's root, without '.' and '..' components"
        )
    return key


def too_short(key: str, size: int, end: int) -> CorruptCheckpointError:
    """Returns the error for an object of ``size`` bytes that is read up to ``end``."""
    return CorruptCheckpointError(
        f"object ends at byte {size}; {end} were expected", operation="read", tier="durable", key=key
    )


def check_size(key: str, found: int, size: int) -> None:
    """Refuses to copy an object that has another size than it should have."""
    if found != size:
        raise StoreError(f"{found} bytes are there instead of {size}", operation="copy", key=key)


def store_error(reason: Reason | None, text: str, *, operation: str, key: str, hint: str | None) -> StoreError:
    """Returns the error for a reason."""
    kind = StoreNotFoundError if reason == "missing" else StoreError
    if reason == "missing":
        text = f"{text}: there is no such object"
        hint = hint or "was it deleted by hand, or by a lifecycle rule? `tiered-ckpt ls` lists other checkpoints"
    return kind(text, operation=operation, key=key, hint=hint, reason=reason)


def changed(operation: str, key: str) -> StoreError:
    """Returns the error for an object that is not as it was read."""
    return StoreError(
        "it changed since it was read: another run, or another node, works on the same name",
        operation=operation,
        key=key,
        hint="it is read and decided again; no action needed",
        reason="changed",
    )


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing.

    Attributes:
        key: Relative to the store's root.
        size: Bytes.
        modified: When it was last written, in seconds since the epoch by the store's own clock.
    """

    key: str
    size: int
    modified: float


class Metrics:
    """Thread-safe counters of requests to a store.

    Names are ``requests.<operation>`` (``list``, ``get``, ``put``, ``head``, ``delete``,
    ``part`` ... one per request that went out, retries included), ``answers`` (one per request that
    need not be repeated), ``bytes.up``, ``bytes.down``, ``retries``, and, of S3, ``bytes.sent``: bytes sent for
    uploads, counted when they are sent, and once if an attempt sends them again.

    Attributes:
        retrying: Why a request is being repeated; empty once one was answered.
    """

    def __init__(self) -> None:
        self.retrying = ""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        """Returns all counters, by name."""
        with self._lock:
            return dict(self._counts)


class UploadJournal(Protocol):
    """Journal of an upload in progress: from it, another process can continue the upload.

    A store may write any JSON object; it gets the same object back after a restart.
    """

    def read(self) -> dict[str, object] | None: ...

    def write(self, state: dict[str, object]) -> None: ...

    def clear(self) -> None: ...


class UploadContent(Protocol):
    """Content of an upload: a ``memoryview`` of bytes, or an object that is sliced like one.

    ``len(content)`` is its size in bytes. ``with content[start:end] as piece`` gets the bytes of that range as a
    contiguous memoryview, and frees them at the end: the content need not be in memory before. A store asks for a few
    pieces at once, from several threads and in any order, and for a range again when it sends it again.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> AbstractContextManager[memoryview]: ...


@dataclass(frozen=True, slots=True)
class ServerCopy:
    """Bytes that the store has under another key, to be copied there without being sent: see :func:`copy_to`.

    ``check`` is called once it is settled which bytes are copied, and before the target changes. Its error ends the
    copy: the object may have been replaced by another of its size.
    """

    source: str
    size: int
    check: Callable[[], None]


class CopyRefusedError(StoreError):
    """A store can't copy an object by itself, or refuses to."""


class Readable(Protocol):
    """Source of file ranges: a durable tier, or the memory of a peer."""

    @property
    def url(self) -> str:
        """The root, as the user would write it; holds no secret."""
        ...

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills ``buffer`` (writable bytes) from the object, starting at byte ``offset``.

        Raises:
            StoreNotFoundError: There is no such object.
            CorruptCheckpointError: The object ends before the buffer is full.
        """
        ...


@runtime_checkable
class Store(Readable, Protocol):
    """A durable tier rooted at one URL or directory."""

    @property
    def metrics(self) -> Metrics:
        """Metrics of this store's requests so far."""
        ...

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Yields all objects whose key starts with ``prefix``, at any depth and in any order; none is no error."""
        ...

    def get(self, key: str) -> bytes:
        """Returns the content of a small object; raises StoreNotFoundError if there is none."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Writes a small object, atomically, over any object that is there."""
        ...

    def size(self, key: str) -> int:
        """Returns the size of an object in bytes; raises StoreNotFoundError if there is none."""
        ...

    def upload(
        self,
        key: str,
        data: UploadContent,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        """Writes a large object, atomically, over any object that is there.

        ``data`` must not change until the call returns. With the notes of ``journal`` a later call, in this process or
        another, can resume. ``progress`` is called with the number of further bytes that were written, from any thread.
        """
        ...

    def abandon(self, key: str, journal: UploadJournal) -> None:
        """Ends the upload that ``journal`` describes, freeing the bytes that the store holds of it."""
        ...

    def delete(self, key: str) -> None:
        """Removes an object; succeeds if there is none."""
        ...

    def close(self) -> None:
        """Frees connections and threads. A closed store is not used again."""
        ...


@runtime_checkable
class ConditionalStore(Store, Protocol):
    """A store that can also write on the condition that an object is as it was read; not all can.

    The *tag* of an object is text that changes when its content does, such as S3's ETag. ``expected`` is the tag of the
    replaced object; None if there must be none.
    """

    def tag(self, key: str) -> str | None:
        """Returns the tag of an object; None if there is none."""
        ...

    def get_tagged(self, key: str) -> tuple[bytes, str]:
        """Does ``get``; returns the tag as well."""
        ...

    def put_if(self, key: str, data: bytes, expected: str | None) -> str:
        """Does ``put``; returns the tag of the written object.

        If the object has another tag, and is not ``data``, raises StoreError with the reason "changed", and writes
        nothing.
        """
        ...

    def upload_if(
        self,
        key: str,
        data: UploadContent,
        expected: str | None,
        *,
        journal: UploadJournal | None = None,
        progress: Callable[[int], None] | None = None,
        look: Callable[[], None] | None = None,
    ) -> None:
        """Does ``upload``; raises errors of :meth:`put_if` and of ``look``; then nothing was written.

        ``look`` is called right before the object appears, which for a large one is long after the upload began. The
        call is needed if a tag is a digest, which is the same again for the same bytes.
        """
        ...

    def delete_if(self, key: str, expected: str) -> None:
        """Does ``delete``, if the tag is as expected; raises as :meth:`put_if`."""
        ...


def tag_of_put(store: ConditionalStore, key: str, data: bytes | memoryview, put: Callable[[], str]) -> str:
    """Returns the tag of a conditional write.

    Its own answer may have been lost: a repetition then meets the object of the first attempt.
    """
    try:
        return put()
    except StoreError as error:
        if error.reason != "changed":
            raise
        with contextlib.suppress(StoreNotFoundError):
            found, tag = store.get_tagged(key)
            if found == data:
                return tag
        raise


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
        look: Callable[[], None] | None = None,
        **options: Any,
    ) -> None:
        if look is not None:
            look()
        self._store.upload(key, data, **options)

    def delete_if(self, key: str, expected: str) -> None:  # noqa: ARG002
        self._store.delete(key)


def conditional(store: Store) -> ConditionalStore | Unconditional:
    """Returns the same store for writes on a condition; if it can't, they are unconditional."""
    return store if isinstance(store, ConditionalStore) else Unconditional(store)


def folders_of(store: Store, prefix: str) -> set[str]:
    """Returns the folders of :func:`children_of`, without a slash."""
    return {name[:-1] for name in children_of(store, prefix) if name.endswith("/")}


def children_of(store: Store, prefix: str) -> set[str]:
    """Returns the names right below a prefix, folders with a slash: few answers if a store can list them so.

    The prefix is empty, or ends with a slash.
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
    """Copies bytes within the store, over any object at ``key``; atomic, and with a journal as :meth:`Store.upload`.

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


class Refusals(list[StoreError]):
    """Errors of requests that the server refused for good, such as a delete under an Object Lock."""

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Ends the block if a request in it is refused, so that its caller continues with the next one.

        Raises:
            StoreError: The store does not answer, or does not exist: further requests would fail, too.
        """
        try:
            yield
        except StoreError as error:
            if error.retryable or error.reason == "config":
                raise
            self.append(error)

    def raise_first(self) -> None:
        """Raises the first, if there is one."""
        if self:
            raise self[0]


def delete_each(delete: Callable[[str], None], keys: Iterable[str]) -> None:
    """Deletes objects by one request each, a few at a time: all that may be deleted.

    Raises:
        StoreError: Some are still there. Repeat the call to finish.
    """
    refused = Refusals()

    def attempt(key: str) -> None:
        with refused.kept():
            delete(key)

    in_parallel(attempt, keys)
    refused.raise_first()
