"""Promises of a directory beyond the contract: writers that die, folders that come and go."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from tiered_checkpoint_io.errors import ConfigError, StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore

KILLED = """
import os, signal, sys
from tiered_checkpoint_io.stores.directory import DirectoryStore
def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
DirectoryStore(sys.argv[1]).upload("folder/x", memoryview(bytes(20 << 20)), progress=die)
"""


def temporary(root):
    folder = root / ".tiered" / "tmp"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_killed_writer_leaves_the_old_object_and_nothing_that_lasts(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("folder/x", b"old")
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60).returncode
    assert code == -signal.SIGKILL
    assert store.get("folder/x") == b"old"
    assert [entry.key for entry in store.list("")] == ["folder/x"]
    assert len(temporary(tmp_path)) == 1
    DirectoryStore(str(tmp_path)).put("y", b"1")
    assert temporary(tmp_path) == []


def test_a_live_writers_file_is_not_taken_for_a_dead_ones(tmp_path):
    started, go_on = threading.Event(), threading.Event()

    def hold(_):
        started.set()
        assert go_on.wait(30)

    data = os.urandom(20 << 20)
    writer = threading.Thread(
        target=DirectoryStore(str(tmp_path)).upload, args=("x", memoryview(data)), kwargs={"progress": hold}
    )
    writer.start()
    assert started.wait(30)
    other = DirectoryStore(str(tmp_path))
    other.put("y", b"1")
    go_on.set()
    writer.join(30)
    assert other.get("x") == data


@pytest.mark.parametrize("way", ["reflink", "link", "bytes"])
def test_a_copy_on_its_way_is_not_taken_for_a_dead_writers_file(way, tmp_path, monkeypatch):
    def clone(target, _, origin):
        # Acts as a file system with reflinks.
        if way != "reflink":
            raise OSError(errno.EOPNOTSUPP, "no reflinks here")
        os.sendfile(target, origin, 0, 1 << 30)

    monkeypatch.setattr(fcntl, "ioctl", clone)
    if way == "bytes":

        def refuse(*_, **__):
            raise OSError(errno.EPERM, "no links here")

        monkeypatch.setattr(os, "link", refuse)
    store, data = DirectoryStore(str(tmp_path)), os.urandom(1 << 20)
    store.put("epoch=1.ckpt", data)
    # Another process' first write, right before the copy gets its name.
    for _ in range(2):
        store.copy("epoch=1.ckpt", "last.ckpt", len(data), check=lambda: DirectoryStore(str(tmp_path)).put("y", b"1"))
    assert store.get("last.ckpt") == store.get("epoch=1.ckpt") == data
    assert os.path.samefile(tmp_path / "last.ckpt", tmp_path / "epoch=1.ckpt") == (way == "link")
    assert temporary(tmp_path) == []


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(tmp_path):
    store = DirectoryStore(str(tmp_path))
    failures = []

    def work(number):
        try:
            for _ in range(100):
                store.put(f"a/b/c/{number}", b"1")
                store.delete(f"a/b/c/{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not (tmp_path / "a").exists()


def test_its_own_folder_is_no_place_for_objects(tmp_path):
    with pytest.raises(ConfigError):
        DirectoryStore(str(tmp_path)).put(".tiered/tmp/x", b"1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_and_not_retried(tmp_path, monkeypatch):
    store = DirectoryStore(str(tmp_path))
    store.put("x", b"old")
    real = os.write
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(full, data))
    with pytest.raises(StoreError, match="No space left") as caught:
        store.put("x", b"new")
    monkeypatch.undo()
    os.close(full)
    assert not caught.value.retryable
    assert store.get("x") == b"old"
    assert temporary(tmp_path) == []


def test_what_stands_in_the_way_is_said(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("x", b"1")
    with pytest.raises(StoreError, match="same name"):
        store.put("x/y", b"1")
    store.put("folder/x", b"1")
    with pytest.raises(StoreError, match="same name"):
        store.put("folder", b"1")
    assert store.get("x") == store.get("folder/x") == b"1"
