"""A tmpfs of a few megabytes, and other users of it who take all that is left."""

import contextlib
import errno
import itertools
import os
import resource
import subprocess
import threading
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_tmpfs(folder, size, inodes=0):
    """Mounts a real tmpfs of so many bytes, with files if asked for; skips the test if it can't."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    options = f"size={size},mode=1777" + (f",nr_inodes={inodes}" if inodes else "")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        pytest.skip(f"a tmpfs can't be mounted here: {done.stderr.strip()}")
    try:
        yield Path(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=20)


class Tenant:
    """Another user of the same tmpfs."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.file = self.folder / "tenant"

    def fills(self, leave=0):
        """Takes all space but so many bytes."""
        free = os.statvfs(self.folder)
        with open(self.file, "ab") as file:
            file.write(bytes(max(0, free.f_bavail * free.f_frsize - leave)))

    def takes_all_inodes(self):
        """Takes the name of every file that may still be made."""
        for number in range(100_000):
            try:
                (self.folder / f"tenant-{number}").touch(exist_ok=False)
            except FileExistsError:
                continue
            except OSError as error:
                assert error.errno == errno.ENOSPC
                return
        raise AssertionError("this tmpfs does not bound its files")

    def goes(self):
        for file in self.folder.glob("tenant*"):
            file.unlink()


class Watch:
    """Calls ``act`` when this process is about to take its n-th piece of space below a folder, and at each later one."""

    def __init__(self, folder, monkeypatch, act):
        self.folder = str(folder)
        self.patch = monkeypatch
        self.act = act
        self.at = 0
        self.count = 0
        self.is_acting = False
        self.lock = threading.RLock()

    def take(self, path):
        with self.lock:
            if str(path).startswith(self.folder) and not self.is_acting:
                self.count += 1
                if 0 < self.at <= self.count:
                    self.is_acting = True
                    try:
                        self.act(path)
                    finally:
                        self.is_acting = False

    @contextlib.contextmanager
    def from_the(self, number):
        self.at, self.count = number, 0
        opens, mkdir, allocate, mine = os.open, os.mkdir, os.posix_fallocate, os.getpid()

        def opening(path, flags, *args, **options):
            if flags & os.O_CREAT and os.getpid() == mine and not os.path.exists(path):
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
        # A thread that was about to take a piece acts before this returns, or not at all.
        with self.lock:
            self.at = 0


@contextlib.contextmanager
def descriptors_to_spare(spare):
    """Lets this process open only so many more files in the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not by a listing, which takes a descriptor itself; a worker that has run many tests has hundreds open.
    free = (number for number in range(hard) if not os.path.lexists(f"/proc/self/fd/{number}"))
    limit = next(itertools.islice(free, spare, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def no_more_threads():
    """Lets no thread start in the block, as beyond a container's ``pids.max``; ``ulimit -u`` is not for root."""

    def refused(_):
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        yield
