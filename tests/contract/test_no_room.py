"""A save for which neither the queue nor node memory has room."""

import contextlib

import pytest
from support.bad_input import state
from support.clocks import hurried
from support.fault_proxy import late, refuse, where
from support.supporting import build, supported
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO


@pytest.fixture(autouse=True)
def impatient():
    with hurried(
        retry_deadline_s=0.5, retry_first_wait_s=0.05, retry_max_wait_s=0.2, redo_first_s=0.05, redo_max_s=0.2
    ):
        yield


@pytest.fixture
def options(s3_url, proxy):
    with supported(drain="thread", wait_timeout_s=60):
        yield {"dirpath": s3_url, "endpoint_url": proxy.endpoint_url, "spill_dir": None}


def elsewhere(options, memory_dir, name):
    other = TieredCheckpointIO(**options, memory_dir=memory_dir)
    try:
        return other.load_checkpoint(name)["global_step"]
    finally:
        other.teardown()


def test_what_the_queue_has_no_room_for_is_skipped_where_memory_has_none_either(options, proxy, tmp_path, memory_dir):
    """It is of memory alone then: no failure of a durable save, which the configuration asks to skip."""
    with mounted_tmpfs(tmp_path / "tight", 16 << 20) as folder, contextlib.ExitStack() as stack:
        rules = {"on_save_error": "raise", "max_pending": 1, "pending_timeout_s": 1}
        io = AsyncCheckpointIO(build(TieredCheckpointIO, **options, memory_dir=str(folder), **rules))
        stack.callback(io.teardown)
        proxy.plan = where(refuse(503, "SlowDown"), key="run/1.ckpt")
        for step, tiers in ((1, ["memory", "durable"]), (2, ["memory"]), (3, ["memory", "durable"])):
            io.save_checkpoint(state(step, 1 << 20), f"{step}.ckpt", storage_options={"tiers": tiers})
        session = io.checkpointer.session
        assert (session.counts["failed"], session.counts["skipped"], session.last_save.name) == (0, 1, "2.ckpt")
        proxy.plan = where(late(0), calls={0})
        io.teardown()
    assert elsewhere(options, memory_dir, "1.ckpt") == 1
