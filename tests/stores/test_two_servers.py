"""Two S3 servers, one dirpath and one namespace: what was saved for one server never reaches the other."""

import ast
import json
import os
import textwrap

import boto3
import pytest
from rclone_server import RcloneServer
from support.launch import scripts

from tiered_checkpoint_io.engine.drain.locks import release, try_lock
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.place import Place, Server, endpoint_text
from tiered_checkpoint_io.stores import place_of

NAMESPACE = "two-servers"
DEADLINE_S = 90
SCRIPT = """
import json, os, sys
import torch
from support.supporting import build
from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

options, steps = json.loads(sys.argv[1]), json.loads(sys.argv[2])
job = Checkpointer(build(TieredCheckpointConfig.from_any, **options))
for number, (what, *names) in enumerate(steps):
    if what in ("save", "queue"):
        state = {"global_step": number, "who": options["dirpath"], "w": torch.full((100,), float(number))}
        job.save(state, *names, wait=what == "save")
    elif what == "alias":
        job.alias(*names)
    elif what == "load":
        found = job.load("tiered:latest")
        print("LOADED", None if isinstance(found, NoCheckpoint) else found["global_step"])
    elif what == "die":
        os._exit(0)
job.close()
"""


@pytest.fixture
def servers(s3_server, s3_bucket, tmp_path):
    """The server of other tests, and a second one with the same keys and a bucket of the same name."""
    (tmp_path / "second").mkdir()
    second = RcloneServer(tmp_path / "second")
    second.access_key, second.secret_key = s3_server.access_key, s3_server.secret_key
    with second:
        second.make_bucket(s3_bucket)
        yield s3_server, second


class Job:
    """Starts processes of jobs that share all but the server."""

    def __init__(self, url, memory_dir, tmp_path):
        self.url, self.memory_dir = url, memory_dir
        self.script = tmp_path / "job.py"
        self.script.write_text(textwrap.dedent(SCRIPT))
        self.root = MemoryTier.open(memory_dir, NAMESPACE).root

    def on(self, server, *steps, by="configuration"):
        options = {"dirpath": self.url, "namespace": NAMESPACE, "memory_dir": self.memory_dir, "wait_timeout_s": 60}
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_ENDPOINT")}
        if by == "configuration":
            options["endpoint_url"] = server.endpoint_url
        elif by == "profile":
            path = self.script.with_name("aws-config")
            path.write_text(f"[profile there]\nendpoint_url = {server.endpoint_url}\n")
            env |= {"AWS_CONFIG_FILE": str(path)}
            options["profile"] = "there"
            keys = self.script.with_name("aws-keys")
            keys.write_text(
                f"[there]\naws_access_key_id = {server.access_key}\naws_secret_access_key = {server.secret_key}\n"
            )
            env |= {"AWS_SHARED_CREDENTIALS_FILE": str(keys)}
        else:
            env[by] = server.endpoint_url
        arguments = [json.dumps(options), json.dumps(steps)]
        (done,) = scripts(self.script.parent, self.script, (arguments, env), deadline_s=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        self.said = done.stderr
        return [ast.literal_eval(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("LOADED")]

    def leaves_queued(self, server, *steps, by="configuration"):
        """As :meth:`on`, where the job dies before its drain has begun."""
        lock = try_lock(self.root / LOCK_FILE)
        try:
            return self.on(server, *steps, ["die"], by=by)
        finally:
            release(lock)


@pytest.fixture
def job(s3_bucket, memory_dir, tmp_path):
    return Job(f"s3://{s3_bucket}/run", memory_dir, tmp_path)


def names_on(server, bucket):
    listed = server.client.list_objects_v2(Bucket=bucket).get("Contents", ())
    return {entry["Key"].removeprefix("run/") for entry in listed if "/.tiered/" not in entry["Key"]}


def manifests_on(server, bucket):
    listed = server.client.list_objects_v2(Bucket=bucket, Prefix="run/.tiered/manifests/").get("Contents", ())
    return {entry["Key"].rpartition("/")[2] for entry in listed}


@pytest.mark.parametrize(
    "by",
    [
        "configuration",
        pytest.param("AWS_ENDPOINT_URL_S3", marks=pytest.mark.matrix),
        pytest.param("AWS_ENDPOINT_URL", marks=pytest.mark.matrix),
        pytest.param("profile", marks=pytest.mark.matrix),
    ],
)
def test_a_queued_save_goes_to_the_server_of_its_job_alone(servers, job, s3_bucket, by):
    first, second = servers
    job.leaves_queued(first, ["queue", "x.ckpt"], ["alias", "last.ckpt", "x.ckpt"], by=by)
    # The newer job neither takes the other's checkpoint nor has anything of it on its server.
    assert job.on(second, ["load"], ["save", "y.ckpt"], ["load"], by=by) == [None, 1]
    assert f"memory holds checkpoints of {job.url} at {first.endpoint_url}: they are another job's" in job.said
    assert names_on(first, s3_bucket) == {"x.ckpt"}
    assert manifests_on(first, s3_bucket) == {"x.ckpt.json", "last.ckpt.json"}
    assert names_on(second, s3_bucket) == {"y.ckpt"}
    assert manifests_on(second, s3_bucket) == {"y.ckpt.json"}
    # The first job's own restart takes its own.
    assert job.on(first, ["load"], by=by) == [0]


@pytest.mark.matrix
def test_which_server_is_told_as_boto3_finds_it(monkeypatch, tmp_path):
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


def test_a_server_is_told_without_secrets():
    assert endpoint_text("https://user:password@Host:9000/?key=secret") == "https://host:9000"
    assert Server("http://a", "eu", "p") == Server("http://a", "us", "q") != Server("http://b", "eu", "p")
