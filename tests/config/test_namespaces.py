"""A job that names no namespace has one of its own, made from dirpath."""

import contextlib
import logging
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.draining import Node
from support.supporting import build
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


@pytest.fixture
def job(memory_dir):
    """Makes jobs on one node, of one process."""
    with contextlib.ExitStack() as stack:

        def make(dirpath, **options):
            config = {"dirpath": str(dirpath), "memory_dir": memory_dir, "drain": "thread", **options}
            made = Checkpointer(build(TieredCheckpointConfig.from_any, config))
            stack.callback(made.close)
            return made

        yield make


def found(job):
    loaded = job.load("tiered:latest")
    return None if isinstance(loaded, NoCheckpoint) else loaded["global_step"]


def test_jobs_that_named_none_share_none(job, memory_dir, tmp_path):
    for name in ("one", "two"):
        job(tmp_path / name).save({"global_step": 1}, "a.ckpt", tiers={"memory"})
    one, two = sorted(each.name for each in Path(memory_dir).glob("tiered-*/*"))
    assert one.startswith(f"{tmp_path.name}-one-"), "people know it by its name"
    assert "-two-" in two


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=80), st.text(min_size=1, max_size=80))
def test_any_dirpath_gives_a_valid_namespace_and_another_one_another(one, other):
    assert ids.validate_namespace(ids.namespace_of(one)) == ids.namespace_of(one)
    assert (ids.namespace_of(one) == ids.namespace_of(other)) == (one == other)


def test_it_follows_dirpath_and_a_name_stays():
    made = TieredCheckpointConfig(dirpath="s3://bucket/exp/run-1/")
    assert made.namespace.rpartition("-")[0] == "exp-run-1"
    assert TieredCheckpointConfig(dirpath="s3://bucket").namespace.startswith("bucket-")
    moved = TieredCheckpointConfig.from_any(made, dirpath="s3://bucket/exp/run-2")
    assert moved == TieredCheckpointConfig(dirpath="s3://bucket/exp/run-2")
    assert not moved.is_named
    assert TieredCheckpointConfig.from_json(made.to_json()) == made
    named = TieredCheckpointConfig(dirpath="s3://bucket/run", namespace="default")
    assert (named.namespace, named.is_named) == ("default", True)
    assert TieredCheckpointConfig.from_any(named, dirpath="s3://bucket/b").namespace == "default"


def test_the_log_says_it_once(job, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="tiered_checkpoint_io"):
        made = job(tmp_path / "run")
        for step in (1, 2):
            made.save({"global_step": step}, f"{step}.ckpt", tiers={"memory"})
        job(tmp_path / "named", namespace="named").save({"global_step": 1}, "a.ckpt", tiers={"memory"})
    said = [record.getMessage() for record in caplog.records if "namespace" in record.getMessage()]
    assert said == [f"no namespace was given: checkpoints are in node memory under {made.config.namespace}"]


def test_a_resume_from_a_checkpoint_of_another_namespace_says_so(job, tmp_path, caplog):
    theirs = job(tmp_path / "theirs", namespace="theirs")
    theirs.save({"global_step": 1}, "a.ckpt")
    theirs.close()
    with caplog.at_level(logging.INFO, logger="tiered_checkpoint_io"):
        assert found(job(tmp_path / "theirs", namespace="theirs")) == 1
        assert found(job(tmp_path / "theirs", namespace="mine")) == 1
    said = [record.getMessage() for record in caplog.records if "this checkpoint was saved" in record.getMessage()]
    assert said == ["this checkpoint was saved under namespace theirs; this job's is mine"]


def command(memory_dir, *arguments):
    return CliRunner().invoke(app, [*arguments, "--memory-dir", memory_dir])


def test_of_several_namespaces_none_is_taken_for_its_name(memory_dir, tmp_path):
    """A command for another job must not meet "default"."""
    nodes = [Node(memory_dir, str(tmp_path / name), namespace=name) for name in ("default", "x")]
    for node in nodes:
        node.save("a.ckpt", b"A")
        node.save("b.ckpt", b"B", durable=False)
    for what in (["clean"], ["clean", "--yes"], ["flush"], ["flush", "--stay"]):
        refused = command(memory_dir, *what).exception
        assert isinstance(refused, ConfigError), what
        assert "there are 2 namespaces: default, x" in str(refused)
        assert "--namespace" in refused.hint
    assert [[stored.pending for stored in node.tier.parts()] for node in nodes] == [[True, False]] * 2
    nodes[0].drain()
    assert [set(node.states().values()) for node in nodes] == [{"committed"}, set()]
