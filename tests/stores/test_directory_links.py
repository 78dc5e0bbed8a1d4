"""Symbolic links planted below dirpath lead no read and no write elsewhere; dirpath itself may be one."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.clocks import quick
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import StoreError, TieredCheckpointError
from tiered_checkpoint_io.stores.directory import DirectoryStore

KEYS = ("x", "a/x", "a/b/x", ".tiered/manifests/x.json", ".tiered/saves/1/index")
LOCK, TOKEN = ".tiered/tmp/conditional-write", "guessed"
PLACES = sorted({"/".join(key.split("/")[: depth + 1]) for key in (*KEYS, LOCK) for depth in range(key.count("/") + 1)})
PLACES += [f".tiered/tmp/{TOKEN}"]
OUTSIDE = b"of another user"


class Guessed:
    """A clock whose random names an attacker knows."""

    def __init__(self):
        self._clock = quick()

    def token(self, _):
        return TOKEN

    def __getattr__(self, name):
        return getattr(self._clock, name)


def tree(folder):
    """Returns all that is there, links included."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = kind
    return found


def plant(root, place, kind, outside):
    """Puts a link in the place of a file or a folder."""
    path = root / place
    if has_link(root, place.rpartition("/")[0] or "none"):
        # The link would lead the attack itself elsewhere.
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)
    with contextlib.suppress(FileExistsError, NotADirectoryError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(
            {"there": outside / place, "dangling": outside / "new", "parent": "..", "own": root / "y"}[kind]
        )


def has_link(root, key):
    return any((root / "/".join(key.split("/")[:depth])).is_symlink() for depth in range(1, key.count("/") + 2))


def attempts(store):
    """Returns each operation that a store has, by name; reads give bytes, or names."""

    def read(key):
        size = store.size(key)
        buffer, piece = bytearray(size), bytearray(size)
        store.read_into(key, 0, memoryview(buffer))
        store.read_pieces(key, 0, [memoryview(piece)], lambda _: None)
        assert buffer == piece == store.get(key) == store.get_tagged(key)[0]
        return bytes(buffer)

    def copy(key):
        store.copy(key, "y", len(OUTSIDE), check=lambda: None)

    return {
        "put": lambda key: store.put(key, b"ours of " + key.encode()),
        "put_if": lambda key: store.put_if(key, b"ours of " + key.encode(), store.tag(key)),
        "read": read,
        "copy": copy,
        "copy onto": lambda key: store.copy("y", key, 1, check=lambda: None),
        "delete": store.delete,
        "delete_if": lambda key: store.delete_if(key, store.tag(key) or ""),
        "list": lambda key: [entry.key for entry in store.list(key[: key.rfind("/") + 1])],
        "children": lambda key: store.children(key[: key.rfind("/") + 1]),
    }


STEPS = st.one_of(
    st.tuples(st.just("plant"), st.sampled_from(PLACES), st.sampled_from(["there", "dangling", "parent", "own"])),
    st.tuples(st.sampled_from(sorted(attempts(DirectoryStore("/")))), st.sampled_from(KEYS), st.just("")),
    st.tuples(st.just("put"), st.sampled_from(KEYS), st.just("")),
)


@example([("plant", LOCK, "dangling"), ("put_if", "x", "")])
@example([("plant", ".tiered", "there"), ("put", "x", ""), ("list", KEYS[3], ""), ("read", KEYS[3], "")])
@given(steps=st.lists(STEPS, min_size=2, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_no_operation_of_a_store_leaves_its_folder(memory_dir, steps):
    base = Path(tempfile.mkdtemp(dir=memory_dir))
    root, outside = base / "root", base / "outside"
    for key in (*KEYS, LOCK):
        (outside / key).parent.mkdir(parents=True, exist_ok=True)
        (outside / key).write_bytes(OUTSIDE)
    root.mkdir()
    before, store = tree(outside), DirectoryStore(str(root), clock=Guessed())
    store.put("y", b"1")
    calls = attempts(store)
    for action, key, kind in steps:
        if action == "plant":
            plant(root, key, kind, outside)
            continue
        is_linked = has_link(root, key)
        try:
            found = calls[action](key)
        except StoreError as error:
            assert not error.retryable
            if "symbolic link" in str(error):
                assert "only dirpath itself may be a link" in error.hint
        else:
            above = key.rpartition("/")[0]
            assert not (above and has_link(root, above) and action in ("put", "put_if", "copy onto", "read", "list"))
            if action == "read":
                assert not is_linked
                assert found in {b"1", *(b"ours of " + each.encode() for each in KEYS)}
            elif action in ("put", "put_if"):
                assert store.get(key) == b"ours of " + key.encode()
            elif action in ("list", "children"):
                assert not [name for name in found if (root / above / name).is_symlink()]
        assert tree(outside) == before
    shutil.rmtree(base)


def test_dirpath_itself_may_be_a_link_and_a_link_of_lightnings_own_is_replaced_by_a_save(memory_dir, caplog):
    base = Path(memory_dir)
    (base / "disk" / "run").mkdir(parents=True)
    (base / "scratch").symlink_to(base / "disk")
    root = base / "scratch" / "run"
    torch.save({"w": torch.zeros(64), "global_step": 0}, root / "stock.ckpt")
    (root / "last.ckpt").symlink_to("stock.ckpt")
    before = (root / "stock.ckpt").read_bytes()
    io = build(TieredCheckpointIO, str(root), memory_dir=memory_dir, drain="thread", wait_timeout_s=60)
    with pytest.raises(TieredCheckpointError, match="'last.ckpt' is a symbolic link.*replace the link by the file"):
        io.load_checkpoint("last.ckpt")
    io.save_checkpoint({"w": torch.ones(64), "global_step": 1}, "last.ckpt")
    io.teardown()
    assert torch.load(base / "disk" / "run" / "last.ckpt")["global_step"] == 1
    assert not (root / "last.ckpt").is_symlink()
    assert (root / "stock.ckpt").read_bytes() == before
    io.save_checkpoint({"global_step": 2}, "2.ckpt", storage_options={"tiers": ["memory"]})
    same = build(TieredCheckpointIO, f"{base}/disk/run", memory_dir=memory_dir)
    assert [same.load_checkpoint(which)["global_step"] for which in ("tiered:latest", root / "2.ckpt")] == [2, 2]
    options = {"memory_dir": memory_dir, "namespace": io.config.namespace}
    assert not build(TieredCheckpointIO, f"{base}/other", **options).load_checkpoint("tiered:latest")
    assert f"to take it, resume from {base}/disk/run/2.ckpt" in caplog.text
