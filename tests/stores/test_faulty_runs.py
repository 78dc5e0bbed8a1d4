"""A job whose S3 has bad hours: training and memory steps go on, waits end, and in the end all is caught up."""

import logging
import time

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
    slow_body,
    stall,
    truncate,
    where,
    wrong_bytes,
)
from support.supporting import supported

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp, list_checkpoints
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.errors import SaveError

#: Above the smallest part size: three parts.
LARGE = (17 << 20) // 4


def once(faults, *telling):
    """All of them; those that are not the most telling are further cases."""
    return [each if each in telling else pytest.param(each, marks=pytest.mark.matrix) for each in faults]


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


@pytest.mark.timeout(60)
def test_s3_is_away_for_a_whole_run_and_comes_back(io_of, options, proxy, caplog):
    proxy.plan = where(SLOW_DOWN)
    io = io_of(logger=logging.getLogger("job"))
    made = io.checkpointer
    slowest, most = 0.0, 0
    with hurried(retry_deadline_s=0.5):
        for step in range(1, 9):
            started = time.monotonic()
            tiers = {"memory", "durable"} if step % 2 == 0 else {"memory"}
            assert made.save(state(step), f"{step}.ckpt", tiers=tiers, wait=False), "the memory step stands"
            slowest = max(slowest, time.monotonic() - started)
            most = max(most, len(made.session.open().drain.pending_saves()))
    assert slowest < 15, "no save waits longer than a few failures take"
    # Those that are waited for, and as many that were given up for them and not yet put aside.
    assert most <= 2 * 2 + 1
    # The drain says so when it has tried for its half second; eight quick saves may end before that.
    deadline = time.monotonic() + 20
    while not made.session.progress().counters.get("failed"):
        assert time.monotonic() < deadline, "no upload is said to have failed"
        time.sleep(0.05)
    assert any(record.levelno >= logging.ERROR and "SlowDown" in record.getMessage() for record in caplog.records)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 8
    assert made.restored.tier == "memory"
    proxy.plan = lambda *_: None
    made.session.wait()
    elsewhere = io_of(namespace="another-node")
    assert torch.equal(elsewhere.load_checkpoint("tiered:latest")["w"], state(8)["w"])
    assert elsewhere.checkpointer.restored.tier == "durable"


FAULTS = {
    "503 SlowDown": where(SLOW_DOWN, operation="part", calls={1, 2}),
    "500 on one part": where(refuse(500, "InternalError"), part=2, calls={1}),
    "reset on one key": where(reset, operation="put", key=".tiered/manifests", calls={1}),
    "a stalled part": where(stall, part=3, calls={1}),
    "a stalled last request": where(stall, operation="complete", calls={1}),
    "a lost answer to the last request": where(lose_answer, operation="complete", calls={1}),
    "a lost answer to a manifest": where(lose_answer, operation="put", key=".tiered/manifests", calls={1}),
    "an answer cut short": where(truncate(20), operation="create", calls={1}),
    "latency": where(late(0.2)),
    "low bandwidth": where(slow_body(2_000, piece=64)),
}


@pytest.mark.timeout(45)
@pytest.mark.parametrize("fault", once(FAULTS, "a stalled part"))
def test_a_save_gets_through(fault, io_of, proxy):
    proxy.plan = FAULTS[fault]
    io = io_of(on_save_error="raise")
    started = time.monotonic()
    io.save_checkpoint(state(1, LARGE), "1.ckpt")
    assert time.monotonic() - started < 30
    proxy.plan = lambda *_: None
    assert torch.equal(io_of(namespace="another-node").load_checkpoint("1.ckpt")["w"], state(1, LARGE)["w"])


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "fault",
    once(("503 SlowDown", "a stalled part", "a lost answer to the last request"), "a lost answer to the last request"),
)
def test_a_sharded_save_gets_through_and_is_caught_up(fault, options, proxy, s3_bucket):
    options = {**options, "dirpath": f"s3://{s3_bucket}/run", "on_save_error": "raise", "save_to_s3": True}
    proxy.plan = FAULTS[fault]
    writer = TieredStorageWriter(**options, wait=True)
    dcp.save({"w": state(1, LARGE)["w"]}, checkpoint_id="step_1", storage_writer=writer)
    # Then away, for longer than anybody tries again.
    proxy.plan = where(SLOW_DOWN)
    error = pytest.raises(SaveError, match="is in memory, but not on the durable tier: .*SlowDown")
    with hurried(retry_deadline_s=0.5), error:
        dcp.save({"w": state(2, LARGE)["w"]}, checkpoint_id="step_2", storage_writer=writer)
    proxy.plan = lambda *_: None
    dcp.save({"w": state(3, LARGE)["w"]}, checkpoint_id="step_3", storage_writer=writer)
    writer.close()
    wanted = {"w": torch.zeros(LARGE)}
    dcp.load(wanted, **{**options, "namespace": "another-node", "save_to_s3": None})
    close_shared(settings_of(None, {**options, "namespace": "another-node", "save_to_s3": None}))
    assert torch.equal(wanted["w"], state(3, LARGE)["w"])


