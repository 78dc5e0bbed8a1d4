"""Each file of deploy/: what it allows is enough, and each part of it is asked for."""

import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from string import Template

import pytest
import torch
from support.documented import verified
from support.iam import Judge
from support.store_contract import MemoryJournal
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.s3 import MIB, S3Store
from tiered_checkpoint_io.stores.s3_errors import NEEDS

DEPLOY = Path(__file__).parents[2] / "deploy"
ACCOUNT, OWNER, ROLE, REGION, BUCKET = "111122223333", "444455556666", "trainer", "us-east-1", "bucket"
KEY_ARN = f"arn:aws:kms:{REGION}:{OWNER}:key/11111111-2222-3333-4444-555555555555"
OBJECT_ACTIONS = [
    *("s3:AbortMultipartUpload", "s3:DeleteObject", "s3:GetObject"),
    *("s3:ListMultipartUploadParts", "s3:PutObject"),
]
SERVER = ("endpoint_url", "s3_options")
ACTIONS = ["s3:ListBucket", "s3:ListBucketMultipartUploads", *OBJECT_ACTIONS]


def document(name, prefix="run"):
    filled = Template((DEPLOY / name).read_text()).substitute(
        BUCKET=BUCKET,
        PREFIX=prefix,
        ACCOUNT=ACCOUNT,
        KEY_ACCOUNT=OWNER,
        ROLE=ROLE,
        REGION=REGION,
        KEY_ARN=KEY_ARN,
    )
    return json.loads(filled)


@pytest.fixture
def s3_server(moto, use_server):
    """Uses moto, which knows keys of KMS, with a bucket of the name in the policy files."""
    moto.make_bucket(BUCKET)
    yield use_server(moto)
    moto.remove_bucket(BUCKET)


class Job:
    """A job whose requests are judged."""

    def __init__(self, proxy, memory_dir, *documents, prefix, **options):
        self.judge = Judge(*documents, account=ACCOUNT, region=REGION, role=ROLE, key_arn=KEY_ARN)
        proxy.plan = self.judge.plan
        self.url = f"s3://{BUCKET}/{prefix}"
        self.options = {
            "dirpath": self.url,
            "memory_dir": memory_dir,
            "drain": "thread",
            "on_save_error": "raise",
            "endpoint_url": proxy.endpoint_url,
            "chunk_size_MB": 8,
            "wait_timeout_s": 30,
            **options,
        }
        self.made = []

    def io(self, **options):
        self.made.append(build(TieredCheckpointIO, **{**self.options, **options}))
        return self.made[-1]

    def trains(self):
        """Saves in parts, overwrites, aliases, deletes, restores on another node, and renews its lease."""
        io = self.io()
        io.save_checkpoint(state(1), "a.ckpt")
        io.save_checkpoint(state(2), "b.ckpt")
        io.save_checkpoint(state(3), "b.ckpt")
        io.checkpointer.session.wait()
        io.remove_checkpoint("a.ckpt")
        io.checkpointer.session.wait()
        io.teardown()
        self.restores(3)
        with pytest.raises(TieredCheckpointError):
            self.io(namespace="third").load_checkpoint("a.ckpt")

    def restores(self, step):
        io = self.io(namespace=f"node-{secrets.token_hex(4)}")
        assert io.load_checkpoint("tiered:latest")["global_step"] == step
        assert io.checkpointer.restored.tier == "durable"
        io.teardown()

    def tidies(self):
        """Takes an upload up again that broke off, copies, and finds and aborts what a dead node left."""
        config = build(TieredCheckpointConfig, dirpath=self.url, **{key: self.options.get(key) for key in SERVER})
        store = S3Store.from_config(replace(config, chunk_size_MB=8), self.url)
        try:
            data, journal = memoryview(bytes(20 * MIB)), MemoryJournal()
            begun = store._client.ask("create_multipart_upload", "x", config.s3_options or {})["UploadId"]
            noted = {"url": store.url, "key": "x", "upload_id": begun, "size": len(data), "part_size": 8 * MIB}
            journal.write({**noted, "mark": "m", "origin": ""})
            store.upload("x", data, journal=journal)
            # In parts, as what is large: these are asked after before the copy appears.
            store._copy_whole = store._copy_part = 8 * MIB
            store.copy("x", "y", len(data), check=lambda: None)
            store._client.ask("create_multipart_upload", "z", {})
            assert store.abort_stale_uploads() == 1
            store.delete_all(["x", "y"])
            assert not list(store.list("x"))
        finally:
            store.close()

    def ends(self):
        for io in self.made:
            try:
                io.teardown()
            except TieredCheckpointError:
                pass


