"""A file system that is full, and a process out of descriptors, at every point of a save: said, and nothing is lost."""

import contextlib
import errno
import os
import resource
import warnings
from pathlib import Path

import pytest
import torch
from support.bad_input import KEPT, Kept, state

from tiered_checkpoint_io.errors import SaveError

MEMORY_ONLY = {"tiers": ["memory"]}


@pytest.fixture
def kept(tmp_path, memory_dir):
    """A job whose first checkpoint has to load at the end, from either tier: memory may let go of it to make room."""
    kept = Kept(tmp_path / "kept", memory_dir)
    yield kept
    io = kept.io()
    assert torch.equal(io.load_checkpoint(KEPT)["w"], state(1)["w"])
    kept.close()


class Full:
    """Refuses this process the n-th piece of space below a folder, and all later ones, as a full tmpfs does."""

    def __init__(self, folder, monkeypatch):
        self.folder = str(folder)
        self.patch = monkeypatch
        self.at = 0
        self.count = 0

    def take(self, path):
        if str(path).startswith(self.folder):
            self.count += 1
            if 0 < self.at <= self.count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    @contextlib.contextmanager
    def from_the(self, number):
        self.at, self.count = number, 0
        opens, mkdir, allocate = os.open, os.mkdir, os.posix_fallocate

        def opening(path, flags, *args, **options):
            if flags & os.O_CREAT and not os.path.exists(path):
                self.take(path)
            return opens(path, flags, *args, **options)

        def making(path, *args, **options):
            if not os.path.exists(path):
                self.take(path)
            return mkdir(path, *args, **options)

        def allocating(descriptor, *args):
            self.take(os.readlink(f"/proc/self/fd/{descriptor}"))
            return allocate(descriptor, *args)

        with self.patch.context() as patch:
            patch.setattr(os, "open", opening)
            patch.setattr(os, "mkdir", making)
            patch.setattr(os, "posix_fallocate", allocating)
            yield


def loads(io, step):
    return torch.equal(io.load_checkpoint("tiered:latest")["w"], state(step)["w"])


@pytest.mark.timeout(120)
@pytest.mark.parametrize("tiers", [["memory"]], ids=["memory"])
def test_a_tmpfs_that_is_full_from_any_point_of_a_save_on(tiers, kept, monkeypatch):
    full = Full(kept.options["memory_dir"], monkeypatch)
    newest, points = 1, 0
    for number in range(1, 40):
        io = kept.io(drain="thread", wait_timeout_s=1, memory_keep_last=100)
        io.load_checkpoint("tiered:latest")
        step = number + 1
        with full.from_the(number), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="the memory tier can't hold")
            try:
                io.save_checkpoint(state(step), f"{step}.ckpt", storage_options={"tiers": tiers})
                newest = step
            except SaveError as error:
                points += 1
                assert any(word in str(error) for word in ("memory_dir is full", "not durable", "can't be read"))
            reached = full.count >= number
        # Once more, what did not become durable while memory was full.
        with contextlib.suppress(SaveError):
            io.teardown()
        io = kept.io(drain="thread", memory_keep_last=100)
        loaded = io.load_checkpoint("tiered:latest")["global_step"]
        # What could not be told may have been done all the same.
        assert loaded in (newest, step), f"full from {number} on"
        newest = max(newest, loaded)
        assert loads(io, newest)
        io.teardown()
        if not reached:
            break
    assert points >= 3
    assert not reached
    io = kept.io(memory_keep_last=100)
    io.save_checkpoint(state(99), "99.ckpt")
    assert loads(io, 99)
    for path in Path(kept.options["memory_dir"]).rglob("*.new"):
        raise AssertionError(f"left behind: {path}")


@pytest.mark.timeout(120)
def test_a_process_out_of_descriptors_at_any_point(kept):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    io = kept.io(drain="thread", memory_keep_last=100)
    refused, newest = 0, 1
    assert loads(io, 1)
    for spare in range(16):
        step = spare + 2
        used = set(map(int, os.listdir("/proc/self/fd")))
        free = [number for number in range(soft) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], hard))
        try:
            io.save_checkpoint(state(step), f"{step}.ckpt", storage_options=MEMORY_ONLY)
            newest = step
        except SaveError as error:
            refused += 1
            assert "Too many open files" in str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert loads(io, newest), f"{spare} to spare"
    assert refused
    assert newest == 17
