"""Node memory that is too small, full, not memory, or not ours: said once, and nothing is lost."""

import contextlib
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from support.bad_input import KEPT, Kept, state
from support.supporting import build
from support.tenants import Tenant, mounted_tmpfs

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.engine.checkpointer import TIERS
from tiered_checkpoint_io.engine.drain.locks import try_lock
from tiered_checkpoint_io.errors import ExportError, MemoryTierError, MemoryUnsafeError, SaveError
from tiered_checkpoint_io.export.files import new_file
from tiered_checkpoint_io.memory import node, slot
from tiered_checkpoint_io.memory import tier as memory
from tiered_checkpoint_io.memory.node import is_tmpfs, memory_left, memory_limit

MIB = 1 << 20
#: What containers have for /dev/shm, where nobody says otherwise.
DOCKERS_DEFAULT = 64 * MIB
MEMORY_ONLY = {"tiers": ["memory"]}
SKIPPED = r"steps of memory alone are skipped: .*(give it more space|give memory_dir more space)"


@pytest.fixture
def small(tmp_path):
    """A real tmpfs of 64 MiB."""
    with mounted_tmpfs(tmp_path / "shm", DOCKERS_DEFAULT) as folder:
        yield folder


@pytest.fixture
def kept_in_small(small, tmp_path):
    kept = Kept(tmp_path / "kept", small)
    yield kept
    kept.close()
    Tenant(small).goes()
    kept.still_loads()


