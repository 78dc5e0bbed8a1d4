"""The memory of another node as a store that is only read: ranged GETs to its drain, see ``engine/drain/serving.py``.

A key is ``<save id>/<rank>`` for the description of a part, and ``<save id>/<rank>/<number>`` for one of its files. A
drain that replicates also asks for ``replicas/<group>`` and ``replicas/<group>/<node>``. All
waits are bounded. A peer that is lost or silent is not asked again: the reader takes the next copy.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.client import HTTPConnection, HTTPException, HTTPResponse
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
        self._headers = {"Authorization": f"Bearer {endpoint.token}", **({"Prefer": "wait"} if waits else {})}
        self._clock = clock
        self._is_patient = is_patient
        self._turn = threading.BoundedSemaphore(connections)
        self._idle: list[HTTPConnection] = []
        self._lost = ""
        self.metrics = Metrics()

    @property
    def url(self) -> str:
        """The root, without the token."""
        return f"peer://{self._endpoint.address}:{self._endpoint.port}"

    # ------------------------------------------------------------------------------------ reading
    def get(self, key: str) -> bytes:
        """Returns the description of a part; with an empty key, nothing, if the peer is there."""

        def read(connection: HTTPConnection) -> bytes:
            with self._answer(connection, key, 200) as answer:
                if (length := answer.length or 0) > _MAX_DESCRIPTION:
                    raise HTTPException(f"a description of {length} bytes")
                data = bytearray(length)
                self._fill(answer, [memoryview(data)], lambda _: None)
                return bytes(data)

        return self._ask(key, read)

    def read_into(self, key: str, offset: int, buffer: memoryview) -> None:
        """Fills a buffer from a file; raises as :meth:`read_pieces`."""
        self.read_pieces(key, offset, [buffer], lambda _: None)

    def read_pieces(self, key: str, offset: int, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        """Fills several buffers: see :func:`stores.base.read_pieces`."""
        length = sum(len(piece) for piece in pieces)
        wanted = f"bytes={offset}-{offset + length - 1}"

        def read(connection: HTTPConnection) -> None:
            with self._answer(connection, key, 206, Range=wanted) as answer:
                if answer.length != length:
                    raise HTTPException(f"{answer.length} bytes instead of {length}")
                self._fill(answer, pieces, filled)

        if length:
            self._ask(key, read)
            self.metrics.add("bytes.down", length)

    def report_damage(self, key: str) -> None:
        """Has the peer verify the part of a file that did not arrive as it should; never raises."""
        part, _, _ = key.rpartition("/")
        with contextlib.suppress(StoreError):
            self.get(f"{part}/check")

    def close(self) -> None:
        """Ends all connections."""
        while self._idle:
            self._idle.pop().close()

    # ------------------------------------------------------------------------------------- inside
    @contextlib.contextmanager
    def _answer(self, connection: HTTPConnection, key: str, expected: int, **headers: str) -> Iterator[HTTPResponse]:
        """Yields the answer to a request, before its bytes are read."""
        connection.request("GET", f"/{key}", headers={**self._headers, **headers})
        with connection.getresponse() as answer:
            status, where = answer.status, f"{self.url}/{key}"
            if status == expected and answer.length is not None:
                yield answer
                return
        if status == 503:
            raise _BusyError
        if status == 404:
            raise StoreNotFoundError("the peer no longer has it", operation="read", tier="peer", key=where)
        if status == 416:
            raise CorruptCheckpointError("the peer's file is too short", operation="read", tier="peer", key=where)
        if status == 401:
            raise StoreError("the peer is of another job", operation="read", tier="peer", key=where, reason="access")
        raise HTTPException(f"status {status}")

    def _fill(self, answer: HTTPResponse, pieces: Sequence[memoryview], filled: Callable[[int], None]) -> None:
        size, clock = sum(len(piece) for piece in pieces), self._clock
        deadline = clock.monotonic() + clock.timing.peer_silence_s + size / LEAST_RATE
        for index, piece in enumerate(pieces):
            done = 0
            while done < len(piece):
                # Unlike the answer's own method, this one returns with the bytes that have arrived.
                count = answer.fp.readinto1(piece[done:])
                if not count:
                    raise ConnectionResetError("the answer broke off")
                done += count
                if clock.monotonic() > deadline:
                    raise TimeoutError("it sends too slowly")
            try:
                filled(index)
            except OSError as error:
                raise _OwnError from error

    def _ask(self, key: str, work: Callable[[HTTPConnection], _T]) -> _T:
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
                except (OSError, HTTPException) as error:
                    why = f"{type(error).__name__}: {error}" if isinstance(error, OSError) else f"it answers {error!r}"
            if not self._is_patient or clock.monotonic() - began >= patience_s:
                self._lost = self._lost or f"the peer is lost: {why}"
            else:
                clock.sleep(timing.accept_poll_s)
        raise StoreError(self._lost, operation="read", tier="peer", key=f"{self.url}/{key}", reason="unavailable")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[HTTPConnection]:
        """Yields a connection that is kept for the next request, unless this one fails."""
        if self._idle:
            connection = self._idle.pop()
        else:
            connection = HTTPConnection(*self._endpoint[:2], timeout=self._clock.timing.peer_silence_s)
            connection.connect()
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
            self.metrics.add("requests.connect")
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        self._idle.append(connection)
