"""Messages in the trainer's log about operations that failed in the background."""

import pytest

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.status import failure_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


@pytest.mark.parametrize("action", ["save", "part", "copy", "alias", "retain"])
def test_only_a_damaged_part_in_memory_is_told_as_quarantined(action):
    config = TieredCheckpointConfig(dirpath="s3://bucket/run", namespace="gpt-1")
    outcome = Outcome("1", action, "last.ckpt", -1, "failed", error="damaged", error_type="damaged_in_memory")
    hint = failure_of(outcome, config).hint
    is_part = action in ("save", "part")
    assert ("moved to quarantine/, and it is not tried again" in hint) == is_part
    assert ("it stays queued and is tried again" in hint) != is_part


def test_a_failure_names_the_dirpath_of_its_own_operation():
    """An earlier start may have queued it for another one."""
    config = TieredCheckpointConfig(dirpath="s3://new/run", namespace="gpt-1")
    outcome = Outcome("1", "save", "5.ckpt", 5, "failed", error="denied", dirpath="s3://old/run")
    assert failure_of(outcome, config).key == outcome.url == "s3://old/run/5.ckpt"
