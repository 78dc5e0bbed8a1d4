"""What the trainer's log says of operations that failed in the background."""

import pytest

from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.drain.status import failure_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig


@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("save", "moved to quarantine/, and it is not tried again"),
        ("part", "moved to quarantine/, and it is not tried again"),
        ("copy", "it stays queued and is tried again"),
        ("alias", "it stays queued and is tried again"),
        ("retain", "it stays queued and is tried again"),
    ],
)
def test_only_a_damaged_part_in_memory_is_told_as_quarantined(action, words):
    config = TieredCheckpointConfig(dirpath="s3://bucket/run", namespace="gpt-1")
    outcome = Outcome("1", action, "last.ckpt", -1, "failed", error="damaged", error_type="damaged_in_memory")
    hint = failure_of(outcome, config).hint
    assert words in hint
    assert ("quarantine" in hint) == (action in ("save", "part"))


def test_a_failure_names_the_dirpath_of_its_own_operation():
    """An earlier start may have queued it for another one."""
    config = TieredCheckpointConfig(dirpath="s3://new/run", namespace="gpt-1")
    outcome = Outcome("1", "save", "5.ckpt", 5, "failed", error="denied", dirpath="s3://old/run")
    assert failure_of(outcome, config).key == outcome.url == "s3://old/run/5.ckpt"
