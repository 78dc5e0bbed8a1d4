"""Bad configuration and other bad input of a user: one clear error that says what is allowed; nothing is lost."""

from functools import partial
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from support.bad_input import KEPT, state
from support.supporting import build
from support.training import Model, Runs

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, from_config
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, RestoreError
from tiered_checkpoint_io.model.config import NOT_OF_IO, keys

S3, PLAIN = {"dirpath": "s3://bucket/run"}, {"dirpath": "/a/folder", "memory_dir": "/dev/shm"}
#: A key, what the error says is allowed, what else is configured, and values that it must not have.
BAD = [
    ("dirpath", "an S3 URL, another fsspec URL, or a directory", {}, [" ", 7]),
    ("dirpath", "from_config(...) takes a whole block", {}, [{"dirpath": "s3://bucket/run"}]),
    ("dirpath", "s3://bucket/prefix", {}, ["s3://"]),
    ("dirpath", "letters, digits", {}, ["s3://a*b/run"]),
    ("dirpath", "write s3://bucket/run", {}, [" s3://bucket/run", "s3//bucket/run", "s3a://bucket/run"]),
    ("dirpath", "without quotes", {}, ['"s3://bucket/run"']),
    ("dirpath", "write it as s3://bucket/prefix", {}, ["None"]),
    ("dirpath", "write its value", {}, ["${BUCKET}/run"]),
    ("dirpath", "${oc.env:NAME}", {}, ["s3://bucket/$USER/run"]),
    ("dirpath", "write gs://bucket/run, as text: a Path loses a slash", {}, ["gs:/bucket/run"]),
    ("dirpath", "write three slashes, as in file:///data/run", {}, ["file://data/run"]),
    ("dirpath", "write file:///data/run", {}, ["file:/data/run"]),
    ("dirpath", "write s3://bucket/prefix", {}, ["https://bucket.s3.amazonaws.com/run", "http://host:9000/bucket/run"]),
    ("namespace", "letters, digits, '_' and '-'", {}, ["", "a/b", "a\n", "ü", 7]),
    ("namespace", "1 to 128 letters", {}, ["x" * 129]),
    ("memory_dir", "an absolute path", {}, ["shm", ""]),
    ("memory_every_n_train_steps", "whole number from 1", {}, [0]),
    ("s3_every_n_train_steps", "whole number from 1", {}, [-5, "50"]),
    ("memory_keep_last", "1 to 1000", {}, [0]),
    ("memory_allocation_percentage", "20 to 100", {}, [19, 101, 50.0]),
    ("chunk_size_MB", "8 to 5120", {}, [7, 5121]),
    ("max_write_concurrency", "'auto' or a whole number from 1 to 256", {}, [0, "many"]),
    ("max_read_concurrency", "'auto' or a whole number from 1 to 256", {}, [257]),
    ("enable_async_checkpointing", "true or false", {}, ["yes"]),
    ("staging", "eager, overlapped", {}, ["lazy"]),
    ("on_save_error", "warn, raise", {}, ["ignore"]),
    ("safe_globals", "a list of names", {}, ["my.Class", ["my.Class", "os.system()"], ["Class"]]),
    ("retention", "a mapping such as", {}, ["latest"]),
    ("save_on_train_end", "true or false", {}, ["no"]),
    ("preflight", "error, warn, off", {}, ["maybe"]),
    ("log_dir", "text", {}, ["", 7]),
    ("endpoint_url", "https:// or http://", S3, ["127.0.0.1:9000", "ftp://host"]),
    ("endpoint_url", "text, or null", S3, [""]),
    ("region", "text, or null", S3, [7]),
    ("profile", "text, or null", S3, [""]),
    ("s3_options", "a mapping of boto3's names", S3, ["aws:kms"]),
    # Options without a meaning for the configured durable tier.
    ("endpoint_url", "dirpath is /a/folder; a bucket is s3://bucket/run", {}, ["http://host"]),
    ("region", "dirpath is gs://bucket/run", {"dirpath": "gs://bucket/run"}, ["eu-central-1"]),
    ("replication_factor", "1 to 64", {}, [0, 65, True]),
    ("spill_dir", "an absolute path on node-local disk", {}, ["spill", 7]),
]


CASES = [(key, allowed, others, value) for key, allowed, others, values in BAD for value in values]


@pytest.mark.parametrize(
    ("key", "allowed", "others", "value"), CASES, ids=[f"{key}={value!r:.20}" for key, *_, value in CASES]
)
def test_a_bad_value(key, allowed, others, value):
    block = {**PLAIN, **others, key: value}
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


def test_every_key_is_tried():
    assert {key for key, *_ in BAD} == set(keys())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("dirpth", "dirpath"),
        ("chunk_size_mb", "chunk_size_MB"),
        ("max_write_concurency", "max_write_concurrency"),
    ],
)
def test_an_unknown_key_and_the_nearest_known_one(key, meant):
    block = {**PLAIN, key: 64}
    for make in (from_config, lambda it: from_config(OmegaConf.create(it)), lambda it: TieredCheckpointIO(**it)):
        with pytest.raises(ConfigError, match=rf"unknown key '{key}' \(value 64\).*did you mean '{meant}'\?"):
            make(block)


@pytest.mark.parametrize("make", [TieredModelCheckpoint, partial(from_config, PLAIN)])
def test_an_unknown_argument_of_the_callback_and_the_nearest_known_one(make):
    for wrong, meant in (("memory_every_n_steps", "memory_every_n_train_steps"), ("save_topk", "save_top_k")):
        with pytest.raises(ConfigError, match=rf"Checkpoint has no argument '{wrong}' — did you mean '{meant}'\?$"):
            make(**{wrong: 5})


