"""What a power loss may leave of a root on a disk, case by case; all states: ``tests/crash/test_states.py``."""

import json
import logging
import random
import shutil

import pytest
from support import crash_states
from support.draining import Node
from support.draining import readable as content_of

from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.memory.parts import DRAINED, PART_FILE
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("power-loss")


@pytest.fixture
def node(memory_dir):
    node = Node(memory_dir, f"{memory_dir}/durable")
    yield node
    node.tier.close()


def drained(node):
    return Drain(node.root, logger=LOG).run(once=True)


def test_a_part_that_was_drained_is_not_pending_again(node):
    node.save("a.ckpt", b"a" * 1000)
    (stored,) = node.tier.parts()
    with crash_states.recording(node.root, lambda _: None) as recorder:
        node.tier.mark_drained(stored)
    shown = list(crash_states.states(recorder, random.Random(1), 200))
    described = [path for tree in shown for path in tree if path.endswith(PART_FILE)]
    assert described
    for tree in shown:
        for path in tree:
            if path.endswith(PART_FILE):
                assert path.replace(PART_FILE, DRAINED) in tree


def test_a_drained_part_that_was_removed_is_not_there_without_its_mark(node):
    shown = []
    with crash_states.recording(
        node.root, lambda recorder: shown.extend(crash_states.states(recorder, random.Random(1), 50))
    ):
        node.save("a.ckpt", b"a" * 1000)
        (stored,) = node.tier.parts()
        node.tier.mark_drained(stored)
        shown.clear()
        node.tier.remove(stored)
    described = [
        (tree, path) for tree in shown for path in tree if path.startswith("saves/") and path.endswith(PART_FILE)
    ]
    assert described
    assert all(path.replace(PART_FILE, DRAINED) in tree for tree, path in described)


@pytest.mark.timeout(30)
def test_a_drain_by_hand_makes_the_folders_that_were_lost_and_a_corrupt_part_is_tried_once(node):
    node.save("a.ckpt", b"a" * 1000)
    (stored,) = node.tier.parts()
    stored.file("a.ckpt").write_bytes(b"x" * 1000)
    for name in ("quarantine", "slots", "status", "trash"):
        shutil.rmtree(node.root / name)
    assert drained(node)
    assert node.tier.parts() == []
    assert len(node.tier.quarantined()) == 1


@pytest.mark.timeout(30)
def test_a_root_without_any_folder_has_nothing_to_drain(node):
    shutil.rmtree(node.root / "saves")
    assert drained(node)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("torn", ["", '{"dirpath": "', "[]", "null"])
def test_a_damaged_configuration_is_said_and_the_next_trainer_mends_it(torn, node, caplog):
    node.save("a.ckpt", b"a" * 1000)
    (node.root / "drain.json").write_text(torn)
    assert drained(node)
    assert "a.ckpt failed, to be tried again" in caplog.text
    (node.root / "drain.json").write_text(node.config.to_json())
    assert drained(node)
    assert content_of(DirectoryStore(node.dirpath), "a.ckpt") == b"a" * 1000


def test_the_configuration_is_never_found_torn(memory_dir):
    found = []
    options = {"dirpath": "d", "memory_dir": memory_dir}
    text = TieredCheckpointConfig.from_any(**options).to_json()

    def look(recorder):
        found.extend(
            tree[path]
            for tree in crash_states.states(recorder, random.Random(1), 50)
            for path in tree
            if path.endswith("/drain.json")
        )

    with crash_states.recording(memory_dir, look):
        Node(memory_dir, "d").tier.close()
    assert found
    assert all(json.loads(each) for each in found), text
