"""A file system for the URLs that Lightning is given in place of the durable tier's own.

Lightning resolves ``ckpt_path="last"`` on every rank, before the ranks can talk, by asking the file
system of each candidate whether it exists and when it was written. This one answers without a
request; at the load, rank 0 alone finds out which checkpoint the sentinel means.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

from tiered_checkpoint_io.model import ids


class SentinelFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Holds one file, which is new: the sentinel for the newest "last" checkpoint."""

    LAST = ids.LAST_URL
    protocol = "tiered"

    def exists(self, path: str, **_: Any) -> bool:
        return bool(self._strip_protocol(path) == self._strip_protocol(self.LAST))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": self._strip_protocol(path), "size": 0, "type": "file"}

    def modified(self, path: str) -> datetime:  # noqa: ARG002
        return datetime.now(timezone.utc)


fsspec.register_implementation("tiered", SentinelFileSystem, clobber=True)
