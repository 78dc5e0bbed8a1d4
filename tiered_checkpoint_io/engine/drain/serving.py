"""The memory of this node for the other nodes of its job: ranged GETs over HTTP/1.1, and nothing else.

A trainer that wants its node to be read notes the address to listen on, and a token. The drain adds the port, and
serves for as long as it runs. Only this user can read the note. A next drain takes the same port and token if it can:
readers find the node again.

Parts are named by save id, rank and file number; no path comes from outside. Each request shows the token, which is
compared in constant time. Connections, requests, and all waits are bounded; bytes go from tmpfs to the socket by
``sendfile``, under the lock that keeps a part's files from being reused.

A reader that is ready to wait also gets a part that this node is still reading itself: each chunk once it is verified.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import re
import secrets
import select
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.chunks import quarantine_damaged
from tiered_checkpoint_io.engine.replication.replicas import Replicas
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, StoreError
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.memory.node import MemoryFullError, write_atomic
from tiered_checkpoint_io.memory.parts import Incoming, StoredPart, opened
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.peer import LEAST_RATE, Endpoint, PeerStore

#: The endpoint that a trainer asks for; without a port until the drain serves it.
_ENDPOINT_FILE = "serve.json"
_MAX_CONNECTIONS = 128
_MAX_HEAD = 4096
_MAX_RANGE = 1 << 30
_SENT_AT_ONCE = 8 << 20
_REQUEST = re.compile(rb"GET /(?:([0-9A-Za-z.-]{1,64})/(\d{1,9})(?:/(\d{1,9}|check))?)? HTTP/1\.1\r\n")
_REPLICAS = re.compile(rb"GET /replicas/([0-9a-f]{1,32})(?:/(\d{1,9}))? HTTP/1\.1\r\n")
_TOKEN = re.compile(rb"\r\nAuthorization: Bearer ([0-9a-f]{1,128})\r\n", re.IGNORECASE)
_WAITS = b"\r\nPrefer: wait\r\n"
_RANGE = re.compile(rb"\r\nRange: bytes=(\d{1,18})-(\d{1,18})\r\n", re.IGNORECASE)


def ask_to_serve(root: Path, address: str) -> None:
    """Notes on which address the drain is to serve, empty to end it; raises MemoryFullError without space for that."""
    found = endpoint_of(root)
    if not address:
        (root / _ENDPOINT_FILE).unlink(missing_ok=True)
    elif found is None or found.address != address:
        write_atomic(root / _ENDPOINT_FILE, Endpoint(address, 0, secrets.token_hex(32)).to_json())


def endpoint_of(root: Path) -> Endpoint | None:
    """Returns the endpoint at which this node's memory is to be served, or last was."""
    with contextlib.suppress(OSError, ValueError):
        return Endpoint.from_json((root / _ENDPOINT_FILE).read_bytes())
    return None


def served_at(root: Path, address: str, clock: Clock) -> Endpoint | None:
    """Returns the endpoint of this node's memory, if it was asked for at this address and a server answers now."""
    found = endpoint_of(root)
    if found is None or found.address != address or not found.port:
        return None
    clock = Clock(replace(clock.timing, peer_silence_s=1.0))
    with contextlib.closing(PeerStore(found, clock=clock, is_patient=False)) as store, contextlib.suppress(StoreError):
        store.get("")
        return found
    return None


class _RefusedError(Exception):
    """A request that is answered by a status and the end of its connection."""