@pytest.mark.parametrize("block", [{}, {"dirpath": None}, {"dirpath": ""}, OmegaConf.create({"dirpath": "???"})])
def test_no_dirpath(block):
    with pytest.raises(ConfigError, match="dirpath is missing .* S3 URL, another fsspec URL, or a directory"):
        TieredCheckpointIO.from_config(block)
    assert TieredCheckpointIO.from_config(block, dirpath="s3://bucket").config.dirpath == "s3://bucket"


def test_the_whole_configuration_in_place_of_its_block():
    whole = {"trainer": {"max_steps": "${nowhere}"}, "s3_checkpointing": PLAIN}
    for make in (from_config, TieredModelCheckpoint.from_config, lambda it: from_config(OmegaConf.create(it))):
        with pytest.raises(ConfigError, match=r"the whole configuration.* pass cfg\.s3_checkpointing"):
            make(whole)


def test_what_is_no_block_and_what_cannot_be_resolved():
    with pytest.raises(ConfigError, match="is a list .* a mapping, an OmegaConf block"):
        TieredCheckpointIO.from_config(["dirpath"])
    with pytest.raises(ConfigError, match="'nowhere' not found .* interpolations"):
        TieredCheckpointIO.from_config(OmegaConf.create({"dirpath": "${nowhere}/run"}))


def test_paths_may_be_paths(tmp_path, memory_dir):
    io = TieredCheckpointIO(tmp_path / "d", memory_dir=Path(memory_dir), log_dir=tmp_path / "logs")
    io.save_checkpoint(state(1), "a.ckpt")
    io.teardown()
    assert torch.load(tmp_path / "d" / "a.ckpt")["global_step"] == 1
    assert (tmp_path / "logs" / f"{io.config.namespace}_checkpointing.log").exists()


def test_a_trainer_refuses_what_no_trainer_saved_and_its_advice_works(memory_dir, tmp_path):
    class Warm(Model):
        def on_fit_start(self):
            self.loaded = self.trainer.strategy.checkpoint_io.load_checkpoint(KEPT)

    runs, callback = Runs(str(tmp_path / "durable"), memory_dir, tmp_path), TieredModelCheckpoint()
    (io := runs.io()).save_checkpoint(state(1), KEPT)
    io.teardown()
    for ckpt_path in (KEPT, "tiered:latest"):
        with pytest.raises(RestoreError, match=f"^{KEPT} was not saved by a Trainer.*load its weights by Tiered.*"):
            runs.fit(callback, ckpt_path=ckpt_path)
    assert runs.fit(callback, model=Warm(), ckpt_path=None, max_steps=2)[1].loaded["global_step"] == 1
    assert runs.fit(callback, max_steps=3)[0].global_step == 3


def test_bad_names_and_options_are_refused_and_nothing_is_saved(kept, tmp_path):
    io = kept.io()
    outside = ("../x.ckpt", "a/../../x.ckpt", f"{io.config.dirpath}/../x.ckpt", "/../abs.ckpt")
    itself = (io.config.dirpath, f"{io.config.dirpath}/")
    for name in (*outside, *itself, "s3://other/x.ckpt", "", "a//b", ".tiered/x", "a\nb", "a\\b", "x" * 300):
        with pytest.raises(ConfigError) as caught:
            io.save_checkpoint(state(2), name)
        assert "dirpath" in caught.value.hint
    for name in ("part.json", "a/drained", ".drained", "pinned", "replicated"):
        with pytest.raises(ConfigError, match=r"its own files.*such as '\.ckpt'"):
            io.save_checkpoint(state(2), name)
    # No command would take such a name: it is a sentinel.
    writer = build(TieredStorageWriter, **kept.options, **kept.support)
    for act in (
        lambda: io.save_checkpoint(state(2), "tiered:x.ckpt"),
        lambda: io.save_checkpoint(state(2), f"{io.config.dirpath}/tiered:x.ckpt"),
        lambda: io.checkpointer.alias("tiered:x.ckpt", KEPT),
        lambda: writer.reset("tiered:x/step_2"),
    ):
        with pytest.raises(ConfigError, match="begins with 'tiered:'.*give it another name"):
            act()
    wrong = ({"tier": ["memory"]}, {"tiers": ["disk"]}, {"tiers": []}, {"metric": ("x", torch.ones(2))})
    for options in wrong:
        with pytest.raises(ConfigError, match="allowed: "):
            io.save_checkpoint(state(2), "a.ckpt", storage_options=options)
    for load in (io.load_checkpoint, io.remove_checkpoint):
        with pytest.raises(ConfigError):
            load(f"{io.config.dirpath}/../../x.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="a.ckpt.*tiered-ckpt ls"):
        io.load_checkpoint("a.ckpt")
    choices = "allowed: tiered:latest, tiered:last, a name, a path or a URL"
    for wrong in ("tiered:best", "latest"):
        with pytest.raises(CheckpointNotFoundError, match=f"'{wrong}'.*{choices}"):
            io.load_checkpoint(wrong)
    with pytest.raises(ConfigError, match=f"^'tiered://latest' stands for no checkpoint — {choices}$"):
        io.load_checkpoint("tiered://latest")
    with pytest.raises(ConfigError, match="'tiered://latest' is not the name of a checkpoint — give a name, or"):
        io.save_checkpoint(state(2), "tiered://latest")
    assert io.load_checkpoint("tiered:latest")["global_step"] == 1
    assert not list(tmp_path.rglob("x.ckpt"))
