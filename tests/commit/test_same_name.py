"""Two runs save one name, such as that of a preemption: neither writes to a file of the other."""

import logging
import os

import pytest
from support.draining import names
from support.sharded import readable

from tiered_checkpoint_io.engine.drain.process import DrainRunner
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.formats.image import Image, Segment
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("test")
NAME = "preempted.ckpt"


class Node:
    """The node of rank 0 of a run that saves as Lightning's strategies do: shards, and ``meta.pt`` beside them."""

    def __init__(self, folder, dirpath):
        os.makedirs(folder)
        self.session = Session(TieredCheckpointConfig.from_any(dirpath=dirpath, memory_dir=folder))
        self._saver = CoordinatedSaver(self.session)

    def save(self, step, name=NAME, *, durable=True):
        facts = self._saver.issue(name, step=step, world_size=1, durable=durable, dirpath=self.session.dirpath)
        shard = memoryview(b"shard of %d" % step)
        self._saver.capture(facts, 0, Image(len(shard), (Segment(0, shard),), (), planned=True))
        rest = ("meta.pt", b"the rest of %d" % step)
        self._saver.finish(facts.save_id, lambda: b"metadata of %d" % step, wait=False, extra=rest)
        return self._saver.op_id

    def ends(self):
        """The training ends; the drain may still work."""
        self.session.release()

    def drain(self, store):
        root = self.session.open().tier.root
        Drain(root, logger=LOG, open_store=lambda config, dirpath: store).run(once=True)
        return {each.op_id: each.state for each in self.session.open().drain.queue.outcomes()}


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path / "durable"))


@pytest.fixture
def nodes(memory_dir, store, monkeypatch):
    """Two nodes, for jobs whose drains work only when the test says so."""
    monkeypatch.setattr(DrainRunner, "ensure", lambda _: None)
    made = [Node(f"{memory_dir}/{name}", store.url) for name in "ab"]
    yield made
    for each in made:
        each.ends()


class Meanwhile(DirectoryStore):
    """A slow store: while the first file of shards goes to it, something else happens there."""

    def __init__(self, url, happens):
        super().__init__(url)
        self._happens = happens

    def upload(self, key, *args, **options):
        super().upload(key, *args, **options)
        happens, self._happens = self._happens, None
        if happens is not None:
            assert key.endswith(".distcp")
            happens()


def small_files(node):
    """The newest save's files beside its shards, but ``.metadata``."""
    files = [each.basename for each in node.session.open().tier.parts()[-1].part.content.files]
    return [each for each in files if each.startswith("meta")]


def test_a_second_preemption_is_uploaded_though_another_node_uploads_the_first_meanwhile(nodes, store):
    first, second = nodes
    # The second run starts before the first one's checkpoint is on the durable tier, and lists no names after that.
    second.session.known.remember(names(store))
    of_first = first.save(110)
    first.ends()
    assert first.drain(store)[of_first] == "committed"
    of_second = second.save(130)
    assert second.drain(store)[of_second] == "committed"
    assert readable(store, NAME) == 130


def test_a_drain_that_is_slow_with_the_first_preemption_writes_to_no_file_of_the_second(nodes, store):
    first, second = nodes
    second.session.known.remember(names(store))
    of_first = first.save(110)
    first.ends()

    def preempt_again():
        of_second = second.save(130)
        assert second.drain(store)[of_second] == "committed"
        assert readable(store, NAME) == 130

    states = first.drain(Meanwhile(store.url, preempt_again))
    # Clocks of two runs may disagree, so the last to commit gets the name; each of its files matches its hashes.
    assert readable(store, NAME) == 110
    assert states[of_first] == "committed"


def test_what_others_read_has_its_own_name_where_no_other_save_can_have_it(nodes):
    node, _ = nodes
    node.save(4, "epoch=0-step=4.ckpt")
    assert small_files(node) == ["meta.pt"]
    # A run that went back to an earlier step saves the same one again; the first may not be uploaded yet.
    node.save(8, "step=8.ckpt", durable=False)
    assert small_files(node) == ["meta.pt"]
    node.save(8, "step=8.ckpt")
    assert small_files(node) != ["meta.pt"]
    # What memory alone holds may be uploaded later, by tiered-ckpt flush.
    node.session.known.remember({"step=10.ckpt"})
    node.save(10, "step=10.ckpt", durable=False)
    assert small_files(node) != ["meta.pt"]
    node.save(12, NAME, durable=False)
    assert small_files(node) != ["meta.pt"]