class Server:
    """Server of one memory tier, once :meth:`look` has found that a trainer asks for it."""

    def __init__(
        self, root: Path, tier: MemoryTier, logger: Logger, clock: Clock, replicas: Replicas | None = None
    ) -> None:
        self._root, self._tier, self._replicas = root, tier, replicas
        self._log, self._clock = logger, clock
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        #: The wish that is served, without the port: another drain may note its own.
        self._served: Endpoint | None = None
        self._token = b""
        self._said = ""
        self._connections: set[socket.socket] = set()

    def look(self) -> None:
        """Listens on the address that the trainer asks for; never raises."""
        wish = endpoint_of(self._root)
        with self._lock:
            if (wish and wish._replace(port=0)) == self._served:
                return
            self._close_listener()
            if wish is None:
                return
            try:
                self._listen(wish)
            except (OSError, MemoryFullError) as error:
                self._close_listener()
                if str(error) != self._said:
                    self._said = str(error)
                    self._log.error("other nodes can't read this node's memory at %s: %s", wish.address, error)

    @property
    def connections(self) -> int:
        """The number of readers that are connected."""
        return len(self._connections)

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            self._close_listener()
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _listen(self, wish: Endpoint) -> None:
        address, family = wish.address, socket.AF_INET6 if ":" in wish.address else socket.AF_INET
        listener = self._listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, wish.port))
        except OSError:
            # Another process may have taken the port.
            listener.bind((address, 0))
        listener.listen(_MAX_CONNECTIONS)
        found = wish._replace(port=listener.getsockname()[1])
        if found != wish:
            write_atomic(self._root / _ENDPOINT_FILE, found.to_json())
        self._clock.start(lambda: self._accept(listener), "tiered-serve")
        self._served, self._token, self._said = wish._replace(port=0), wish.token.encode(), ""

    def _close_listener(self) -> None:
        listener, self._listener, self._served = self._listener, None, None
        if listener is not None:
            with contextlib.suppress(OSError):
                # Wakes up the thread that accepts.
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()

    # ------------------------------------------------------------------------------- connections
    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if listener is not self._listener:
                    return
                # Out of descriptors, for one.
                self._log.debug("no connection is accepted: %s", error)
                self._clock.sleep(self._clock.timing.accept_poll_s)
                continue
            with self._lock:
                self._connections.add(connection)
                count = len(self._connections)
            # The same number of further readers get the answer "busy".
            is_busy, is_too_many = count > _MAX_CONNECTIONS, count > 2 * _MAX_CONNECTIONS
            try:
                if is_too_many:
                    raise OSError(errno.EAGAIN, "too many readers")
                self._clock.start(partial(self._serve, connection, is_busy=is_busy), "tiered-serve-one")
            except OSError:
                self._drop(connection)

    def _refuse(self, connection: socket.socket, status: str) -> None:
        with contextlib.suppress(OSError):
            connection.settimeout(self._clock.timing.peer_silence_s)
            connection.sendall(_head(status, 0, "Connection: close\r\n"))
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)
        connection.close()

    def _serve(self, connection: socket.socket, *, is_busy: bool) -> None:
        """Answers one request after the other, until there is none for a while."""
        status = ""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with contextlib.ExitStack() as held:
                reader = _Reader(self._tier, self._replicas, connection, self._clock, held)
                while request := reader.request():
                    if is_busy:
                        raise _RefusedError("503 Service Unavailable")
                    reader.answer(request, self._token)
        except _RefusedError as refused:
            status = str(refused)
        except OSError as error:
            self._log.debug("a reader of this node's memory has ended: %s", error)
        except Exception as error:
            self._log.error("could not serve this node's memory: %s", error)
            status = "500 Failed"
        if status:
            self._refuse(connection, status)
        else:
            self._drop(connection)


