"""Tries on any store the requests of saves, loads and deletes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiered_checkpoint_io.errors import StoreError, TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Store


def try_requests(store: Store, key: str, *, multipart: bool) -> list[TieredCheckpointError]:
    """Sends each kind of request that saves, loads and deletes need once; returns the errors of the failed ones.

    After a refused one the others are sent as well, so that all missing rights are known at once.

    Args:
        store: The durable tier.
        key: Key of an object to be written, read and deleted.
        multipart: True to begin an upload in parts, and end it, if the store has such.
    """
    failures: list[TieredCheckpointError] = []
    content = key.encode()

    def done(request: Callable[[], object]) -> bool:
        try:
            request()
        except TieredCheckpointError as error:
            failures.append(error)
            return False
        return True

    def read_back() -> None:
        if store.get(key) != content:
            raise StoreError("an object that was just written has another content", operation="get", key=key)

    if not done(lambda: next(iter(store.list(ids.PREFLIGHT_PREFIX)), None)) and not _lacks_a_right(failures):
        return failures
    if not done(lambda: store.put(key, content)) and not failures[-1].retryable:
        return failures
    # If there was no answer, it may have been written.
    if not failures or _lacks_a_right(failures):
        done(read_back)
        begin = getattr(store, "try_multipart", None)
        if multipart and begin is not None:
            done(lambda: begin(key))
    done(lambda: store.delete(key))
    return failures


def _lacks_a_right(failures: Sequence[TieredCheckpointError]) -> bool:
    return all(isinstance(error, StoreError) and error.is_denied for error in failures)