READ_FAULTS = {
    "503 SlowDown": (where(SLOW_DOWN, operation="get", calls={1, 2}), 1),
    "a truncated body": (where(truncate(1000), key="2.ckpt", operation="get", calls={2}), 1),
    "a stalled answer": (where(stall, key="2.ckpt", operation="get", calls={2}), 1),
    "a slow answer": (where(slow_body(40 << 20), key="2.ckpt", operation="get"), 1),
    "a manifest that a gateway lost": (where(lost_by_another, key="manifests/2.ckpt", operation="get", calls={1}), 1),
    "a list that something else answers": (where(answered_by_another(b""), operation="list", calls={1, 2}), 1),
    "wrong bytes": (where(wrong_bytes, key="run/2.ckpt", operation="get"), 2),
    "wrong bytes in the manifest": (where(wrong_bytes, key="manifests/2.ckpt", operation="get"), 2),
}


@pytest.mark.timeout(45)
@pytest.mark.parametrize(
    "fault", once(READ_FAULTS, "wrong bytes", "a list that something else answers", "a manifest that a gateway lost")
)
def test_a_restore_gets_the_newest_or_the_one_before(fault, io_of, proxy):
    plan, back = READ_FAULTS[fault]
    io = io_of(on_save_error="raise")
    for step in (1, 2):
        io.save_checkpoint(state(step, LARGE), f"{step}.ckpt")
    proxy.plan = plan
    elsewhere = io_of(namespace="another-node")
    started = time.monotonic()
    loaded = elsewhere.load_checkpoint("tiered:latest")
    assert time.monotonic() - started < 30
    assert loaded["global_step"] == 3 - back
    assert torch.equal(loaded["w"], state(3 - back, LARGE)["w"])
    assert bool(elsewhere.checkpointer.restored.rejected) == (back == 2)


@pytest.mark.timeout(45)
def test_an_archived_manifest_keeps_no_other_checkpoint_from_its_use(io_of, options, proxy, s3_url):
    """A lifecycle rule has moved one to Glacier: it is there, and can't be read."""
    io = io_of(on_save_error="raise")
    for step in (1, 2, 3):
        io.save_checkpoint(state(step, 1000), f"{step}.ckpt")
    proxy.plan = where(refuse(403, "InvalidObjectState"), operation="get", key="manifests/1.ckpt")
    elsewhere = io_of(namespace="another-node", on_save_error="raise", retention={"latest": 1})
    assert elsewhere.load_checkpoint("tiered:latest")["global_step"] == 3
    assert "it was archived" in str(elsewhere.checkpointer.restored.rejected)
    elsewhere.save_checkpoint(state(4, 1000), "4.ckpt")
    elsewhere.teardown()
    listed = list_checkpoints(s3_url, endpoint_url=proxy.endpoint_url)
    assert [(each.name, each.state) for each in listed] == [("4.ckpt", "durable"), ("1.ckpt", "corrupt")]
    assert "it was archived" in listed[1].problem
    proxy.plan = lambda *_: None
    assert io_of(namespace="a-third").load_checkpoint("1.ckpt")["global_step"] == 1, "it was not removed"
