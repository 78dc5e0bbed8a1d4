"""Too little memory: at any point of a save or load, and of files or descriptors; nothing is lost."""

import contextlib
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from support.bad_input import KEPT, Kept, state
from support.supporting import build
from support.tenants import Tenant, Watch, descriptors_to_spare, mounted_tmpfs, no_more_threads

from tiered_checkpoint_io import TieredStorageWriter, dcp
from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.restore.restore import NodeFetcher
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.memory.node import try_lock
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

MIB = 1 << 20
MEMORY_ONLY = {"tiers": ["memory"]}


def large(step, mib=10):
    return state(step, size=mib * MIB // 4)


def test_ended_trials_give_their_memory_to_the_next_if_all_they_have_is_durable(start, tmp_path, caplog):
    caplog.set_level("INFO", "tiered_checkpoint_io")
    with mounted_tmpfs(tmp_path / "shm", 24 * MIB) as shm, contextlib.ExitStack() as ends:

        def trial(name, *, mib=4, io=None, **options):
            io = io or start(dirpath=str(tmp_path / name), memory_dir=str(shm), namespace=name, spill_dir=None)
            ends.callback(io.teardown)
            if mib:
                io.save_checkpoint(large(1, mib=mib), "1.ckpt", **options)
            return io

        def held():
            return sorted(each.name for each in shm.glob("tiered-*/*"))

        trial("only-here", storage_options=MEMORY_ONLY).teardown()
        for name in ("a", "b"):
            trial(name).teardown()
        assert held() == ["a", "b", "only-here"]
        live = trial("c")
        assert held() == ["b", "c", "only-here"], "the oldest goes"
        assert "took memory of ended runs, whose checkpoints are all durable: a (" in caplog.text
        where = f"--memory-dir {shm} --namespace only-here"
        large_one = trial("d", mib=0)
        with pytest.raises(SaveError) as full:
            trial("d", mib=12, io=large_one)
        assert f"`tiered-ckpt flush {where}`, then `tiered-ckpt clean --yes {where}`" in full.value.hint
        assert re.search(r"c \([0-9.]+ MiB, in use\)", full.value.hint)
        assert held() == ["c", "d", "only-here"]
        live.teardown()
        trial("d", mib=12, io=large_one).teardown()
        assert all(trial(name, mib=0).load_checkpoint("1.ckpt") for name in ("a", "b", "c", "only-here"))


def test_other_processes_take_the_memory_of_the_node_or_job(kept, warned):
    """The test changes the budget: a real shortage would end other tests."""
    io = kept.io(memory_keep_last=9)
    tier = io.checkpointer.session.open().tier

    def left(mib):
        tier.budget = tier.usage() + mib * MIB

    io.save_checkpoint(large(2, mib=10), "2.ckpt", storage_options=MEMORY_ONLY)
    left(40)
    with warned(r"skipped: .*does not fit: .* the node's free memory allow [45]"):
        io.save_checkpoint(large(3, mib=60), "3.ckpt", storage_options=MEMORY_ONLY)
    with warned("memory tier can't hold.* goes through .*/tiered-"):
        io.save_checkpoint(large(4, mib=60), "4.ckpt")
    # A part with its space takes no more.
    io.remove_checkpoint("2.ckpt")
    left(0)
    io.save_checkpoint(large(5, mib=9), "5.ckpt", storage_options=MEMORY_ONLY)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 5
    left(500)
    io.save_checkpoint(large(6, mib=60), "6.ckpt")
    assert io.load_checkpoint("tiered:latest")["global_step"] == 6
    io.remove_checkpoint("5.ckpt")
    io.remove_checkpoint("6.ckpt")


@pytest.mark.parametrize(("drain", "how"), [("thread", "files alone"), ("thread", "moved"), ("process", "removed")])
def test_training_goes_on_where_memory_is_removed_beside_it(drain, how, memory_dir, tmp_path, caplog):
    """A user may call ``rm``, or a service clear /dev/shm; the folder may be moved away, or mounted over."""
    kept = Kept(tmp_path / "kept", memory_dir)
    io = kept.io(drain=drain)
    io.save_checkpoint(state(2), "2.ckpt")
    io.save_checkpoint(state(3), "3.ckpt", storage_options={"tiers": ["memory"]})
    root = io.checkpointer.session.open().tier.root
    if how == "files alone":
        for file in root.rglob("*"):
            if not file.is_dir():
                file.unlink()
    elif how == "moved":
        root.rename(root.with_name("away"))
    else:
        shutil.rmtree(root)
    for step in (4, 5):
        io.save_checkpoint(state(step), f"{step}.ckpt")
    io.save_checkpoint(state(6), "6.ckpt", storage_options={"tiers": ["memory"]})
    if how != "files alone":
        assert f"{root} was removed, with all that it held; it is made again" in caplog.text
    # The locks of this memory are held again.
    assert [try_lock(root / name) for name in ("drain.lock", "trainers.lock", "job.lock")] == [None] * 3
    assert io.load_checkpoint("tiered:latest")["global_step"] == 6
    io.teardown()
    assert kept.io(namespace="another-node").load_checkpoint("tiered:latest")["global_step"] == 5
    kept.close()


@pytest.fixture
def other_node(memory_dir):
    os.mkdir(f"{memory_dir}/other")
    return f"{memory_dir}/other"


def tier_of(io):
    return io.checkpointer.session.open().tier


def steps(io):
    return [stored.part.content.step for stored in tier_of(io).parts()]


def saved(io, numbers, **options):
    for step in numbers:
        io.save_checkpoint(state(step, **options), f"step_{step}.ckpt")


def test_a_node_that_only_loads_keeps_the_last_checkpoints(start, other_node):
    saved(start(), range(1, 7))
    io = start(memory_dir=other_node)
    for step in range(1, 7):
        loaded = io.load_checkpoint(f"step_{step}.ckpt")
        assert torch.equal(loaded["w"], state(step)["w"])
        assert io.checkpointer.restored.tier == "durable"
        assert steps(io) == [each for each in (step - 1, step) if each]
    # A newly loaded part stays, even if others are newer; parts on the node are loaded from its memory.
    io.load_checkpoint("step_2.ckpt")
    assert steps(io) == [2, 5, 6]
    io.load_checkpoint("step_1.ckpt")
    assert steps(io) == [1, 5, 6]
    io.load_checkpoint("tiered:latest")
    assert (io.checkpointer.restored.tier, steps(io)) == ("memory", [5, 6])


def test_what_a_process_has_mapped_stays_until_it_lets_go(start, other_node):
    """Its removal would free nothing."""
    saved(start(), range(1, 5))
    io = start(memory_dir=other_node, memory_keep_last=1)
    loaded = {step: io.load_checkpoint(f"step_{step}.ckpt") for step in range(1, 4)}
    assert steps(io) == [1, 2, 3]
    io.save_checkpoint(state(9), "step_9.ckpt", storage_options={"tiers": ["memory"]})
    assert all(torch.equal(loaded[step]["w"], state(step)["w"]) for step in loaded)
    loaded.clear()
    io.load_checkpoint("step_4.ckpt")
    assert steps(io) == [4, 9]


@pytest.mark.parametrize("moment", ["fetch_everywhere", "hold"])
def test_what_one_process_is_about_to_load_another_one_does_not_remove(start, other_node, monkeypatch, moment):
    """Several evaluations on one node: what each has verified must be there until it has it."""
    saved(start(), range(1, 5))
    first, second = (start(memory_dir=other_node, memory_keep_last=1) for _ in range(2))
    first.load_checkpoint("step_1.ckpt")
    original, late = getattr(NodeFetcher, moment), ["step_3.ckpt", "step_2.ckpt"]

    def beside(*arguments, **options):
        done = original(*arguments, **options)
        while late:
            second.load_checkpoint(late.pop())
        return done

    monkeypatch.setattr(NodeFetcher, moment, beside)
    assert torch.equal(first.load_checkpoint("step_1.ckpt")["w"], state(1)["w"])
    assert first.checkpointer.restored.tier == "memory"
    first.load_checkpoint("step_4.ckpt")
    assert steps(first) == [4]


@pytest.fixture
def kept_somewhere(tmp_path, memory_dir):
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
#: One of the two; :func:`test_a_tenant_fills_the_tmpfs_at_any_point_of_a_save_by_dcp` takes both.
space = pytest.mark.parametrize("tight", ["space", pytest.param("files", marks=pytest.mark.matrix)], indirect=True)


def done(call, *args, **options):
    """Returns True if a call has saved; if not, its one error names the exhausted resource."""
    try:
        call(*args, **options)
    except SaveError as error:
        assert re.search("^no room for .*(name a spill_dir|memory_dir is full: )", str(error)), error
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
def test_a_durable_save_out_of_descriptors_ends_soon_and_is_caught_up(kept_somewhere):
    """From its first look at a tier on; nothing is said of memory that is not so."""
    refused = []
    for spare in range(24):
        io = kept_somewhere.io(drain="thread", wait_timeout_s=600, memory_keep_last=100)
        io.checkpointer.session.clock = Clock(Timing(drain_trouble_s=0.1, redo_first_s=0.1))
        with descriptors_to_spare(spare):
            try:
                io.save_checkpoint(state(spare + 2), f"{spare + 2}.ckpt")
            except SaveError as error:
                refused.append(str(error))
        with contextlib.suppress(SaveError):
            # An earlier failure is shown once more, because it was in the background.
            io.teardown()
    io = kept_somewhere.io(drain="thread", memory_keep_last=100)
    io.load_checkpoint("tiered:latest")
    io.checkpointer.session.wait(60)
    session = io.checkpointer.session.open()
    errors = {outcome.op_id: outcome.error for outcome in session.drain.queue.outcomes()}
    for stored in session.tier.parts():
        # A failed save is given up once a later save is there, or needs its room in the queue.
        is_there = (Path(kept_somewhere.options["dirpath"]) / stored.part.name).exists()
        given_up = errors.get(stored.op_id, "")
        assert is_there or "superseded by" in given_up or "to keep the queue bounded" in given_up
    assert is_there, "the newest is"
    assert 2 < len(refused) < 24
    assert all("Too many open files" in text for text in refused), refused


def test_where_no_thread_can_be_started_training_goes_on(kept_somewhere, caplog):
    """A checkpoint in memory does not count as failed, and a later durable save claims the dirpath."""
    io = kept_somewhere.io(on_save_error="warn", memory_keep_last=100, pending_timeout_s=1)
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
    assert {"3.ckpt", "4.ckpt"} <= {each.name for each in Path(kept_somewhere.options["dirpath"]).iterdir()}
    assert loads(io, 4)
    assert io.load_checkpoint("2.ckpt")["global_step"] == 2
