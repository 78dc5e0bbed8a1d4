"""Nodes, their durable tier, and what a trainer has of the drain."""

import os

import pytest
from support.draining import LOG, Node

from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def store(durable_dir):
    return DirectoryStore(durable_dir)


@pytest.fixture
def node(memory_dir, store):
    return Node(memory_dir, store.url)


@pytest.fixture
def nodes(memory_dir, store):
    """Returns two nodes: the first holds the coordinator, rank 0."""
    for number in range(2):
        os.mkdir(f"{memory_dir}/node{number}")
    return [Node(f"{memory_dir}/node{number}", store.url, wait_timeout_s=1) for number in range(2)]


@pytest.fixture
def handle_of():
    """Makes trainers' sides of the drain, and closes them."""
    handles = []

    def make(node, **changes):
        handles.append(DrainHandle(node.tier, node.config, LOG, **changes))
        return handles[-1]

    yield make
    for handle in handles:
        handle.close(timeout_s=30)
