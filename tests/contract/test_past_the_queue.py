"""A checkpoint that is streamed goes past the queue, and must not meet there what is queued for its name."""

import contextlib
import threading
import time

import pytest
import torch
from support.bad_input import state
from support.clocks import hurried
from support.fault_proxy import late, refuse, where
from support.supporting import build, supported
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.adapters.dcp_settings import close_shared, settings_of
from tiered_checkpoint_io.errors import DrainError, SaveError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import MANIFEST_PREFIX, name_from_manifest_key
from tiered_checkpoint_io.stores import open_store

NAME = "preempted.ckpt"
SMALL, LARGE = 1000, 6 << 20


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


@pytest.fixture
def io(options, tmp_path):
    """An IO whose memory has room for small checkpoints alone."""
    with mounted_tmpfs(tmp_path / "tight", 16 << 20) as folder, contextlib.ExitStack() as stack:
        io = AsyncCheckpointIO(TieredCheckpointIO(**options, memory_dir=str(folder), on_save_error="raise"))
        stack.callback(io.teardown)
        yield io


def elsewhere(options, memory_dir, name):
    other = TieredCheckpointIO(**options, memory_dir=memory_dir)
    try:
        return other.load_checkpoint(name)["global_step"]
    finally:
        other.teardown()


def when(proxy, operation, key, fault):
    """Spoils the first such request, and tells when it has come."""
    come = threading.Event()

    def act(exchange):
        come.set()
        fault(exchange)

    proxy.plan = where(act, operation=operation, key=key, calls={1})
    return come


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "key",
    [pytest.param("run/preempted.ckpt", marks=pytest.mark.matrix), "manifests/preempted.ckpt"],
    ids=["file", "manifest"],
)
def test_the_name_is_just_being_uploaded(key, io, options, proxy, memory_dir):
    come = when(proxy, "put", key, late(1.5))
    io.save_checkpoint(state(1, SMALL), NAME)
    assert come.wait(10)
    io.save_checkpoint(state(2, LARGE), NAME)
    session = io.checkpointer.session
    assert session.last_save.tiers == {"durable"}
    assert session.last_save.save_id not in [each.op_id for each in session.poll()], "the save itself has said so"
    io.teardown()
    assert elsewhere(options, memory_dir, NAME) == 2


@pytest.mark.matrix
@pytest.mark.timeout(60)
def test_the_name_is_just_being_deleted(io, options, proxy, memory_dir):
    io.save_checkpoint(state(1, SMALL), NAME)
    io.checkpointer.session.wait()
    come = when(proxy, "delete", "manifests/preempted.ckpt", late(1.5))
    io.remove_checkpoint(NAME)
    assert come.wait(10)
    io.save_checkpoint(state(2, LARGE), NAME)
    io.teardown()
    assert elsewhere(options, memory_dir, NAME) == 2


@pytest.mark.timeout(60)
def test_the_name_can_not_be_uploaded_for_now(io, options, proxy, memory_dir):
    proxy.plan = where(refuse(503, "SlowDown"), operation="put", key="run/preempted.ckpt")
    io.save_checkpoint(state(1, SMALL), NAME)
    with pytest.raises(SaveError, match=r"earlier work on preempted.ckpt has not reached .*SlowDown"):
        io.save_checkpoint(state(2, LARGE), NAME)
    proxy.plan = lambda *_: None
    with contextlib.suppress(SaveError):
        # What has failed behind the caller's back is shown once, too.
        io.checkpointer.session.surface()
    for _ in range(200):
        time.sleep(0.05 if io.checkpointer.session.is_pending(NAME) else 0)
    io.save_checkpoint(state(3, LARGE), NAME)
    io.teardown()
    assert elsewhere(options, memory_dir, NAME) == 3


@pytest.mark.matrix
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_it_sets_deletes_free_that_a_save_of_its_series_held_up_which_came_to_nothing(
    kind, io, options, proxy, tmp_path
):
    io.save_checkpoint(state(1, SMALL), "1.ckpt")
    io.checkpointer.session.wait()
    come = when(proxy, "put", "manifests/busy.ckpt", late(1.5))
    io.save_checkpoint(state(2, SMALL), "busy.ckpt")
    assert come.wait(10)
    io.save_checkpoint(state(3, SMALL), "3.ckpt")
    (damaged,) = (tmp_path / "tight").rglob("saves/*/*/3.ckpt")
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    io.remove_checkpoint("1.ckpt")
    with contextlib.suppress(DrainError):
        io.checkpointer.session.wait()
    with pytest.raises(SaveError, match="3.ckpt"):
        io.checkpointer.session.surface()
    assert "1.ckpt" in durable(options)
    if kind == "full":
        io.save_checkpoint(state(4, LARGE), "step_4")
    else:
        writer = TieredStorageWriter(**options, memory_dir=str(tmp_path / "tight"), save_to_s3=True)
        dcp.save({"w": torch.ones(LARGE)}, checkpoint_id="step_4", storage_writer=writer)
        writer.close()
    io.checkpointer.session.wait()
    # Another series says nothing of whether what failed will have a successor.
    assert durable(options) == [*(["1.ckpt"] if kind == "sharded" else []), "busy.ckpt", "step_4"]


