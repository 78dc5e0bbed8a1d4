"""Bad configuration: one clear error that names the key, its value and what is allowed; nothing is done."""

from typing import Literal, get_args, get_origin, get_type_hints

import botocore.session
import pytest
import torch
from omegaconf import OmegaConf
from support.bad_input import state

from tiered_checkpoint_io import TieredCheckpointIO, from_config
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import NOT_OF_IO, keys
from tiered_checkpoint_io.model.s3_options import S3Options

S3 = {"dirpath": "s3://bucket/run"}
#: A key, a value that it must not have, what the error says is allowed, and what else is configured.
BAD = [
    ("dirpath", "", "an S3 URL, another fsspec URL, or a directory", {}),
    ("dirpath", 7, "an S3 URL, another fsspec URL, or a directory", {}),
    ("dirpath", {"dirpath": "s3://bucket/run"}, "from_config(...) takes a whole block", {}),
    ("dirpath", "s3://", "s3://bucket/prefix", {}),
    ("dirpath", "s3://a*b/run", "letters, digits", {}),
    ("dirpath", " s3://bucket/run", "write s3://bucket/run", {}),
    ("dirpath", '"s3://bucket/run"', "without quotes", {}),
    ("dirpath", "None", "write it as s3://bucket/prefix", {}),
    ("dirpath", "${BUCKET}/run", "write its value", {}),
    ("dirpath", "s3://bucket/$USER/run", "${oc.env:NAME}", {}),
    ("dirpath", "s3//bucket/run", "write s3://bucket/run", {}),
    ("dirpath", "s3a://bucket/run", "write s3://bucket/run", {}),
    ("dirpath", "gs:/bucket/run", "write gs://bucket/run", {}),
    ("dirpath", "file://data/run", "write three slashes, as in file:///data/run", {}),
    ("dirpath", "file:/data/run", "write file:///data/run", {}),
    ("dirpath", "https://bucket.s3.amazonaws.com/run", "write s3://bucket/run", {}),
    ("dirpath", "https://b.c.s3.eu-west-1.amazonaws.com/run", "write s3://b.c/run, with region: eu-west-1", {}),
    ("dirpath", "https://s3.eu-west-1.amazonaws.com/bucket/run/", "s3://bucket/run, with region: eu-west-1", {}),
    ("dirpath", "https://s3-eu-west-1.amazonaws.com/bucket", "write s3://bucket, with region: eu-west-1", {}),
    ("dirpath", "http://host:9000/bucket/run", "s3://bucket/run, with endpoint_url: http://host:9000", {}),
    ("dirpath", "https://host", "write s3://bucket/prefix", {}),
    ("namespace", "", "letters, digits, '_' and '-'", {}),
    ("namespace", "a/b", "letters, digits, '_' and '-'", {}),
    ("namespace", "a\n", "letters, digits, '_' and '-'", {}),
    ("namespace", "ü", "letters, digits, '_' and '-'", {}),
    ("namespace", "x" * 129, "1 to 128 letters", {}),
    ("namespace", 7, "letters, digits, '_' and '-'", {}),
    ("memory_dir", "shm", "an absolute path", {}),
    ("memory_dir", "", "an absolute path", {}),
    ("memory_every_n_train_steps", 0, "whole number from 1", {}),
    ("s3_every_n_train_steps", -5, "whole number from 1", {}),
    ("s3_every_n_train_steps", "50", "whole number from 1", {}),
    ("memory_keep_last", 0, "1 to 1000", {}),
    ("memory_allocation_percentage", 19, "20 to 100", {}),
    ("memory_allocation_percentage", 101, "20 to 100", {}),
    ("memory_allocation_percentage", 50.0, "20 to 100", {}),
    ("chunk_size_MB", 7, "8 to 5120", {}),
    ("chunk_size_MB", 5121, "8 to 5120", {}),
    ("max_write_concurrency", 0, "'auto' or a whole number from 1 to 256", {}),
    ("max_write_concurrency", "many", "'auto' or a whole number from 1 to 256", {}),
    ("max_read_concurrency", 257, "'auto' or a whole number from 1 to 256", {}),
    ("enable_async_checkpointing", "yes", "true or false", {}),
    ("staging", "lazy", "eager, overlapped", {}),
    ("on_save_error", "ignore", "warn, raise", {}),
    ("safe_globals", "my.Class", "a list of names", {}),
    ("safe_globals", ["my.Class", "os.system()"], "a list of names", {}),
    ("safe_globals", ["Class"], "a list of names", {}),
    ("retention", "latest", "a mapping such as", {}),
    ("save_on_train_end", "no", "true or false", {}),
    ("preflight", "maybe", "error, warn, off", {}),
    ("log_dir", "", "text", {}),
    ("log_dir", 7, "text", {}),
    ("endpoint_url", "127.0.0.1:9000", "https:// or http://", S3),
    ("endpoint_url", "ftp://host", "https:// or http://", S3),
    ("endpoint_url", "", "text, or null", S3),
    ("region", 7, "text, or null", S3),
    ("profile", "", "text, or null", S3),
    ("s3_options", "aws:kms", "a mapping of boto3's names", S3),
    # What means nothing to the durable tier that is configured.
    ("endpoint_url", "http://host", "not an S3 URL", {}),
    ("region", "eu-central-1", "not an S3 URL", {"dirpath": "gs://bucket/run"}),
    ("replication_factor", 0, "1 to 64", {}),
    ("replication_factor", 65, "1 to 64", {}),
    ("replication_factor", True, "1 to 64", {}),
    ("spill_dir", "spill", "an absolute path on node-local disk", {}),
    ("spill_dir", 7, "an absolute path on node-local disk", {}),
]


