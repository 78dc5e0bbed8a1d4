"""A node with an empty memory, whose durable tier is a directory that is not there yet."""

import pytest
from support.draining import Node


@pytest.fixture
def node(memory_dir, tmp_path):
    return Node(memory_dir, str(tmp_path / "run"))