def durable(options):
    store = open_store(TieredCheckpointConfig.from_any(options))
    try:
        return sorted(name for each in store.list(MANIFEST_PREFIX) if (name := name_from_manifest_key(each.key)))
    finally:
        store.close()


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("key", [pytest.param("step_1/.metadata", marks=pytest.mark.matrix), "manifests/step_1"])
@pytest.mark.parametrize("save", [dcp.save, pytest.param(dcp.async_save, marks=pytest.mark.matrix)])
def test_a_sharded_checkpoint_of_the_name_is_just_being_committed(save, key, options, proxy, tmp_path, memory_dir):
    with mounted_tmpfs(tmp_path / "tight", 16 << 20) as folder:
        writer = TieredStorageWriter(
            **options, memory_dir=str(folder), on_save_error="raise", save_to_s3=True, wait=False
        )
        come = when(proxy, "put", key, late(1.5))
        dcp.save({"w": torch.zeros(1000)}, checkpoint_id="step_1", storage_writer=writer)
        assert come.wait(10)
        save({"w": torch.ones(LARGE)}, checkpoint_id="step_1", storage_writer=writer)
        dcp.maybe_finalize_async_calls(blocking=True)
        writer.close()
    found = {"w": torch.zeros(LARGE)}
    options |= {"memory_dir": memory_dir}
    dcp.load(found, checkpoint_id="step_1", **options)
    close_shared(settings_of(None, options))
    assert torch.equal(found["w"], torch.ones(LARGE))


@pytest.mark.matrix
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_sharded_checkpoint_of_the_name_can_not_be_uploaded_for_now(options, proxy, tmp_path, memory_dir):
    options = {**options, "wait_timeout_s": 20}
    with mounted_tmpfs(tmp_path / "tight", 16 << 20) as folder:
        writer = build(
            TieredStorageWriter, **options, memory_dir=str(folder), save_to_s3=True, on_save_error="raise", wait=False
        )
        proxy.plan = where(refuse(503, "SlowDown"), operation="put")
        dcp.save({"w": torch.zeros(1000)}, checkpoint_id="step_1", storage_writer=writer)
        with pytest.raises(SaveError, match=r"earlier work on step_1 has not reached .*SlowDown"):
            dcp.save({"w": torch.ones(LARGE)}, checkpoint_id="step_1", storage_writer=writer)
        proxy.plan = lambda *_: None
        with contextlib.suppress(SaveError):
            # What has failed behind the caller's back is shown once, too.
            writer.session.surface()
        for _ in range(200):
            time.sleep(0.05 if writer.session.is_pending("step_1") else 0)
        dcp.save({"w": torch.ones(LARGE)}, checkpoint_id="step_1", storage_writer=writer)
        writer.close()
    found = {"w": torch.zeros(LARGE)}
    options |= {"memory_dir": memory_dir}
    build(dcp.load, found, checkpoint_id="step_1", **options)
    close_shared(build(settings_of, None, options))
    assert torch.equal(found["w"], torch.ones(LARGE))


@pytest.mark.filterwarnings("ignore:the memory tier can't hold")
def test_what_the_queue_has_no_room_for_is_skipped_where_memory_has_none_either(options, proxy, tmp_path, memory_dir):
    """It is of memory alone then: no failure of a durable save."""
    with mounted_tmpfs(tmp_path / "tight", 16 << 20) as folder, contextlib.ExitStack() as stack:
        rules = {"max_pending": 1, "pending_timeout_s": 1}
        io = AsyncCheckpointIO(build(TieredCheckpointIO, **options, memory_dir=str(folder), **rules))
        stack.callback(io.teardown)
        proxy.plan = where(late(5), key="run/1.ckpt")
        for step, tiers in ((1, ["memory", "durable"]), (2, ["memory"]), (3, ["memory", "durable"])):
            io.save_checkpoint(state(step, 1 << 20), f"{step}.ckpt", storage_options={"tiers": tiers})
        session = io.checkpointer.session
        assert (session.counts["failed"], session.counts["skipped"], session.last_save.name) == (0, 1, "2.ckpt")
        proxy.plan = where(late(0), calls={0})
        io.teardown()
    assert elsewhere(options, memory_dir, "1.ckpt") == 1
