"""A file system that is full, and a process out of descriptors, at every point of a save: said, and nothing is lost."""

import contextlib
import re
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.bad_input import KEPT, Kept, state
from support.supporting import build
from support.tenants import Tenant, Watch, descriptors_to_spare, mounted_tmpfs, no_more_threads

from tiered_checkpoint_io import TieredStorageWriter, dcp
from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

MIB = 1 << 20
MEMORY_ONLY = {"tiers": ["memory"]}


@pytest.fixture
def kept(tmp_path, memory_dir):
    """Yields a job whose first checkpoint has to load at the end, from either tier: memory may remove it."""
    kept = Kept(tmp_path / "kept", memory_dir)
    yield kept
    io = kept.io()
    assert torch.equal(io.load_checkpoint(KEPT)["w"], state(1)["w"])
    kept.close()


def loads(io, step):
    return torch.equal(io.load_checkpoint("tiered:latest")["w"], state(step)["w"])


def points(watch, limit=40, every=1):
    """Yields numbers of a piece of space, from which on memory is full, until a save needs fewer pieces."""
    for number in range(1, limit, every):
        yield number
        if watch.count < number:
            return
    raise AssertionError(f"more than {limit} pieces")


@pytest.fixture(params=["space", "files"])
def tight(request, tmp_path):
    """Yields a real tmpfs that a tenant can fill, by what it holds or by how many."""
    with mounted_tmpfs(tmp_path / "tight", 16 * MIB, inodes=400) as folder:
        tenant = Tenant(folder)
        fill = tenant.fills if request.param == "space" else tenant.takes_all_inodes
        yield folder, lambda *_: fill(), tenant


#: Parts without room in memory are spilled, or else the save fails.
spilling = pytest.mark.parametrize("spill", ["auto", pytest.param(None, marks=pytest.mark.matrix)])
#: One of the two; :func:`test_what_fails_is_told_while_memory_is_full` takes both.
space = pytest.mark.parametrize("tight", ["space", pytest.param("files", marks=pytest.mark.matrix)], indirect=True)


def done(call, *args, **options):
    """Returns True if a call has saved; if not, its one error names the exhausted resource."""
    try:
        call(*args, **options)
    except SaveError as error:
        assert re.search("^no room for .*name a spill_dir", str(error)), error
        return False
    return True


@pytest.mark.timeout(170)
@spilling
@space
def test_a_tenant_fills_the_tmpfs_at_any_point_of_a_durable_save(spill, tight, tmp_path, monkeypatch):
    folder, fill, tenant = tight
    options = {"dirpath": str(tmp_path / "durable"), "memory_dir": str(folder), "on_save_error": "raise"}
    kept = Kept(tmp_path / "durable", folder)
    watch = Watch(folder, monkeypatch, fill)
    newest, ways = 1, set()
    for number in points(watch, every=2):
        io = kept.io(memory_keep_last=3, spill_dir=spill)
        io.load_checkpoint("tiered:latest")
        steps = {10 * number: f"{number}.ckpt", 10 * number + 1: f"{number}-b.ckpt"}
        with watch.from_the(number):
            # The tenant stays: the second one is no worse off.
            saved = {step: done(io.save_checkpoint, state(step, size=100_000), name) for step, name in steps.items()}
            if saved[10 * number + 1]:
                io.remove_checkpoint(f"{number}.ckpt")
        ways.update(saved.values())
        tenant.goes()
        with contextlib.suppress(SaveError):
            # A failure in the background is shown once more.
            io.teardown()
        elsewhere = kept.io(namespace="elsewhere", memory_dir=str(tmp_path), drain="thread")
        loaded = elsewhere.load_checkpoint("tiered:latest")["global_step"]
        assert loaded >= max([newest, *(step for step, is_saved in saved.items() if is_saved)])
        elsewhere.teardown()
        assert not saved[10 * number + 1] or not (Path(options["dirpath"]) / f"{number}.ckpt").exists()
        newest = loaded
    assert number > 4
    # Also with a spill: what memory has captured stays there, and may find no room for its description.
    assert ways == {True, False}
    kept.close()


@pytest.mark.timeout(170)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("kind", "behind"), [("sharded", True), ("local", False)])
@spilling
@space
def test_a_tenant_fills_the_tmpfs_at_any_point_of_a_save_by_dcp(spill, kind, behind, tight, tmp_path, monkeypatch):
    folder, fill, tenant = tight
    where = {"dirpath": str(tmp_path / "durable"), "memory_dir": str(folder), "spill_dir": spill}
    options = {**where, "on_save_error": "raise", "drain": "thread", "save_to_s3": True, "wait_timeout_s": 60}
    # If not even folders can be made there is no tier to open, which is an error of its own.
    MemoryTier.open(str(folder), ids.namespace_of(where["dirpath"]))
    watch, saved = Watch(folder, monkeypatch, fill), []

    def save(live, number, writer):
        made = (dcp.async_save if behind else dcp.save)(
            {"w": live}, checkpoint_id=f"step_{number}", storage_writer=writer, kind=kind
        )
        made = made.result(60) if behind else made
        assert kind == "sharded" or made.tiers == {"memory", "durable"}
        live.zero_()
        dcp.maybe_finalize_async_calls(blocking=True)

    for number in points(watch):
        live, content = (torch.arange(100_000.0) + number for _ in range(2))
        writer = build(TieredStorageWriter, **options, wait=kind == "sharded" or not behind)
        with watch.from_the(number):
            saved += [number] if done(save, live, number, writer) else []
        tenant.goes()
        writer.close()
        if number in saved:
            assert torch.equal(read_plainly(tmp_path / "durable" / f"step_{number}", kind), content)
    assert number > 4
    assert saved[-1:] == [number], "the last one needed no more than there was"