@pytest.mark.parametrize(
    ("key", "value", "allowed", "others"), BAD, ids=[f"{key}={value!r:.20}" for key, value, *_ in BAD]
)
def test_a_bad_value(key, value, allowed, others, kept_by_all):
    block = {**kept_by_all.options, **others, key: value}
    makers = [TieredCheckpointIO.from_config, TieredModelCheckpoint.from_config, from_config]
    for make in [*makers, *([] if key in NOT_OF_IO else [lambda it: TieredCheckpointIO(**it)])]:
        with pytest.raises(ConfigError) as caught:
            make(block)
        error = caught.value
        assert str(error).startswith(f"{key} is {value!r}")
        assert allowed in error.hint
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("options", "said", "allowed"),
    [
        ({"ServerSideEncryption": "AES-256"}, "s3_options.ServerSideEncryption is 'AES-256'", "AES256, aws:kms, aws"),
        ({"SSEKMSKeyId": "key-1"}, "s3_options.SSEKMSKeyId is 'key-1'", "only with ServerSideEncryption aws:kms"),
        ({"SSEKMSKeyId": "k", "ServerSideEncryption": "AES256"}, "s3_options.SSEKMSKeyId is 'k'", "aws:kms"),
        ({"ExpectedBucketOwner": 111122223333}, "s3_options.ExpectedBucketOwner is 111122223333", "in quotes"),
        ({"RequestPayer": "owner"}, "s3_options.RequestPayer is 'owner'", "requester"),
        ({"ACL": "open"}, "s3_options.ACL is 'open'", "bucket-owner-full-control"),
        ({"StorageClass": ""}, "s3_options.StorageClass is ''", "text"),
        ({"StorageClass": "DEEP_ARCHIVE"}, "s3_options.StorageClass is 'DEEP_ARCHIVE'", "read at once"),
        ({"ChecksumAlgorithm": "MD5"}, "s3_options.ChecksumAlgorithm is 'MD5'", "CRC32, CRC32C, SHA1, SHA256"),
        ({"acl": "private"}, "unknown name 'acl' in s3_options", "did you mean 'ACL'?"),
        ({"server_side_encryption": "AES256"}, "unknown name", "did you mean 'ServerSideEncryption'?"),
        ({"Metadata": "x"}, "unknown name 'Metadata'", "known names: ServerSideEncryption, SSEKMSKeyId"),
    ],
)
def test_options_of_s3_are_checked_against_boto3s_names_and_values(options, said, allowed):
    with pytest.raises(ConfigError) as caught:
        TieredCheckpointIO.from_config({**S3, "s3_options": options})
    assert str(caught.value).startswith(said)
    assert allowed in caught.value.hint


