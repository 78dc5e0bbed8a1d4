"""Nodes with memories of their own, and one durable tier."""

import pytest
from support.restoring import World


@pytest.fixture
def world(memory_dir, durable_dir):
    return World(memory_dir, durable_dir)
