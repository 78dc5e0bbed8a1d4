"""The memory of another node as a store that is only read: ranged GETs to its drain, see ``engine/drain/serving.py``.

A key is ``<save id>/<rank>`` for the description of a part, and ``<save id>/<rank>/<number>`` for one of its files. A
drain that replicates also asks for ``replicas/<group>`` and ``replicas/<group>/<node>``. All
waits are bounded. A peer that is lost or silent is not asked again: the reader takes the next copy.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError, StoreNotFoundError, TieredCheckpointError
from tiered_checkpoint_io.stores.base import Metrics

_T = TypeVar("_T")
#: A peer that sends less in a second is taken for silent.
LEAST_RATE = 1 << 20
_RECEIVE_BUFFER = 4 << 20
#: Bytes of a description: 34 for each chunk.
_MAX_DESCRIPTION = 64 << 20
_MAX_HEAD = 4096
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_LENGTH = re.compile(rb"\r\nContent-Length: (\d{1,15})(?:\r\n|\Z)", re.IGNORECASE)


class Endpoint(NamedTuple):
    """The place at which a node's memory is served, and the token that its reader shows."""

    address: str
    port: int
    token: str

    def to_json(self) -> bytes:
        """Returns the document that :meth:`from_json` reads."""
        return json.dumps(self._asdict()).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Endpoint:
        """Raises ValueError if the document is none."""
        try:
            raw = json.loads(data)
            return cls(str(raw["address"]), int(raw["port"]), str(raw["token"]))
        except (KeyError, TypeError) as error:
            raise ValueError("not an endpoint") from error


class _BusyError(Exception):
    """The peer serves as many as it can."""


class _StrangeError(Exception):
    """The peer's answer is not understood."""


class _OwnError(Exception):
    """Failure of this process, not of the peer, to handle the bytes."""


