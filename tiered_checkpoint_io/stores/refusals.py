"""Refusals of a store during several requests: one locked object must not keep all others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.formats.parallel import in_parallel


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
