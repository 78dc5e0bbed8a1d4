"""Two releases over one node's memory: a sidecar of one image and a trainer of another, an upgrade, a way back."""

import json
import logging
from dataclasses import asdict, replace

import pytest
from support.draining import Node, names, readable
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.drain import queue
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.engine.drain.queue import DrainProgress, Queue
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("test")


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path / "durable"))


@pytest.fixture
def node(memory_dir, store):
    return Node(memory_dir, store.url)


@pytest.fixture
def newer(monkeypatch):
    """Has the drain say one thing more of each outcome, and of itself, as a newer release may."""
    facts, dumps = queue._facts, json.dumps

    def more(about):
        return {**facts(about), "copied": 7} if isinstance(about, queue.Outcome) else facts(about)

    def beat(self, progress):
        self._log.beat(dumps({**asdict(progress), "waits_s": 7}).encode())

    with monkeypatch.context() as patch:
        patch.setattr(queue, "_facts", more)
        patch.setattr(Queue, "write_progress", beat)
        yield patch


def test_a_trainer_understands_the_drain_of_a_newer_release(node, store, newer):
    saved = node.save("a.ckpt", b"A")
    assert Drain(node.root, logger=LOG).run(once=True)
    newer.undo()
    handle = DrainHandle(node.tier, node.config, LOG)
    assert handle.wait(saved, 1.0).state == "committed"
    said = handle.progress()
    assert (said.pid > 0, said.counters["committed"], isinstance(said, DrainProgress)) == (True, 1, True)
    assert readable(store, "a.ckpt") == b"A"


def test_what_a_newer_release_gave_up_still_holds_deletes_back(node, store, newer):
    """What was good stays until its replacement is good, also after a way back."""
    node.save("good.ckpt", b"A")
    assert Drain(node.root, logger=LOG).run(once=True)
    lost, held = node.save("lost.ckpt", b"B"), node.delete("good.ckpt")
    node.cancel(lost)
    assert Drain(node.root, logger=LOG).run(once=True)
    assert names(store) == ["good.ckpt"]
    newer.undo()
    assert Drain(node.root, logger=LOG).run(once=True)
    assert names(store) == ["good.ckpt"]
    assert [request.op_id for request in node.queue.requests()] == [held]


def written_by_a_newer_release(config, **news):
    """A configuration with keys that this release does not know; those that are None have their defaults."""
    stored = json.loads(config.to_json())
    stored["unset"] += [key for key, value in news.items() if value is None]
    return json.dumps({**stored, **news})


def test_a_drain_works_for_a_trainer_of_a_newer_release(node, store):
    (node.root / CONFIG_FILE).write_text(written_by_a_newer_release(node.config, upload_priority=None))
    node.save("a.ckpt", b"A")
    assert Drain(node.root, logger=LOG).run(once=True)
    assert names(store) == ["a.ckpt"]


def test_a_drain_refuses_what_it_can_not_do_as_a_newer_release_is_told_to(node, store):
    (node.root / CONFIG_FILE).write_text(written_by_a_newer_release(node.config, upload_priority=None, seal="x"))
    saved = node.save("a.ckpt", b"A")
    assert Drain(node.root, logger=LOG).run(once=True)
    assert names(store) == []
    outcome = node.queue.outcome(saved)
    assert (outcome.state, outcome.error_type) == ("failed", "NewerConfigError")
    assert "sets seal, which this release does not know — upgrade tiered-checkpoint-io where the drain" in outcome.error


def test_a_flush_leaves_the_configuration_of_a_newer_release_as_it_is(node, store):
    """A trainer may be using it: its policies, server and encryption must not be lost."""
    stored = written_by_a_newer_release(replace(node.config, retention={"latest": 3}), seal="x")
    (node.root / CONFIG_FILE).write_text(stored)
    node.save("a.ckpt", b"A", durable=False)
    refused = CliRunner().invoke(app, ["flush", *node.where, "--timeout", "5"])
    assert isinstance(refused.exception, ConfigError)
    assert "upgrade tiered-checkpoint-io" in str(refused.exception)
    assert (node.root / CONFIG_FILE).read_text() == stored
    # A damaged one is written anew, by what the checkpoints say.
    (node.root / CONFIG_FILE).write_text(stored[:20])
    assert CliRunner().invoke(app, ["flush", *node.where, "--timeout", "30"]).exit_code == 0
    assert names(store) == ["a.ckpt"]


@pytest.mark.parametrize("text", ["[]", "1", '{"unset": 1}', '{"unset": [[]]}'])
def test_a_damaged_configuration_is_told(text):
    with pytest.raises(ConfigError, match="the stored configuration is damaged"):
        TieredCheckpointConfig.from_json(text)
