"""The storing S3 server in a process of its own, as benchmarks start it.

::

    with StoringServer() as server:  # has the bucket "bench"
        client = boto3.client("s3", endpoint_url=server.url, **server.credentials)
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import ClassVar


class StoringServer:
    """The server in a process of its own: a context manager. It ends with it, and with the process that started it.

    Attributes:
        url: Its endpoint.
        certificate: With ``tls``, the file of the certificate that clients have to trust; else "".
        credentials: Credentials with which boto3 signs; they are not checked.
    """

    credentials: ClassVar = {"aws_access_key_id": "bench", "aws_secret_access_key": "bench", "region_name": "us-east-1"}

    def __init__(self, *, tls: bool = False, elsewhere: bool = False) -> None:
        """Takes whether it is reached by TLS, and whether it has the lowest priority, as if on another machine."""
        self._elsewhere = elsewhere
        self.url, self.certificate = "", ""
        self._tls, self._folder = tls, tempfile.TemporaryDirectory(prefix="tiered-bench-")
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> StoringServer:  # noqa: PYI034 - Self needs Python 3.11
        command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
        if self._tls:
            self.certificate = certificate_in(self._folder.name)
            command.append(self.certificate)
        if self._elsewhere:
            command.append("--elsewhere")
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=self._elsewhere
        )
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        return self

    @property
    def pid(self) -> int:
        """Id of the server's process, whose CPU time a benchmark may look at."""
        assert self._process is not None
        return self._process.pid

    def figures(self) -> dict[str, int]:
        """Returns the number of answered requests so far, and of the bytes in their bodies."""
        trusted = ssl.create_default_context(cafile=self.certificate) if self._tls else None
        with urllib.request.urlopen(f"{self.url}/-figures", timeout=10, context=trusted) as answer:
            found: dict[str, int] = json.load(answer)
        return found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()
        self._folder.cleanup()


def certificate_in(folder: str) -> str:
    """The path of a file with a new key and its certificate for 127.0.0.1, good for a day."""
    path = os.path.join(folder, "server.pem")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-keyout", f"{path}.key", "-out", f"{path}.crt"], check=True, capture_output=True)
    with open(path, "w") as both:
        for ending in (".key", ".crt"):
            with open(path + ending) as part:
                both.write(part.read())
    return path