def read_plainly(folder, kind):
    """Returns the content of a checkpoint, read without this package."""
    if kind == "local":
        (file,) = folder.iterdir()
        return torch.load(file)["w"]
    wanted = {"w": torch.zeros(100_000)}
    torch_dcp.load(wanted, storage_reader=torch_dcp.FileSystemReader(folder))
    return wanted["w"]


@pytest.mark.timeout(120)
def test_a_process_out_of_descriptors_at_any_point(kept):
    io = kept.io(drain="thread", memory_keep_last=100)
    refused, newest = 0, 1
    assert loads(io, 1)
    for spare in range(16):
        step = spare + 2
        with descriptors_to_spare(spare):
            try:
                io.save_checkpoint(state(step), f"{step}.ckpt", storage_options=MEMORY_ONLY)
                newest = step
            except SaveError as error:
                refused += 1
                assert "Too many open files" in str(error)
        assert loads(io, newest), f"{spare} to spare"
    assert refused
    assert newest == 17


@pytest.mark.timeout(120)
def test_a_durable_save_out_of_descriptors_ends_soon_and_is_caught_up(kept):
    """From its first look at a tier on; nothing is said of memory that is not so."""
    refused = []
    for spare in range(24):
        io = kept.io(drain="thread", wait_timeout_s=600, memory_keep_last=100)
        io.checkpointer.session.clock = Clock(Timing(drain_trouble_s=0.1, redo_first_s=0.1))
        with descriptors_to_spare(spare):
            try:
                io.save_checkpoint(state(spare + 2), f"{spare + 2}.ckpt")
            except SaveError as error:
                refused.append(str(error))
        with contextlib.suppress(SaveError):
            # An earlier failure is shown once more, because it was in the background.
            io.teardown()
    io = kept.io(drain="thread", memory_keep_last=100)
    io.load_checkpoint("tiered:latest")
    io.checkpointer.session.wait(60)
    session = io.checkpointer.session.open()
    told = {outcome.op_id: outcome.error for outcome in session.drain.queue.outcomes()}
    for stored in session.tier.parts():
        # A failed save is given up once a later save is there, or needs its room in the queue.
        is_there = (Path(kept.options["dirpath"]) / stored.part.name).exists()
        given_up = told.get(stored.op_id, "")
        assert is_there or "superseded by" in given_up or "to keep the queue bounded" in given_up
    assert is_there, "the newest is"
    assert 2 < len(refused) < 24
    assert all("Too many open files" in text for text in refused), refused


def test_what_a_callback_asks_out_of_descriptors_stops_no_training(kept):
    made = kept.io(on_save_error="warn").checkpointer
    made.save(state(2), "2.ckpt")
    with descriptors_to_spare(0):
        made.alias("last.ckpt", "2.ckpt")
        made.remove(KEPT)
        made.session.poll()
        made.session.progress()
        made.session.is_pending(KEPT)
    # A delete is queued even so. To look into memory takes a descriptor, but no save has failed.
    assert made.session.progress().counters.get("failed", 0) == 0
    made.session.wait()
    assert not made.session.is_pending(KEPT)
    assert not Path(kept.options["dirpath"], KEPT).exists()
    made.save(state(1), KEPT)
    made.close()


def test_where_no_thread_can_be_started_training_goes_on(kept, caplog):
    """A checkpoint in memory does not count as failed, and a later durable save claims the dirpath."""
    io = kept.io(on_save_error="warn", memory_keep_last=100, pending_timeout_s=1)
    session = io.checkpointer.session
    with no_more_threads():
        # Large enough to be hashed by several threads.
        io.save_checkpoint(state(2, size=20 * MIB // 4), "2.ckpt", storage_options=MEMORY_ONLY)
        assert session.counts == {"saved": 1}
        io.save_checkpoint(state(3), "3.ckpt")
        io.checkpointer.session.poll()
    assert "could not check whether another run uses this dirpath: [Errno 11] can't start new thread" in caplog.text
    assert (session.counts["failed"], session.claims.owner) == (0, None)
    assert "the drain can't be started, so nothing is uploaded" in caplog.text
    io.save_checkpoint(state(4), "4.ckpt")
    assert (session.counts["saved"], session.claims.newest is not None) == (3, True)
    assert session.claims.owner is not None
    session.wait(60)
    assert {"3.ckpt", "4.ckpt"} <= {each.name for each in Path(kept.options["dirpath"]).iterdir()}
    assert loads(io, 4)
    assert io.load_checkpoint("2.ckpt")["global_step"] == 2
