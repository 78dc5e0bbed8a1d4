"""How a synchronous save has ended is told by a key in torch.distributed's store; the last few keys are kept."""

import contextlib

import pytest
import torch.distributed as dist

from tiered_checkpoint_io.engine.ranks.local_run import _MAX_ENDS, Run


@pytest.mark.parametrize("removes", [True, False])
def test_the_ends_of_the_last_saves_alone_are_kept(monkeypatch, removes):
    def refuse(*_):
        raise NotImplementedError("deleteKey not implemented")

    if not removes:
        monkeypatch.setattr(dist.PrefixStore, "delete_key", refuse)
    store = dist.HashStore()
    with contextlib.closing(Run(store)) as shard_0, contextlib.closing(Run(store)) as other:
        for number in range(40):
            shard_0.report_end(f"save-{number}", "committed")
            assert other.end_of(f"save-{number}") == "committed"
        assert other.end_of(f"save-{40 - _MAX_ENDS}") == "committed"
        assert (other.end_of("save-0") is None) == removes
    assert store.num_keys() <= _MAX_ENDS + 1 or not removes
