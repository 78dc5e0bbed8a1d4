"""The document of a dirpath's lease: one object that names the run which writes there."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tiered_checkpoint_io.errors import StoreError, StoreNotFoundError
from tiered_checkpoint_io.memory.node import Identity
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.base import Store, conditional

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Lease:
    """Content of the lease; host and namespace of its holder are for people and ``flush``.

    Attributes:
        owner: The launch that holds it; empty if it is free.
        token: The process of that launch that wrote it.
        generation: Number of holders so far.
        asker: Token of a process that asks for an answer; empty for none.
    """

    owner: str
    token: str
    generation: int
    asker: str
    namespace: str
    host: str
    process: Identity

    def to_json(self) -> bytes:
        return json.dumps({"format_version": _VERSION, **asdict(self)}).encode()

    @property
    def who(self) -> str:
        """The holder, for people."""
        if not self.token:
            return "a process whose lease can't be read"
        return f"process {self.process.pid} on {self.host} (launch {self.owner})"


#: A lease that can't be understood: it may be held.
UNREADABLE = Lease("?", "", 0, "", "", "", Identity("", 0, -1))


def holder_of(store: Store) -> Lease | None:
    """Returns the lease of the run that holds a dirpath; None if none does; raises StoreError."""
    data, _ = read(store)
    lease = understood(data) or UNREADABLE
    return lease if data and lease.owner else None


def read(store: Store) -> tuple[bytes, str | None]:
    """Returns the lease and its tag; empty if there is none."""
    try:
        return conditional(store).get_tagged(ids.LEASE_KEY)
    except StoreNotFoundError:
        return b"", None
    except StoreError as error:
        if error.reason != "archived":
            raise
        # A lifecycle rule has archived an old lease: it counts as unreadable.
        return b"?", conditional(store).tag(ids.LEASE_KEY)


def understood(data: bytes | None) -> Lease | None:
    """Returns the lease in these bytes; None for none, or if they can't be understood."""
    try:
        raw = json.loads(data or b"")
        is_known = raw.pop("format_version") == _VERSION
        lease = Lease(**{**raw, "process": Identity(*raw["process"])})
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    values = (lease.generation, *lease.process[1:])
    texts = (lease.owner, lease.token, lease.asker, lease.namespace, lease.host, lease.process.machine)
    is_known &= all(isinstance(each, str) for each in texts) and all(isinstance(each, int) for each in values)
    return lease if is_known else None