def test_options_of_s3_have_names_and_values_that_boto3_knows():
    service = botocore.session.get_session().get_service_model("s3")
    hints = get_type_hints(S3Options)
    for request in ("PutObject", "CreateMultipartUpload", "CopyObject"):
        members = service.operation_model(request).input_shape.members
        for name, hint in hints.items():
            values = {value for of in get_args(hint) if get_origin(of) is Literal for value in get_args(of)}
            assert name in members
            assert values <= set(members[name].enum), name


def test_every_key_is_tried():
    assert {key for key, *_ in BAD} == set(keys())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dirpth", "dirpath"),
        ("memory_every_n_train_step", "memory_every_n_train_steps"),
        ("s3_every_n_steps", "s3_every_n_train_steps"),
        ("chunk_size_mb", "chunk_size_MB"),
        ("memory_allocation_percent", "memory_allocation_percentage"),
        ("max_write_concurency", "max_write_concurrency"),
    ],
)
def test_an_unknown_key_and_the_nearest_known_one(key, meant, kept_by_all):
    block = {**kept_by_all.options, key: 64}
    for make in (TieredCheckpointIO.from_config, lambda it: TieredCheckpointIO.from_config(OmegaConf.create(it))):
        with pytest.raises(ConfigError, match=rf"unknown key '{key}' \(value 64\).*did you mean '{meant}'\?"):
            make(block)
    with pytest.raises(ConfigError, match=f"did you mean '{meant}'"):
        TieredCheckpointIO(**block)


@pytest.mark.parametrize("block", [{}, {"dirpath": None}, {"dirpath": "???"}, OmegaConf.create({"dirpath": "???"})])
def test_no_dirpath(block, kept_by_all):
    with pytest.raises(ConfigError, match="dirpath is missing .* S3 URL, another fsspec URL, or a directory"):
        TieredCheckpointIO.from_config(block)
    assert TieredCheckpointIO.from_config(block, dirpath="s3://bucket").config.dirpath == "s3://bucket"


def test_the_whole_configuration_in_place_of_its_block(kept_by_all):
    whole = {"trainer": {"max_steps": "${nowhere}"}, "s3_checkpointing": kept_by_all.options}
    for make in (
        TieredCheckpointIO.from_config,
        TieredModelCheckpoint.from_config,
        lambda it: TieredCheckpointIO.from_config(OmegaConf.create(it)),
    ):
        with pytest.raises(ConfigError, match=r"the whole configuration.* pass cfg\.s3_checkpointing"):
            make(whole)


def test_what_is_no_block_and_what_cannot_be_resolved(kept_by_all):
    with pytest.raises(ConfigError, match="is a list .* a mapping, an OmegaConf block"):
        TieredCheckpointIO.from_config(["dirpath"])
    with pytest.raises(ConfigError, match="'nowhere' not found .* interpolations"):
        TieredCheckpointIO.from_config(OmegaConf.create({"dirpath": "${nowhere}/run"}))


def test_a_secret_in_the_endpoint_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="endpoint_url .* ordinary chain") as caught:
        TieredCheckpointIO(endpoint_url="http://user:s3cret@host", **S3)
    assert "s3cret" not in str(caught.value)


def test_paths_may_be_paths(tmp_path, memory_dir):
    from pathlib import Path

    io = TieredCheckpointIO(tmp_path / "d", memory_dir=Path(memory_dir), log_dir=tmp_path / "logs")
    io.save_checkpoint(state(1), "a.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "d" / "a.ckpt")["global_step"] == 1
    assert (tmp_path / "logs" / f"{io.config.namespace}_checkpointing.log").exists()