def state(step):
    return {"w": torch.arange(3.0 * MIB) + step, "global_step": step}


@pytest.fixture
def job(proxy, memory_dir):
    jobs = []

    def start(*documents, **options):
        jobs.append(Job(proxy, memory_dir, *documents, **{"prefix": "run", **options}))
        return jobs[-1]

    yield start
    proxy.plan = lambda *_: None
    for each in jobs:
        each.ends()


def test_the_rights_to_train_are_enough_and_none_is_idle(job):
    training = job(document("iam/train.json"))
    training.trains()
    training.tidies()
    assert training.judge.used == set(ACTIONS)
    # Errors name no other, and know all.
    assert {action for actions in NEEDS.values() for action in actions} == set(ACTIONS)


def test_rights_to_train_end_at_the_prefix(job):
    training = job(document("iam/train.json"), prefix="another")
    with pytest.raises(TieredCheckpointError, match="AccessDenied"):
        training.trains()


@pytest.mark.matrix
def test_the_rights_to_evaluate_are_to_read_and_no_more(job):
    training = job(document("iam/train.json"))
    training.trains()
    reading = job(document("iam/evaluate.json"))
    reading.restores(3)
    done = CliRunner().invoke(app, ["verify", reading.url, "--endpoint-url", reading.options["endpoint_url"]])
    assert (done.exit_code, done.stdout) == (0, verified(("intact", "durable", "b.ckpt")))
    assert reading.judge.used == {"s3:ListBucket", "s3:GetObject"}
    with pytest.raises(TieredCheckpointError, match="AccessDenied"):
        reading.io(namespace="another").save_checkpoint(state(4), "c.ckpt")


@pytest.mark.matrix
def test_a_bucket_of_another_account_with_a_key_lets_the_role_in_and_no_other(job):
    train, kms, key = (document(f"iam/{name}.json") for name in ("train", "kms", "kms-key-policy"))
    owner = document("iam/cross-account-bucket-policy.json")
    # An identity has both of its files.
    identity = {**train, "Statement": [*train["Statement"], *kms["Statement"]]}
    training = job(identity, owner, key, s3_options={"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": KEY_ARN})
    training.trains()
    training.tidies()
    assert training.judge.used == {*ACTIONS, "kms:Decrypt", "kms:GenerateDataKey"}
    assert sorted(action for each in owner["Statement"] for action in each["Action"]) == sorted(ACTIONS)
    for keeper in (owner, key):
        training.judge.documents = (identity, keeper)
        training.judge.principal = f"arn:aws:iam::{ACCOUNT}:role/another"
        with pytest.raises(TieredCheckpointError, match="AccessDenied"):
            training.restores(3)


@pytest.mark.matrix
def test_a_vpc_endpoint_lets_through_what_trains_and_no_more(job):
    everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    endpoint = document("vpc-endpoint-policy.json")
    training = job(everything, endpoint)
    training.trains()
    training.tidies()
    training.judge.context["aws:PrincipalAccount"] = OWNER
    with pytest.raises(TieredCheckpointError, match="AccessDenied"):
        training.restores(3)
    with pytest.raises(TieredCheckpointError, match="AccessDenied"):
        job(everything, endpoint, prefix="others").trains()


def test_the_readme_describes_each_file_and_each_name_to_fill_in():
    said = (DEPLOY / "README.md").read_text()
    for file in (*DEPLOY.glob("*.json"), *(DEPLOY / "iam").glob("*.json")):
        assert f"`{file.relative_to(DEPLOY)}`" in said
        for name in re.findall(r"\$\{(\w+)\}", file.read_text()):
            assert f"`{name}`" in said