class _Reader:
    """One connection, and the part that it reads, which stays open until it reads another one."""

    def __init__(
        self,
        tier: MemoryTier,
        replicas: Replicas | None,
        connection: socket.socket,
        clock: Clock,
        held: contextlib.ExitStack,
    ) -> None:
        self._tier, self._replicas, self._connection = tier, replicas, connection
        self._clock, self._held = clock, held
        self._name: tuple[str, int] | None = None
        self._stored: StoredPart | Incoming | None = None
        self._descriptors: list[int] = []

    def request(self) -> bytes:
        """Returns the head of the next request; nothing if the connection has ended."""
        silence_s, data = self._clock.timing.peer_silence_s, b""
        deadline = self._clock.monotonic() + silence_s
        while not data.endswith(b"\r\n\r\n"):
            self._connection.settimeout(max(0.001, deadline - self._clock.monotonic()))
            more = self._connection.recv(_MAX_HEAD)
            if not more:
                return b""
            data += more
            if len(data) > _MAX_HEAD or b"\r\n\r\n" in data[:-4]:
                raise _RefusedError("400 Bad Request")
        return data

    def answer(self, head: bytes, token: bytes) -> None:
        """Answers a request; raises _RefusedError if it is not understood, or lacks the token."""
        shown = _TOKEN.search(head)
        if not hmac.compare_digest(shown[1] if shown else b"", token):
            raise _RefusedError("401 Unauthorized")
        if self._replicas is not None and (of_replicas := _REPLICAS.match(head)):
            node = int(of_replicas[2]) if of_replicas[2] else None
            found = self._replicas.answer(of_replicas[1].decode(), node)
            self._send(_head("404 Not Found", 0) if found is None else _head("200 OK", len(found)) + found)
            return
        asked = _REQUEST.match(head)
        if asked is None:
            raise _RefusedError("400 Bad Request")
        save_id, rank, which = (each.decode() if each else "" for each in asked.groups())
        if not save_id:
            self._send(_head("200 OK", 0))
            return
        if not ids.is_save_id(save_id):
            raise _RefusedError("400 Bad Request")
        try:
            stored = self._open(save_id, int(rank), waits=_WAITS in head)
        except (CheckpointNotFoundError, CorruptCheckpointError, FileNotFoundError):
            self._send(_head("404 Not Found", 0))
            return
        if which == "check":
            if isinstance(stored, StoredPart):
                quarantine_damaged(self._tier, stored)
            self._close()
            self._send(_head("200 OK", 0))
        elif not which:
            described = stored.part.to_json()
            self._send(_head("200 OK", len(described)) + described)
        else:
            self._send_file(stored, int(which), head)

    def _open(self, save_id: str, rank: int, *, waits: bool) -> StoredPart | Incoming:
        deadline = self._clock.monotonic() + self._clock.timing.peer_silence_s / 2
        while self._stored is None or self._name != (save_id, rank):
            self._close()
            try:
                self._name, self._stored = (save_id, rank), self._find(save_id, rank, waits=waits)
            except (CheckpointNotFoundError, FileNotFoundError):
                if not waits or self._clock.monotonic() > deadline:
                    raise
                self._clock.sleep(self._clock.timing.accept_poll_s)
        return self._stored

    def _find(self, save_id: str, rank: int, *, waits: bool) -> StoredPart | Incoming:
        try:
            stored = self._tier.find(save_id, rank)
            self._descriptors = list(self._held.enter_context(opened(stored)).values())
            return stored
        except CheckpointNotFoundError:
            incoming = Incoming.find(self._tier.root, save_id, rank) if waits else None
            if incoming is None:
                raise
        self._held.callback(incoming.close)
        for path in incoming.paths:
            self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW))
            self._held.callback(os.close, self._descriptors[-1])
        return incoming

    def _close(self) -> None:
        self._name, self._stored, self._descriptors = None, None, []
        self._held.close()

    def _is_here(self, incoming: Incoming, number: int, first: int, last: int) -> bool:
        """Waits for bytes of a part that arrives; answers the request if they are not here in time."""
        deadline = self._clock.monotonic() + self._clock.timing.peer_silence_s / 2
        while not incoming.has(number, first, last):
            is_arriving = incoming.is_arriving()
            if not is_arriving or self._clock.monotonic() > deadline:
                # If it is not arriving, it may be here by now, or the process has failed: the next request shows which.
                self._close()
                self._send(_head("503 Service Unavailable", 0))
                return False
            self._clock.sleep(self._clock.timing.chunk_poll_s)
        return True

    def _send_file(self, stored: StoredPart | Incoming, number: int, head: bytes) -> None:
        wanted, files = _RANGE.search(head), stored.part.content.files
        if wanted is None or number >= len(files):
            raise _RefusedError("400 Bad Request")
        first, last, entry = int(wanted[1]), int(wanted[2]), files[number]
        length = last + 1 - first
        if not 0 < length <= _MAX_RANGE:
            raise _RefusedError("400 Bad Request")
        if last >= entry.size:
            self._send(_head("416 Range Not Satisfiable", 0, f"Content-Range: bytes */{entry.size}\r\n"))
            return
        if isinstance(stored, Incoming) and not self._is_here(stored, number, first, last):
            return
        self._send(_head("206 Partial Content", length, f"Content-Range: bytes {first}-{last}/{entry.size}\r\n"))
        deadline = self._clock.monotonic() + self._clock.timing.peer_silence_s + length / LEAST_RATE
        descriptor, at = self._descriptors[number], first
        for _ in self._ready(deadline):
            with contextlib.suppress(BlockingIOError):
                sent = os.sendfile(self._connection.fileno(), descriptor, at, min(last + 1 - at, _SENT_AT_ONCE))
                if not sent:
                    raise ConnectionAbortedError("the file is short")
                at += sent
            if at > last:
                return

    def _ready(self, deadline: float) -> Iterator[None]:
        """Yields whenever the reader takes more; raises TimeoutError if it has not taken all by the deadline."""
        # The socket's own sendfile bounds each silence only: a reader of a few bytes at a time would keep its place.
        silence_s = self._clock.timing.peer_silence_s
        self._connection.settimeout(silence_s)
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        while self._clock.monotonic() < deadline and poll.poll(silence_s * 1000):
            yield
        raise TimeoutError("the reader is too slow")

    def _send(self, data: bytes) -> None:
        self._connection.settimeout(self._clock.timing.peer_silence_s)
        self._connection.sendall(data)


def _head(status: str, length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{more}\r\n".encode()