def large(step, mib=100):
    return state(step, size=mib * MIB // 4)


def same(loaded, step):
    return torch.equal(loaded["w"], large(step)["w"])


def test_a_tmpfs_of_64_mib(kept_in_small, warned):
    # What is spilled counts as well.
    io = kept_in_small.io(memory_keep_last=5)
    with warned("memory tier can't hold.* goes through .*/tiered-") as caught:
        io.save_checkpoint(large(2), "2.ckpt")
        io.save_checkpoint(large(3), "3.ckpt")
    assert len(caught) == 1, "said once"
    with warned(SKIPPED):
        io.save_checkpoint(large(4), "4.ckpt", storage_options=MEMORY_ONLY)
    assert torch.equal(io.load_checkpoint("2.ckpt")["w"], large(2)["w"])
    io.teardown()
    io = kept_in_small.io(memory_keep_last=5)
    assert same(io.load_checkpoint("tiered:latest"), 3)
    assert io.checkpointer.restored.tier == "memory"
    # What fits still goes through memory.
    io.save_checkpoint(state(5), "5.ckpt", storage_options=MEMORY_ONLY)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 5


def test_what_is_said_once_is_said_again_after_a_save_that_had_room(kept_in_small, caplog):
    io = kept_in_small.io(memory_keep_last=5, spill_dir=None)
    session, said = io.checkpointer.session, []

    def caught():
        return [each for each in caplog.messages if "the memory tier can't hold" in each]

    for step, mib in enumerate([70, 70, 1, 70, 70], start=2):
        io.save_checkpoint(large(step, mib=mib), f"{step}.ckpt", storage_options=MEMORY_ONLY)
        said.append(len(caught()))
    assert (said, session.counts["skipped"]) == ([1, 1, 1, 2, 2], 4)
    io.teardown()


def test_a_spill_that_is_full_as_well_is_told_apart_from_memory(kept_in_small, tmp_path, warned):
    with mounted_tmpfs(tmp_path / "disk", 20 * MIB) as disk:
        io = kept_in_small.io(spill_dir=str(disk))
        both = (
            "skipped: .* the node's free memory allow [0-9]+; and neither in the spill: .* the disk allows [0-9]+"
            ".*name a spill_dir with more space"
        )
        with warned(both) as caught:
            io.save_checkpoint(large(2), "2.ckpt", storage_options=MEMORY_ONLY)
        assert len(caught) == 1
        io.teardown()


def test_a_tmpfs_that_is_full_from_the_start(small, tmp_path, warned):
    """Not even the queue of the drain has room there, so a spill is of no use."""
    tenant = Tenant(small)
    tenant.fills()
    where = {"dirpath": str(tmp_path / "durable"), "memory_dir": str(small), "drain": "thread"}
    io = build(TieredCheckpointIO, **where, on_save_error="raise")
    with pytest.raises(
        SaveError, match=r"^no room for the queue for the durable tier: .*memory_dir is full: .*name a spill_dir"
    ):
        io.save_checkpoint(state(1), "1.ckpt")
    with warned(SKIPPED):
        io.save_checkpoint(state(2), "2.ckpt", storage_options=MEMORY_ONLY)
    tenant.goes()
    io.save_checkpoint(state(3), "3.ckpt")
    assert io.load_checkpoint("tiered:latest")["global_step"] == 3
    io.teardown()


@pytest.mark.parametrize("moment", ["before space is taken", "after space is taken"])
def test_a_tmpfs_that_becomes_full_in_mid_save(kept_in_small, small, monkeypatch, moment, warned):
    """Between the look at what is left and the taking of it, and behind it, where a small file is still to come."""
    io = kept_in_small.io(memory_keep_last=5)
    io.save_checkpoint(state(2), "2.ckpt", storage_options=MEMORY_ONLY)
    tenant = Tenant(small)
    take, cut, turns = slot.take_space, os.ftruncate, []

    def taking(descriptor, start, end, **how):
        if end - start > 16 * MIB and not turns:
            turns.append("taken")
            if moment == "before space is taken":
                tenant.fills(leave=MIB)
        return take(descriptor, start, end, **how)

    def cutting(descriptor, size):
        cut(descriptor, size)
        if size > 16 * MIB and turns == ["taken"] and moment == "after space is taken":
            # What was taken in excess of the checkpoint has just been given back.
            turns.append("cut")
            tenant.fills()

    monkeypatch.setattr(slot, "take_space", taking)
    monkeypatch.setattr(os, "ftruncate", cutting)
    with warned(SKIPPED):
        io.save_checkpoint(large(3, mib=20), "3.ckpt", storage_options=MEMORY_ONLY)
    turns.clear()
    tenant.goes()
    if moment == "before space is taken":
        with warned("memory tier can't hold.* goes through"):
            io.save_checkpoint(large(4, mib=20), "4.ckpt")
        assert torch.load(Path(io.config.dirpath) / "4.ckpt")["global_step"] == 4
    else:
        with pytest.raises(SaveError, match="^no room for 4.ckpt: .*name a spill_dir"):
            io.save_checkpoint(large(4, mib=20), "4.ckpt")
    monkeypatch.undo()
    # The tenant is still there; what was in memory is, too.
    assert io.load_checkpoint("2.ckpt")["global_step"] == 2
    assert io.checkpointer.restored.tier == "memory"
    tenant.goes()
    io.save_checkpoint(large(5, mib=20), "5.ckpt", storage_options=MEMORY_ONLY)
    assert io.load_checkpoint("5.ckpt")["global_step"] == 5
    # No failed save holds any room.
    used = os.statvfs(small)
    assert (used.f_blocks - used.f_bavail) * used.f_frsize < 45 * MIB
    io.remove_checkpoint("5.ckpt")
    io.remove_checkpoint("2.ckpt")


def test_other_processes_take_the_memory_of_the_node_or_job(kept, tmp_path, monkeypatch, warned):
    """What the kernel says is left, as a file that the test writes: to take it in earnest would end other tests."""
    (tmp_path / "proc").mkdir()

    def left(mib):
        margin = min(1 << 30, memory_limit() // 64)
        (tmp_path / "proc" / "meminfo").write_text(f"MemAvailable: {(mib * MIB + margin) >> 10} kB\n")

    def asks():
        return memory_left(tmp_path / "proc", tmp_path)

    monkeypatch.setattr(memory, "memory_left", asks)
    monkeypatch.setattr(node, "memory_left", asks)
    left(500)
    io = kept.io(memory_keep_last=9)
    io.save_checkpoint(large(2, mib=10), "2.ckpt", storage_options=MEMORY_ONLY)
    left(40)
    with warned(r"skipped: .*does not fit: .* the node's free memory allow 4"):
        io.save_checkpoint(large(3, mib=60), "3.ckpt", storage_options=MEMORY_ONLY)
    with warned("memory tier can't hold.* goes through .*/tiered-"):
        io.save_checkpoint(large(4, mib=60), "4.ckpt")
    # What has its space already takes no more of it.
    io.remove_checkpoint("2.ckpt")
    left(0)
    io.save_checkpoint(large(5, mib=9), "5.ckpt", storage_options=MEMORY_ONLY)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 5
    left(500)
    io.save_checkpoint(large(6, mib=60), "6.ckpt")
    assert io.load_checkpoint("tiered:latest")["global_step"] == 6
    io.remove_checkpoint("5.ckpt")
    io.remove_checkpoint("6.ckpt")


@pytest.mark.matrix
@pytest.mark.timeout(60)
def test_a_tenant_that_comes_and_goes_all_the_time(small, tmp_path):
    """At any moment between a look at what is left and a write to it; were that not reserved, a signal would end us."""
    tenant, over = Tenant(small), threading.Event()

    def restless():
        while not over.is_set():
            with contextlib.suppress(OSError):
                tenant.fills()
            over.wait(0.002)
            tenant.goes()

    kept = Kept(tmp_path / "kept", small)
    io = kept.io(memory_keep_last=2, on_save_error="warn")
    thread = threading.Thread(target=restless)
    thread.start()
    try:
        # Ever larger, so that no slot can be used again.
        reports = [
            io.checkpointer.save(large(step, mib=step), f"{step}.ckpt", tiers=TIERS if step % 3 == 0 else {"memory"})
            for step in range(2, 14)
        ]
    finally:
        over.set()
        thread.join()
    assert all(reports[1::3]), "what may go to the durable tier gets there one way or the other"
    newest = max(report.step for report in reports if report is not None)
    assert torch.equal(io.load_checkpoint("tiered:latest")["w"], large(newest, mib=newest)["w"])
    kept.close()


def test_an_export_to_a_full_file_system_is_an_error(small):
    """What is put together in a mapped file has to have its space before it is written to."""
    Tenant(small).fills(leave=MIB)
    with pytest.raises(ExportError, match="No space left"), new_file(small / "target", 8 * MIB):
        pass
    assert not (small / "target").exists()


def test_a_folder_on_disk_works_with_a_warning(tmp_path, warned):
    if is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs")
    (tmp_path / "disk").mkdir()
    with warned("memory_dir .*disk.* is not on tmpfs: .* as fast as that disk") as caught:
        kept = Kept(tmp_path / "kept", tmp_path / "disk")
    assert len(caught) == 1
    kept.still_loads()


def test_no_such_folder(tmp_path):
    kept = Kept.__new__(Kept)
    kept.options, kept.made = {"dirpath": str(tmp_path / "d"), "memory_dir": str(tmp_path / "none")}, []
    with pytest.raises(MemoryTierError, match="memory_dir does not exist.*none.*make it"):
        kept.io().load_checkpoint("tiered:latest")
    with pytest.raises(SaveError, match="memory_dir does not exist"):
        kept.io().save_checkpoint(state(1), "a.ckpt")


@pytest.mark.parametrize(
    ("drain", "how"),
    [
        ("thread", "removed"),
        ("thread", "files alone"),
        ("thread", "moved"),
        ("process", "removed"),
        pytest.param("process", "moved", marks=pytest.mark.matrix),
    ],
)
def test_training_goes_on_where_memory_is_removed_beside_it(drain, how, memory_dir, tmp_path, caplog):
    """By ``rm``, by what clears /dev/shm when a user logs out, or old files of folders.

    Or its folder is moved away, or mounted over: its files have their names, but these are elsewhere.
    """
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
        assert f"{root} was removed, with all that it held; it is made anew" in caplog.text
    # What guards this memory does so again.
    assert [try_lock(root / name) for name in ("drain.lock", "trainers.lock", "job.lock")] == [None] * 3
    assert io.load_checkpoint("tiered:latest")["global_step"] == 6
    io.teardown()
    assert kept.io(namespace="another-node").load_checkpoint("tiered:latest")["global_step"] == 5
    kept.close()


def test_memory_that_is_not_ours_is_refused_and_left(kept, tmp_path):
    ours = Path(kept.options["memory_dir"]) / f"tiered-{os.getuid()}"
    away = ours.rename(ours.with_name("away"))
    target = tmp_path / "elsewhere"
    target.mkdir()

    def refused(said):
        with pytest.raises(MemoryUnsafeError, match=rf"{said}.*tiered-{os.getuid()}.*remove it, or name another"):
            kept.io().load_checkpoint("tiered:latest")
        with pytest.raises(SaveError, match=said):
            kept.io().save_checkpoint(state(2), "2.ckpt")

    ours.symlink_to(target)
    refused("is a symbolic link")
    assert not list(target.iterdir())
    ours.unlink()
    ours.mkdir(mode=0o755)
    refused("is open to others")
    ours.chmod(0o700)
    if os.getuid() == 0:
        os.chown(ours, 12345, -1)
        refused("belongs to user 12345")
    assert not list(ours.iterdir())
    ours.rmdir()
    away.rename(ours)
    assert kept.io().load_checkpoint(KEPT)["global_step"] == 1


def test_mounts_whose_names_are_not_utf_8(memory_dir, tmp_path, monkeypatch):
    """Of anything mounted on the node, such as a disk that an older system has named."""
    strange = tmp_path / "a b\t\\040"
    mounts = Path("/proc/self/mounts").read_bytes()
    mounts += b"x /mnt/Donn\xe9es ext4 rw 0 0\n"
    mounts += b"y " + os.fsencode(tmp_path) + rb"/a\040b\011\134040 tmpfs rw 0 0" + b"\n"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: mounts if str(self) == "/proc/self/mounts" else read(self))
    monkeypatch.setattr(Path, "read_text", lambda self, *how: self.read_bytes().decode(*how))
    assert is_tmpfs("/dev/shm")
    assert is_tmpfs(str(strange))
    assert is_tmpfs(f"{strange}/below")
    kept = Kept(tmp_path / "kept", memory_dir)
    kept.still_loads()
    kept.close()
