"""Two S3 servers, one dirpath and one namespace: a save for one server never reaches the other."""

import io
import os

import boto3
import pytest
import torch
from support.draining import Node
from support.rclone_server import RcloneServer
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place, endpoint_text
from tiered_checkpoint_io.stores import place_of


@pytest.fixture
def servers(s3_server, s3_bucket, tmp_path):
    """Yields the server of other tests, and a second one with the same keys and a bucket of the same name."""
    (tmp_path / "second").mkdir()
    second = RcloneServer(tmp_path / "second")
    second.access_key, second.secret_key = s3_server.access_key, s3_server.secret_key
    with second:
        second.make_bucket(s3_bucket)
        yield s3_server, second


def checkpoints_on(server, bucket):
    """Returns the files and the manifests below the dirpath."""
    keys = [entry["Key"] for entry in server.client.list_objects_v2(Bucket=bucket, Prefix="run/").get("Contents", ())]
    files = {key.removeprefix("run/") for key in keys if "/.tiered/" not in key}
    return files, {key.rpartition("/")[2] for key in keys if "/manifests/" in key}


def test_a_queued_save_goes_to_the_server_of_its_job_alone(servers, s3_bucket, memory_dir, caplog):
    first, second = servers
    dirpath, saved = f"s3://{s3_bucket}/run", io.BytesIO()

    def job(endpoint_url):
        options = {"dirpath": dirpath, "namespace": "two-servers", "endpoint_url": endpoint_url}
        options |= {"memory_dir": memory_dir, "drain": "thread", "wait_timeout_s": 60, "durable_timeout_s": 1}
        return Checkpointer(build(TieredCheckpointConfig.from_any, **options))

    # A job that died before its drain had begun.
    torch.save({"global_step": 7, "w": torch.ones(100)}, saved)
    node = Node(memory_dir, dirpath, namespace="two-servers", endpoint_url=first.endpoint_url)
    node.save("x.ckpt", saved.getvalue())
    node.alias("last.ckpt", "x.ckpt")
    # The newer job neither takes the other's checkpoint nor has anything of it on its server.
    newer = job(second.endpoint_url)
    assert isinstance(newer.load("tiered:latest"), NoCheckpoint)
    newer.save({"global_step": 1, "w": torch.zeros(100)}, "y.ckpt", wait=True)
    assert newer.load("tiered:latest")["global_step"] == 1
    newer.close()
    assert f"to take it, set endpoint_url to {first.endpoint_url}" in caplog.text
    with pytest.raises(StoreError, match="has not answered for 1 s.*endpoint_url"):
        job("http://127.0.0.1:9").load("tiered:latest")
    assert checkpoints_on(first, s3_bucket) == ({"x.ckpt"}, {"x.ckpt.json", "last.ckpt.json"})
    assert checkpoints_on(second, s3_bucket) == ({"y.ckpt"}, {"y.ckpt.json"})
    restarted = job(first.endpoint_url)
    assert restarted.load("tiered:latest")["global_step"] == 7
    restarted.close()


def test_the_server_is_named_as_boto3_finds_it(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "config").write_text(
        "[profile a]\nendpoint_url = http://a\nregion = eu-west-1\n"
        "[profile b]\nservices = mine\n[services mine]\ns3 =\n  endpoint_url = http://B:1/\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    cases = [({}, ""), ({"profile": "a"}, "http://a"), ({"profile": "b"}, "http://b:1"), ({"profile": "c"}, "")]
    cases += [({"profile": "a", "endpoint_url": "https://X/"}, "https://x")]
    for options, endpoint_url in cases:
        config = TieredCheckpointConfig(dirpath="s3://bucket/run", **options)
        server = place_of(config).server
        assert (server.endpoint_url, server.profile) == (endpoint_url, options.get("profile", ""))
        if options.get("profile") in ("a", "b"):
            asked = boto3.session.Session(profile_name=options["profile"], region_name="x")
            given = asked.client("s3", endpoint_url=config.endpoint_url).meta.endpoint_url
            assert endpoint_text(given) == endpoint_url
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert place_of(TieredCheckpointConfig(dirpath="s3://bucket/run", profile="a")).server.endpoint_url == ""
    assert place_of(TieredCheckpointConfig(dirpath="/a/folder")) == Place("/a/folder")
