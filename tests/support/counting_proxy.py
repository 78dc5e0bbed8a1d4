"""A TCP proxy in front of an HTTP server that counts requests, and the bytes that come back."""

import contextlib
import re
import socket
import threading
from urllib.parse import urlsplit

_LENGTH = re.compile(rb"^content-length:\s*(\d+)", re.IGNORECASE | re.MULTILINE)


class CountingProxy:
    """A context manager; ``requests`` holds ``(method, target)``, ``bytes_down`` counts answers whole."""

    def __init__(self, endpoint_url, port=0):
        parts = urlsplit(endpoint_url)
        self._server = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._lock = threading.Lock()
        self._sockets = []
        self._threads = []
        self.requests = []
        self.bytes_down = 0

    @property
    def endpoint_url(self):
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def count(self, method, text):
        """Requests of a method whose target holds ``text``."""
        return sum(1 for each, target in self.requests if each == method and text in target)

    def __enter__(self):
        self._start(self._accept)
        return self

    def __exit__(self, *_):
        self._close(self._listener)
        with self._lock:
            sockets = list(self._sockets)
        for each in sockets:
            self._close(each)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def _start(self, work, *arguments):
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    @staticmethod
    def _close(each):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                with self._lock:
                    self._sockets += [client, server]
                self._start(self._upwards, client, server)
                self._start(self._downwards, server, client)

    def _upwards(self, client, server):
        with contextlib.suppress(OSError):
            pending = b""
            while True:
                while b"\r\n\r\n" not in pending:
                    piece = client.recv(1 << 16)
                    if not piece:
                        server.shutdown(socket.SHUT_WR)
                        return
                    pending += piece
                head, _, pending = pending.partition(b"\r\n\r\n")
                method, target, _ = head.split(b"\r\n", 1)[0].decode().split(" ", 2)
                with self._lock:
                    self.requests.append((method, target))
                server.sendall(head + b"\r\n\r\n")
                match = _LENGTH.search(head)
                left = int(match[1]) if match else 0
                while left:
                    piece = pending[:left] or client.recv(min(left, 1 << 16))
                    if not piece:
                        return
                    pending = pending[len(piece) :]
                    server.sendall(piece)
                    left -= len(piece)

    def _downwards(self, server, client):
        with contextlib.suppress(OSError):
            while piece := server.recv(1 << 18):
                with self._lock:
                    self.bytes_down += len(piece)
                client.sendall(piece)
            client.shutdown(socket.SHUT_WR)