class PeerStore:
    """One peer, for many threads."""

    tier = "peer"

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        connections: int = 4,
        clock: Clock = SYSTEM,
        waits: bool = False,
        is_patient: bool = True,
    ) -> None:
        """Sends no request yet.

        Uses so many ``connections`` at once, at most. With ``waits``, waits for a part, and for its chunks, that the
        peer is still reading itself. Unless it ``is_patient``, takes a peer for lost if the peer is busy, or its drain
        is being replaced.
        """
        self._endpoint = endpoint
        self._waits = "Prefer: wait\r\n" if waits else ""
        self._clock = clock
        self._is_patient = is_patient
        self._turn = threading.BoundedSemaphore(connections)
        self._idle: list[_Connection] = []
        self._lost = ""
        self.metrics = Metrics()

    @property
    def url(self) -> str:
        """The root, without the token."""
        return f"peer://{self._endpoint.address}:{self._endpoint.port}"

    # ------------------------------------------------------------------------------------ reading
    def get(self, key: str) -> bytes:
        """Returns the description of a part; with an empty key, nothing, if the peer is there."""

        def read(connection: _Connection) -> bytes:
            length = self._answer(connection, key, "", 200)
            if length > _MAX_DESCRIPTION:
                raise _StrangeError(f"a description of {length} bytes")
            data = bytearray(length)
            self._fill(connection, [memoryview(data)], lambda _: None)
            return bytes(data)

        return self._ask(key, read)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer from a file; raises as :meth:`read_pieces`."""
        self.read_pieces(key, offset, [buffer], lambda _: None)

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers: see :func:`stores.base.read_pieces`."""
        length = sum(len(piece) for piece in pieces)
        wanted = f"Range: bytes={offset}-{offset + length - 1}\r\n"

        def read(connection: _Connection) -> None:
            found = self._answer(connection, key, wanted, 206)
            if found != length:
                raise _StrangeError(f"{found} bytes instead of {length}")
            self._fill(connection, pieces, filled)

        if length:
            self._ask(key, read)
            self.metrics.add("bytes.down", length)

    def report_damage(self, key: str) -> None:
        """Has the peer verify the part of a file that did not arrive as it should; never raises."""
        part, _, _ = key.rpartition("/")
        with contextlib.suppress(StoreError):
            self._ask(key, lambda connection: self._answer(connection, f"{part}/check", "", 200))

    def close(self) -> None:
        """Ends all connections."""
        while self._idle:
            self._idle.pop().close()

    # ------------------------------------------------------------------------------------- inside
    def _answer(self, connection: _Connection, key: str, headers: str, expected: int) -> int:
        """Returns the length of the answer to a request."""
        head = f"GET /{key} HTTP/1.1\r\nAuthorization: Bearer {self._endpoint.token}\r\n{self._waits}{headers}\r\n"
        status, length = connection.ask(head.encode())
        if status == 503:
            raise _BusyError
        if status == expected:
            return length
        where = f"{self.url}/{key}"
        if status == 404:
            raise StoreNotFoundError("the peer no longer has it", operation="read", tier="peer", key=where)
        if status == 416:
            raise CorruptCheckpointError("the peer's file is too short", operation="read", tier="peer", key=where)
        if status == 401:
            raise StoreError("the peer is of another job", operation="read", tier="peer", key=where, reason="access")
        raise _StrangeError(f"status {status}")

    def _fill(self, connection: _Connection, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        size, clock = sum(len(piece) for piece in pieces), self._clock
        deadline = clock.monotonic() + clock.timing.peer_silence_s + size / LEAST_RATE
        for index, piece in enumerate(pieces):
            done = 0
            while done < len(piece):
                done += connection.read_into(piece[done:])
                if clock.monotonic() > deadline:
                    raise TimeoutError("it sends too slowly")
            try:
                filled(index)
            except OSError as error:
                raise _OwnError from error

    def _ask(self, key: str, work: Callable[[_Connection], _T]) -> _T:
        """Does ``work`` over a connection, again if the connection ended: another drain may be taking over."""
        clock, timing, began = self._clock, self._clock.timing, self._clock.monotonic()
        while not self._lost:
            patience_s, why = 0.0, ""
            with self._turn:
                if self._lost:
                    break
                try:
                    with self._connected() as connection:
                        return work(connection)
                except _OwnError as error:
                    raise error.__cause__ or error from None
                except TieredCheckpointError:
                    raise
                except _BusyError:
                    patience_s, why = timing.peer_busy_s, "it serves as many readers as it can"
                except ConnectionError as error:
                    patience_s, why = timing.peer_back_s, str(error)
                except (OSError, _StrangeError) as error:
                    why = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else f"it answers {error}"
            if not self._is_patient or clock.monotonic() - began >= patience_s:
                self._lost = self._lost or f"the peer is lost: {why}"
            else:
                clock.sleep(timing.accept_poll_s)
        raise StoreError(self._lost, operation="read", tier="peer", key=f"{self.url}/{key}", reason="unavailable")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[_Connection]:
        """Yields a connection that is kept for the next request, unless this one fails."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = _Connection(self._endpoint, self._clock.timing.peer_silence_s)
            self.metrics.add("requests.connect")
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)


class _Connection:
    """A connection that is read straight into buffers."""

    def __init__(self, endpoint: Endpoint, timeout_s: float) -> None:
        self._socket = socket.create_connection(endpoint[:2], timeout_s)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        self._rest = b""

    def ask(self, head: bytes) -> tuple[int, int]:
        """Sends a request; returns the status of the answer, and the bytes that follow."""
        self._socket.sendall(head)
        said = b""
        while b"\r\n\r\n" not in said:
            more = self._socket.recv(_MAX_HEAD)
            if not more:
                raise ConnectionResetError("the connection ended")
            said += more
            if len(said) > _MAX_HEAD:
                raise _StrangeError("more than a head")
        head, _, self._rest = said.partition(b"\r\n\r\n")
        status, length = _STATUS.match(head), _LENGTH.search(head)
        if status is None or length is None:
            raise _StrangeError(repr(head[:100]))
        return int(status[1]), int(length[1])

    def read_into(self, buffer: memoryview) -> int:
        """Fills the start of a buffer with the bytes that have arrived; returns their count."""
        if self._rest:
            count = min(len(self._rest), len(buffer))
            buffer[:count], self._rest = self._rest[:count], self._rest[count:]
            return count
        count = self._socket.recv_into(buffer)
        if not count:
            raise ConnectionResetError("the answer broke off")
        return count

    def close(self) -> None:
        self._socket.close()
