"""Node memory that is too small, full, not memory, or not ours: said once, and nothing is lost."""

import os
import warnings
from pathlib import Path

import pytest
import torch
from support.bad_input import KEPT, Kept, state
from support.tenants import Tenant, mounted_tmpfs

from tiered_checkpoint_io.errors import MemoryTierError, MemoryUnsafeError, SaveError
from tiered_checkpoint_io.storage.memory import is_tmpfs

MIB = 1 << 20
#: What containers have for /dev/shm, where nobody says otherwise.
DOCKERS_DEFAULT = 64 * MIB
MEMORY_ONLY = {"tiers": ["memory"]}


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


def test_a_tmpfs_of_64_mib(kept_in_small):
    io = kept_in_small.io()
    with pytest.warns(UserWarning, match="memory tier can't hold") as caught:
        io.save_checkpoint(large(2), "2.ckpt")
        io.save_checkpoint(large(3), "3.ckpt")
    assert len(caught) == 1, "said once"
    with pytest.raises(SaveError, match="does not fit.*memory_allocation_percentage.*give memory_dir more space"):
        io.save_checkpoint(large(4), "4.ckpt", storage_options=MEMORY_ONLY)
    assert torch.equal(io.load_checkpoint("2.ckpt")["w"], large(2)["w"])
    io.teardown()
    io = kept_in_small.io()
    assert same(io.load_checkpoint("tiered:latest"), 3)
    assert io.checkpointer.restored.tier == "durable"
    # What fits still goes through memory.
    io.save_checkpoint(state(5), "5.ckpt", storage_options=MEMORY_ONLY)
    assert io.load_checkpoint("tiered:latest")["global_step"] == 5


def test_a_tmpfs_that_is_full_from_the_start(small, tmp_path):
    tenant = Tenant(small)
    tenant.fills()
    with pytest.warns(UserWarning, match="memory tier can't hold.*memory_dir is full") as caught:
        kept = Kept(tmp_path / "kept", small)
    assert len(caught) == 1
    with pytest.raises(SaveError, match="memory_dir is full: give it more space|does not fit"):
        kept.io().save_checkpoint(state(2), "2.ckpt", storage_options=MEMORY_ONLY)
    kept.close()
    tenant.goes()
    io = kept.io()
    assert io.load_checkpoint("tiered:latest")["global_step"] == 1
    io.teardown()


@pytest.mark.parametrize("moment", ["before space is taken", "after space is taken"])
def test_a_tmpfs_that_becomes_full_in_mid_save(kept_in_small, small, monkeypatch, moment):
    """Between the look at what is left and the taking of it, and behind it, where a small file is still to come."""
    io = kept_in_small.io(memory_keep_last=5)
    io.save_checkpoint(state(2), "2.ckpt", storage_options=MEMORY_ONLY)
    tenant = Tenant(small)
    take, cut, turns = os.posix_fallocate, os.ftruncate, []

    def taking(descriptor, offset, size):
        if size > 16 * MIB and not turns:
            turns.append("taken")
            if moment == "before space is taken":
                tenant.fills(leave=MIB)
        return take(descriptor, offset, size)

    def cutting(descriptor, size):
        cut(descriptor, size)
        if size > 16 * MIB and turns == ["taken"] and moment == "after space is taken":
            # What was taken in excess of the checkpoint has just been given back.
            turns.append("cut")
            tenant.fills()

    monkeypatch.setattr(os, "posix_fallocate", taking)
    monkeypatch.setattr(os, "ftruncate", cutting)
    with pytest.raises(SaveError, match="memory_dir is full: give it more space"):
        io.save_checkpoint(large(3, mib=20), "3.ckpt", storage_options=MEMORY_ONLY)
    turns.clear()
    tenant.goes()
    with pytest.warns(UserWarning, match="memory tier can't hold.*memory_dir is full"):
        io.save_checkpoint(large(4, mib=20), "4.ckpt")
    monkeypatch.undo()
    assert torch.load(Path(io.config.dirpath) / "4.ckpt")["global_step"] == 4
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


def test_a_folder_on_disk_works_with_a_warning(tmp_path):
    if is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs")
    (tmp_path / "disk").mkdir()
    with pytest.warns(UserWarning, match="memory_dir .*disk.* is not on tmpfs: .* as fast as that disk") as caught:
        kept = Kept(tmp_path / "kept", tmp_path / "disk")
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not on tmpfs")
        kept.still_loads()


def test_no_such_folder(tmp_path):
    kept = Kept.__new__(Kept)
    kept.options, kept.made = {"dirpath": str(tmp_path / "d"), "memory_dir": str(tmp_path / "none")}, []
    with pytest.raises(MemoryTierError, match="memory_dir does not exist.*none.*make it"):
        kept.io().load_checkpoint("tiered:latest")
    with pytest.raises(SaveError, match="memory_dir does not exist"):
        kept.io().save_checkpoint(state(1), "a.ckpt")


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
