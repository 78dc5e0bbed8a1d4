"""A node, its durable tier, and what a trainer has of the drain."""

import logging

import pytest
from support.draining import Node

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(str(tmp_path / "durable"))


@pytest.fixture
def node(memory_dir, store):
    return Node(memory_dir, store.url)


@pytest.fixture
def handle_of():
    """Makes trainers' sides of the drain, and closes them."""
    handles = []

    def make(node, **changes):
        handles.append(DrainHandle(node.tier, node.config, logging.getLogger("test"), **changes))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close(timeout_s=30)
