"""A job's credentials are in no output, file or memory of it, after any failure."""

import contextlib
import io as std_io
import logging
import os
import secrets
import subprocess
import sys
import traceback
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from support.bad_input import state
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.logs import get_logger
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.nemo.s3_utils import S3Utils
from tiered_checkpoint_io.stores import open_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Traces:
    """All readable output, as one text for each place."""

    def __init__(self):
        self.texts = []
        self.handler = logging.StreamHandler(std_io.StringIO())
        self.handler.setLevel(logging.DEBUG)
        # With the handlers that it has otherwise, so that later tests find it as it was.
        self.logger = get_logger("any").logger
        self.level = self.logger.level

    def __enter__(self):
        # Libraries' own debugging is theirs: boto3's shows the text that it signs.
        self.logger.addHandler(self.handler)
        self.logger.setLevel(logging.DEBUG)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self.handler)
        self.logger.setLevel(self.level)

    def add(self, where, *things):
        self.texts += [(where, each if isinstance(each, str) else f"{each!r} {each}") for each in things]

    def error(self, error):
        chain, seen = [], error
        while seen is not None:
            chain += [str(seen), repr(seen), repr(seen.args), repr(getattr(seen, "failures", ""))]
            seen = seen.__cause__ or seen.__context__
        self.add(f"error {type(error).__name__}", *chain, "".join(traceback.format_exception(error)))

    @contextlib.contextmanager
    def failing(self, *kinds):
        with pytest.raises(kinds or Exception) as caught:
            yield
        self.error(caught.value)

    def folder(self, folder):
        for path in Path(folder).rglob("*"):
            with contextlib.suppress(OSError):
                self.add(str(path), str(path), path.read_bytes().decode("latin-1") if path.is_file() else "")

    def bucket(self, server, url):
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        for entry in server.client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ()):
            body = server.client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read()
            self.add(entry["Key"], entry["Key"], body.decode("latin-1"))

    def command(self, *words):
        command = [sys.executable, "-m", "tiered_checkpoint_io", *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        self.add(f"command {words[0]}", done.stdout, done.stderr)
        return done

    def everything(self):
        return [*self.texts, ("log", self.handler.stream.getvalue())]

    def lines_with(self, text):
        return [where for where, said in self.everything() if text in said]


@pytest.fixture
def traces(capfd):
    with Traces() as traces:
        yield traces
    captured = capfd.readouterr()
    traces.add("output", captured.out, captured.err)


def invented():
    """Returns a key like AWS' own, with characters that have a meaning in URLs."""
    return f"{secrets.token_hex(8)}/{secrets.token_hex(4)}+{secrets.token_hex(8)}"


@pytest.mark.matrix
@pytest.mark.timeout(120)
def test_no_secret_anywhere(traces, s3_server, s3_url, memory_dir, tmp_path, monkeypatch):
    wrong, token, password = invented(), invented(), invented()
    hidden = [s3_server.secret_key, wrong, token, password, quote(wrong, safe=""), quote(password, safe="")]
    options = {"dirpath": s3_url, "memory_dir": memory_dir, "log_dir": str(tmp_path / "logs"), "wait_timeout_s": 30}
    root = Path(memory_dir) / f"tiered-{os.getuid()}"

    # A life in which all is well.
    io = build(TieredCheckpointIO, **options, on_save_error="raise")
    io.save_checkpoint(state(1), "1.ckpt")
    io.save_checkpoint(state(2), "2.ckpt", storage_options={"tiers": ["memory"]})
    io.checkpointer.alias("last.ckpt", "1.ckpt")
    io.load_checkpoint("tiered:latest")
    made = io.checkpointer
    session = made.session
    traces.add(
        "objects", io, io.config, io.config.to_json(), made, made.restored, made.session.counts, made.session.asked
    )
    traces.add(
        "objects", session, session.open(), session.durable(), session.last_save, made.session.poll(), vars(session)
    )
    traces.add("objects", TieredModelCheckpoint.from_config(io.config), vars(session.durable()))
    io.teardown()
    writer = build(TieredStorageWriter, **options, save_to_s3=True, wait=True)
    dcp.save({"w": torch.ones(4)}, checkpoint_id="step_3", storage_writer=writer)
    traces.add("objects", writer, vars(writer))
    writer.close()
    build(dcp.load, {"w": torch.zeros(4)}, **options)
    close_shared(build(settings_of, None, options))
    for words in (["status", "--memory-dir", memory_dir], ["ls", s3_url], ["verify", s3_url]):
        assert traces.command(*words).returncode == 0
    traces.command("flush", "--memory-dir", memory_dir)
    traces.folder(memory_dir)

    # One in which the server takes none of the credentials.
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    failing = build(TieredCheckpointIO, **options, namespace="failing", on_save_error="raise")
    with traces.failing(TieredCheckpointError):
        failing.save_checkpoint(state(4), "4.ckpt")
    traces.add("objects", failing.checkpointer.session.counts, failing.checkpointer.session.poll())
    traces.add("outcomes", *failing.checkpointer.session.open().drain.queue.outcomes())
    traces.folder(memory_dir)
    with traces.failing(TieredCheckpointError):
        failing.load_checkpoint("1.ckpt")
    with traces.failing(TieredCheckpointError):
        failing.teardown()
    assert traces.command("ls", s3_url).returncode == 1
    traces.command("status", "--memory-dir", memory_dir, "--namespace", "failing")
    with traces.failing(TieredCheckpointError):
        creds = {"AccessKeyId": "AKIA1", "SecretAccessKey": wrong, "SessionToken": token}
        S3Utils.download_s3_file_to_stream(f"{s3_url}/1.ckpt", creds=creds)

    # Secrets in wrong places, which must not be repeated.
    store = f"{s3_url}?X-Amz-Credential=a&X-Amz-Signature={password}&X-Amz-Security-Token={token}"
    for dirpath in (
        f"s3://AKIA1:{password}@bucket/run",
        f"sftp://user:{password}@host/run",
        f"https://host/run?X-Amz-Signature={quote(password, safe='')}",
        store,
    ):
        with traces.failing(ConfigError):
            build(TieredCheckpointIO, **{**options, "dirpath": dirpath})
        with traces.failing(ConfigError):
            made.load(f"{dirpath}/1.ckpt")
    assert traces.command("ls", dirpath).returncode == 2
    for endpoint in (f"http://user:{password}@host", f"user:{password}@host", f"https://host/?token={token}"):
        with traces.failing(ConfigError):
            build(TieredCheckpointIO, **options, endpoint_url=endpoint)
    assert traces.command("ls", s3_url, "--endpoint-url", endpoint).returncode == 2
    for block in ({"aws_secret_access_key": password}, {"storage_options": {"key": "a", "secret": password}}):
        with traces.failing(ConfigError):
            build(TieredCheckpointConfig.from_any, {**options, **block})
    for given in ({"key": "AKIA1", "secret": password, "token": token}, [password, token]):
        with traces.failing(TieredCheckpointError):
            io.save_checkpoint(state(5), "5.ckpt", storage_options=given if isinstance(given, dict) else {"s": given})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:{quote(password, safe='')}@127.0.0.1:9")
    with traces.failing(StoreError):
        open_store(io.config)

    monkeypatch.undo()
    traces.bucket(s3_server, s3_url)
    for folder in (memory_dir, tmp_path):
        traces.folder(folder)
    for secret in hidden:
        assert traces.lines_with(secret) == []
    # All places were read.
    assert {"log", "command ls", str(next(root.glob("*/drain.json")))} <= set(traces.lines_with(s3_url))
    assert "command status" in traces.lines_with("4.ckpt")
    assert [
        where
        for where in traces.lines_with("SignatureDoesNotMatch") + traces.lines_with("HTTP 403")
        if "error" in where
    ]
    assert traces.lines_with(f"{s3_url.partition('//')[2].partition('/')[2]}/.tiered/manifests/1.ckpt.json")
    assert {"failing/status/drain.log" in where for where, _ in traces.texts} == {True, False}
