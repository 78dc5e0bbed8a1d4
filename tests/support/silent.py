"""An S3 server that takes connections, and never answers."""

import contextlib
import socket


@contextlib.contextmanager
def silent_server(monkeypatch):
    """Yields a silent server's endpoint, with credentials in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
