"""A state becomes a part in memory: at once, whole, within its room; a user's stories with only the IO; ends, threads, forks."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from support.bad_input import KEPT, state
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.engine import session
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.client import DrainHandle
from tiered_checkpoint_io.errors import ConfigError, SaveError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

MIB = 1 << 20


@pytest.fixture
def opened(memory_dir, tmp_path, monkeypatch):
    """Opens memory with a budget, for a job whose drain never gets to work."""
    monkeypatch.setattr(DrainHandle, "ensure", lambda _: None)
    made = []

    def open_memory(budget_bytes=None, keep_last=2):
        monkeypatch.setattr(session, "node_budget", lambda *_: budget_bytes)
        engine = Checkpointer(
            build(
                TieredCheckpointConfig,
                dirpath=str(tmp_path),
                memory_dir=memory_dir,
                memory_keep_last=keep_last,
                on_save_error="raise",
                max_pending=9,
            )
        )
        made.append(engine)
        return engine.session.open().tier, engine

    yield open_memory
    for engine in made:
        engine.session.release()


def save(engine, step, *, mib=4, durable=False):
    tiers = {"memory", "durable"} if durable else {"memory"}
    state = {"w": torch.full((mib * MIB // 4,), float(step)), "global_step": step}
    engine.save(state, f"step={step}.ckpt", tiers=tiers, wait=False)
    return engine.session.open().tier.parts()[-1]


def steps(tier):
    return [stored.part.content.step for stored in tier.parts()]


def load(tier, stored):
    (entry,) = stored.part.content.files
    with reading(stored) as views:
        for index, (offset, length) in enumerate(entry.chunks):
            entry.check_chunk(index, views[entry.basename][offset : offset + length], tier="memory", where="x")
    return torch.load(stored.file(entry.basename), mmap=True, weights_only=True)


#: Modules of the package that the third memory-only save of a small state enters, on all threads, at most.
MOST_MODULES = {"full": 24, "sharded": 29, "local": 28}


@pytest.mark.parametrize("kind", MOST_MODULES)
def test_a_memory_only_save_enters_few_modules(kind, durable_dir, memory_dir):
    config, entered = TieredCheckpointConfig(dirpath=durable_dir, memory_dir=memory_dir), set()
    io = TieredCheckpointIO(config) if kind == "full" else TieredStorageWriter(config, save_to_s3=False)

    def save(step):
        state, name = {"w": torch.full((16,), float(step)), "global_step": step}, f"step_{step}"
        if kind == "full":
            io.save_checkpoint(state, name, storage_options={"tiers": ["memory"]})
        else:
            dcp.save(state, checkpoint_id=name, storage_writer=io, kind=kind)

    def note(frame, event, _):
        if event == "call" and "/tiered_checkpoint_io/" in frame.f_code.co_filename:
            entered.add(frame.f_code.co_filename)

    save(1)
    save(2)
    for profile in (threading.setprofile, sys.setprofile):
        profile(note)
    try:
        save(3)
    finally:
        for profile in (threading.setprofile, sys.setprofile):
            profile(None)
    (io.teardown if kind == "full" else io.close)()
    assert len(entered) <= MOST_MODULES[kind], sorted(entered)


def test_a_steady_run_takes_no_space_and_no_new_file(opened, monkeypatch):
    tier, engine = opened(keep_last=2)
    for step in range(1, 5):
        save(engine, step)
    engine.session.open().capturer._preparing.join()
    used = tier.usage()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken again"))
    inodes = set()
    for step in range(5, 12):
        stored = save(engine, step)
        inodes.add(os.stat(stored.file(f"step={step}.ckpt")).st_ino)
        assert load(tier, stored)["w"][-1] == step
    assert len(inodes) == 3
    assert tier.usage() == pytest.approx(used, abs=MIB)


def test_a_capture_that_fails_leaves_no_part_and_gives_its_slot_back(opened, monkeypatch):
    def fails(*_, **__):
        raise ConfigError("resized")

    tier, engine = opened()
    for step in (1, 2, 3):
        save(engine, step)
    used = tier.usage()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "fill", fails)
        for step in range(4, 14):
            with pytest.raises(ConfigError, match="resized"):
                save(engine, step)
    assert steps(tier) == [2, 3]
    # One more may be prepared for the next save.
    assert tier.usage() <= used + 6 * MIB
    save(engine, 14)
    assert steps(tier) == [3, 14]


@pytest.mark.parametrize("told_by", ["saves of memory alone", "looks for outcomes"])
def test_a_drain_that_dies_amid_its_work_does_not_wait_for_the_next_durable_save(tmp_path, start, told_by):
    """The next may come an hour later, and the node may be gone by then."""
    engine = start(dirpath=str(tmp_path), drain="process", memory_keep_last=1).checkpointer
    engine.save(state(1), "a.ckpt")
    pid = engine.session.open().drain.progress().pid
    # It dies during the upload, as for want of memory.
    os.kill(pid, signal.SIGSTOP)
    engine.save(state(2), "b.ckpt", wait=False)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while engine.session.is_pending("b.ckpt"):
        assert time.monotonic() < deadline
        if told_by == "looks for outcomes":
            engine.session.poll()
        else:
            engine.save(state(3), "c.ckpt", tiers=["memory"])
        time.sleep(0.05)
    assert torch.load(tmp_path / "b.ckpt")["global_step"] == 2
    assert engine.session.open().drain.progress().pid != pid


@pytest.fixture
def broken(kept):
    """Makes the durable tier fail, and work again."""
    durable, away = Path(kept.options["dirpath"]), Path(kept.options["dirpath"]).with_name("away")

    class Broken:
        def fails(self):
            durable.rename(away)
            durable.write_text("no folder")

        def works(self):
            durable.unlink()
            away.rename(durable)

    return Broken()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("first", "drain", "rule"), [("save", "process", "warn"), ("delete", "thread", "raise")])
def test_operations_behind_a_failed_save_do_not_delay_the_end(drain, first, rule, kept, broken):
    io = kept.io(drain=drain, on_save_error=rule, wait_timeout_s=600, memory_keep_last=5)
    io.save_checkpoint(state(2), "2.ckpt")
    if first == "delete":
        # One that could be carried out, and fails by itself.
        io.checkpointer.alias("last.ckpt", "2.ckpt")
        io.checkpointer.session.wait()
    broken.fails()
    io.checkpointer.save(state(3), "3.ckpt", wait=False)
    io.remove_checkpoint("2.ckpt")
    io.checkpointer.alias("last.ckpt", "3.ckpt")
    io.remove_checkpoint("last.ckpt")
    started, failed = time.monotonic(), pytest.raises(SaveError, match="did not reach the durable tier")
    with failed if rule == "raise" else contextlib.nullcontext():
        io.teardown()
    assert time.monotonic() - started < 20
    broken.works()
    assert (Path(kept.options["dirpath"]) / "2.ckpt").exists(), "what was good stays until what replaces it is good"
    io = kept.io(drain=drain, on_save_error="raise", wait_timeout_s=50)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 3
    io.checkpointer.session.wait()
    there = {path.name for path in Path(kept.options["dirpath"]).glob("*.ckpt")}
    assert there == {KEPT, "3.ckpt"}
    io.teardown()


THREADS, SAVES, BOUND_S = 4, 5, 60.0


@pytest.fixture
def io(request, tmp_path, start):
    kept = {"memory_keep_last": THREADS * SAVES, "max_pending": THREADS * SAVES}
    return start(drain=getattr(request, "param", "thread"), **kept)


def filled(step):
    return {"w": torch.full((50_000,), float(step)), "global_step": step}


def test_threads_may_save_at_once(io):
    failed, begun = [], threading.Barrier(THREADS)

    def save(thread):
        begun.wait(BOUND_S)
        for number in range(SAVES):
            step = thread * SAVES + number
            try:
                io.save_checkpoint(filled(step), f"step={step}.ckpt", {"wait": step % 2 == 0})
            except Exception as error:
                failed.append(error)

    threads = [threading.Thread(target=save, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
        assert not thread.is_alive()
    assert failed == []
    assert io.checkpointer.session.counts == {"saved": THREADS * SAVES}
    for step in range(THREADS * SAVES):
        loaded = io.load_checkpoint(f"step={step}.ckpt")
        assert loaded["global_step"] == step
        assert bool((loaded["w"] == step).all())


def test_a_save_within_a_save_is_one_clear_error(io):
    """A signal handler may save within a save; the interrupted save ends well."""

    class Interrupting:
        def __reduce__(self):
            if not refused:
                refused.append(None)
                with pytest.raises(ConfigError, match="in the middle of another save of the same thread"):
                    io.save_checkpoint(filled(2), "step=2.ckpt")
            return (int, (7,))

    refused = []
    io.save_checkpoint({**filled(1), "n": Interrupting()}, "step=1.ckpt")
    assert refused
    assert io.load_checkpoint("tiered:latest")["n"] == 7


@pytest.mark.parametrize("io", ["process"], indirect=True)
def test_a_forked_process_begins_anew_and_leaves_alone_what_is_its_parents(io, memory_dir):
    """For a worker of a DataLoader, or a rank of ``ddp_fork`` whose parent has used the IO."""
    for step in (1, 2, 3):
        io.save_checkpoint(filled(step), f"step={step}.ckpt")
    deadline = time.monotonic() + BOUND_S
    # The next save's slot is made in the background; a fork then would inherit the lock of the slots' folder.
    while any(each.name == "tiered-prepare" for each in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    free = sorted(Path(memory_dir).rglob("slots/slot-*"))
    assert free

    def child(answers):
        # A DataLoader does the same: OpenMP does not survive a fork.
        torch.set_num_threads(1)
        here = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.exists()]
        mapped = Path("/proc/self/maps").read_text().splitlines()
        answers.send([line for line in (*here, *mapped) if memory_dir in line])
        io.save_checkpoint(filled(4), "step=4.ckpt")
        answers.send(io.load_checkpoint("tiered:latest")["global_step"])
        io.teardown()
        # An interpreter that ends in full collects what it has inherited.
        gc.collect()
        answers.send("ended")

    here, there = multiprocessing.Pipe()
    worker = multiprocessing.get_context("fork").Process(target=child, args=(there,), daemon=True)
    worker.start()
    received = [here.recv() for _ in range(3) if here.poll(BOUND_S)]
    worker.join(BOUND_S)
    assert received == [[], 4, "ended"]
    assert worker.exitcode == 0
    assert set(free) <= set(Path(memory_dir).rglob("slots/slot-*"))
    io.save_checkpoint(filled(5), "step=5.ckpt")
    for step in (1, 2, 3, 4, 5):
        assert bool((io.load_checkpoint(f"step={step}.ckpt")["w"] == step).all())
    save_ids = [stored.save_id for stored in io.checkpointer.session.open().tier.parts()]
    assert len(set(save_ids)) == 5
