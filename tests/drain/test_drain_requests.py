"""Requests of drains to the durable tier for each durable step: counted, with existing checkpoints."""

import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.committing import save
from support.draining import LOG, Node, names
from support.faulty import FaultyStore
from support.story import op_id

from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.model import ids

BEFORE = 6


class Asked(FaultyStore):
    """Counts lists, reads of manifests, and looks for uploads that were given up."""

    def __init__(self, store):
        super().__init__(store)
        self.take()

    def _count(self, operation, key):
        if operation == "list":
            self._now.lists[key] += 1
        elif operation == "get" and key.startswith(ids.MANIFEST_PREFIX):
            self._now.gets[ids.name_from_manifest_key(key)] += 1
        return False

    def abort_stale_uploads(self):
        self._now.looks += 1

    def take(self):
        """Returns the counts since the last call."""
        taken, self._now = getattr(self, "_now", None), SimpleNamespace(lists=Counter(), gets=Counter(), looks=0)
        return taken


@pytest.fixture
def world(store, memory_dir):
    """Returns a durable tier with checkpoints, and two nodes with a drain each; the first has the coordinator."""
    for number in range(1, BEFORE + 1):
        save(store, f"c{number}", number, kind="sharded")
    for path in Path(store.url, ids.MANIFEST_PREFIX).iterdir():
        # A new object is read again for a while.
        os.utime(path, (1, 1))
    nodes, asked, drains = [], [], []
    for number in range(2):
        os.mkdir(f"{memory_dir}/{number}")
        nodes.append(Node(f"{memory_dir}/{number}", store.url, retention={"latest": BEFORE + 9}))
        asked.append(Asked(store))
        drains.append(Drain(nodes[-1].root, logger=LOG, open_store=lambda *_, of=asked[-1]: of))
    return store, nodes, asked, drains


def test_a_durable_step_costs_as_many_requests_however_many_checkpoints_there_are(world):
    store, nodes, asked, drains = world
    found = []
    for number in range(BEFORE + 1, BEFORE + 4):
        for rank in (1, 0):
            nodes[rank].part(f"c{number}", number, rank)
            if rank == 0:
                nodes[0].number = 10 * number
                nodes[0].request("retain", "retention/mine", op_id(number))
            assert drains[rank].run(once=True)
        found.append([each.take() for each in asked])
        assert f"c{number}" in names(store)
    (first, _), (second, other), (third, _) = found
    # Once, the sweep reads all manifests, and retention none of them again.
    old = {f"c{number}": 1 for number in range(1, BEFORE + 1)}
    assert {name: count for name, count in first.gets.items() if name in old} == old
    assert not old.keys() & {*second.gets, *third.gets}
    # The descriptions and files of this one; leases and manifests, for retention.
    assert second.lists.total() == third.lists.total() == 4, (second, third)
    assert not other.lists, "only the coordinator's drain looks at what others have sent"
    assert [sum(node.looks for node in each) for each in zip(*found, strict=True)] == [3, 0], (
        "one drain, once it is open"
    )
