"""A job whose S3 has bad hours: saves and restores get through, and what an outage held up is caught up."""

import pytest
import torch
from support.bad_input import state
from support.clocks import hurried
from support.fault_proxy import (
    SLOW_DOWN,
    answered_by_another,
    late,
    lose_answer,
    lost_by_another,
    refuse,
    reset,
    stall,
    truncate,
    where,
    wrong_bytes,
)
from support.supporting import supported

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.errors import SaveError

#: Above the smallest part size: three parts.
LARGE = (17 << 20) // 4


def each_of(*plans):
    """Returns a plan of several; of those that would spoil a request, the first one does."""

    def plan(*asked):
        return next(filter(None, (each(*asked) for each in plans)), None)

    plan.takes_path = True
    return plan


def bad_hour():
    """Returns a plan with a transient fault for each request of a save."""
    manifest = {"operation": "put", "key": ".tiered/manifests", "calls": {1}}
    return each_of(
        where(SLOW_DOWN, operation="part", calls={1, 2}),
        where(refuse(500, "InternalError"), part=2, calls={1}),
        where(stall, part=3, calls={1}),
        where(stall, operation="complete", calls={1}),
        where(lose_answer, operation="complete", calls={1}),
        where(reset, **manifest),
        where(lose_answer, **manifest),
        where(truncate(20), operation="create", calls={1}),
        where(late(0.02)),
    )


@pytest.fixture(autouse=True)
def impatient():
    """Bounds of minutes as bounds of seconds; that they are bounds is what is tested."""
    bounds = {"retry_deadline_s": 2.0, "retry_first_wait_s": 0.05, "retry_max_wait_s": 0.2} | {
        "redo_first_s": 0.05,
        "redo_max_s": 0.2,
    }
    with hurried(**bounds, s3_read_s=1.0, s3_connect_s=1.0):
        yield


@pytest.fixture
def options(s3_url, memory_dir, proxy):
    with supported(drain="thread", max_pending=2, wait_timeout_s=60):
        yield {"dirpath": s3_url, "memory_dir": memory_dir, "endpoint_url": proxy.endpoint_url, "chunk_size_MB": 8}


@pytest.fixture
def io_of(options):
    made = []

    def io_of(**changes):
        made.append(TieredCheckpointIO(**{**options, **changes}))
        return made[-1]

    yield io_of
    for io in made:
        io.teardown()


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_gets_through_a_bad_hour_and_what_an_outage_held_up_is_caught_up(io_of, options, proxy, s3_bucket):
    with hurried(retry_deadline_s=5.0):
        proxy.plan = bad_hour()
        io_of(on_save_error="raise").save_checkpoint(state(1, LARGE), "1.ckpt")
        options = {**options, "dirpath": f"s3://{s3_bucket}/run", "on_save_error": "raise", "save_to_s3": True}
        proxy.plan = bad_hour()
        writer = TieredStorageWriter(**options, wait=True)
        dcp.save({"w": state(1, LARGE)["w"]}, checkpoint_id="step_1", storage_writer=writer)
    # Then away, for longer than the retries last.
    proxy.plan = where(SLOW_DOWN)
    error = pytest.raises(SaveError, match="is in memory, but not on the durable tier: .*SlowDown")
    with hurried(retry_deadline_s=0.5), error:
        dcp.save({"w": state(2, LARGE)["w"]}, checkpoint_id="step_2", storage_writer=writer)
    proxy.plan = lambda *_: None
    dcp.save({"w": state(3, LARGE)["w"]}, checkpoint_id="step_3", storage_writer=writer)
    writer.close()
    assert torch.equal(io_of(namespace="another-node").load_checkpoint("1.ckpt")["w"], state(1, LARGE)["w"])
    reads = {**options, "namespace": "another-node", "save_to_s3": None}
    for step in (1, 3):
        wanted = {"w": torch.zeros(LARGE)}
        dcp.load(wanted, checkpoint_id=f"step_{step}", **reads)
        assert torch.equal(wanted["w"], state(step, LARGE)["w"])
    close_shared(settings_of(None, reads))


READ_FAULTS = {
    "what passes": (
        lambda: each_of(
            where(lost_by_another, key="manifests/2.ckpt", operation="get", calls={1}),
            where(answered_by_another(b""), operation="list", calls={1, 2}),
            where(truncate(1000), key="2.ckpt", operation="get", calls={2}),
            where(stall, key="2.ckpt", operation="get", calls={2}),
            where(SLOW_DOWN, operation="get", calls={1, 2}),
        ),
        1,
    ),
    "wrong bytes": (lambda: where(wrong_bytes, key="run/2.ckpt", operation="get"), 2),
    "wrong bytes in the manifest": (lambda: where(wrong_bytes, key="manifests/2.ckpt", operation="get"), 2),
}


@pytest.mark.timeout(45)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_a_restore_gets_the_newest_or_the_one_before(fault, io_of, proxy):
    plan, back = READ_FAULTS[fault]
    io = io_of(on_save_error="raise")
    for step in (1, 2):
        io.save_checkpoint(state(step, LARGE), f"{step}.ckpt")
    proxy.plan = plan()
    elsewhere = io_of(namespace="another-node")
    with hurried(retry_deadline_s=5.0):
        loaded = elsewhere.load_checkpoint("tiered:latest")
    assert loaded["global_step"] == 3 - back
    assert torch.equal(loaded["w"], state(3 - back, LARGE)["w"])
    assert bool(elsewhere.checkpointer.restored.rejected) == (back == 2)
