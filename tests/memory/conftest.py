"""The memory tier of one process."""

import pytest

from tiered_checkpoint_io.memory.tier import MemoryTier


@pytest.fixture
def tier(memory_dir):
    tier = MemoryTier.open(memory_dir, "test")
    yield tier
    tier.close()
