"""Symbolic links planted below dirpath lead no read and no write elsewhere; dirpath itself may be one."""

import contextlib
import itertools
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
from typer.testing import CliRunner

from tiered_checkpoint_io import TieredCheckpointIO, list_checkpoints
from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.errors import CheckpointNotFoundError, RestoreError, StoreError, TieredCheckpointError
from tiered_checkpoint_io.stores.directory import DirectoryStore

KEYS = ("x", "a/x", "a/b/x", ".tiered/manifests/x.json", ".tiered/saves/1/index")
LOCK, TOKEN = ".tiered/tmp/conditional-write", "guessed"
PLACES = sorted({"/".join(key.split("/")[: depth + 1]) for key in (*KEYS, LOCK) for depth in range(key.count("/") + 1)})
PLACES += [f".tiered/tmp/{TOKEN}", f".tiered/tmp/{TOKEN}.link"]
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
    """All that is there, links included."""
    found = {}
    for path in sorted(folder.rglob("*")):
        kind = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path.relative_to(folder))] = kind
    return found


def plant(root, place, kind, outside):
    """Puts a link where a file or a folder is, or will be."""
    path = root / place
    if has_link(root, place.rpartition("/")[0] or "none"):
        # It would lead the attack itself elsewhere.
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
    """Each operation that a store has, by name; reads give bytes, or names."""

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
                assert found == b"ours of " + key.encode()
            elif action in ("put", "put_if"):
                assert store.get(key) == b"ours of " + key.encode()
            elif action in ("list", "children"):
                assert not [name for name in found if (root / above / name).is_symlink()]
        assert tree(outside) == before
    shutil.rmtree(base)


class Run:
    """A job that saves, keeps two, deletes, verifies, and restores on another node; each step may fail, saying why."""

    def __init__(self, root, memory_dir, first):
        self.root, self.memory_dir, self.first, self.errors = root, Path(memory_dir), first, []

    def io(self, node):
        (self.memory_dir / node).mkdir(exist_ok=True)
        options = {"memory_dir": str(self.memory_dir / node), "drain": "thread", "wait_timeout_s": 60}
        return build(TieredCheckpointIO, str(self.root), retention=[{"latest": 2}], on_save_error="warn", **options)

    def trying(self, call, *arguments, **options):
        try:
            return call(*arguments, **options)
        except TieredCheckpointError as error:
            self.errors.append(error)
            return None

    def save(self, *numbers):
        io = self.io("first")
        for number in numbers:
            state = {"w": torch.full((64,), float(self.first + number)), "global_step": number, "epoch": 0}
            self.trying(io.save_checkpoint, state, f"deep/step_{number}.ckpt", {"tiers": ["memory", "durable"]})
            self.trying(io.checkpointer.alias, "last.ckpt", f"deep/step_{number}.ckpt", copy=number % 2 == 0)
        self.trying(io.checkpointer.session.wait)
        io.teardown()

    def loaded(self):
        """The numbers that a restart on another node may load."""
        CliRunner().invoke(app, ["verify", str(self.root)])
        self.trying(list_checkpoints, str(self.root))
        io = self.io("second")
        found = [self.trying(io.load_checkpoint, which) for which in ("tiered:latest", "last.ckpt", "deep/step_3.ckpt")]
        io.teardown()
        return [int(state["w"][0]) for state in found if state is not None and "w" in state]


@pytest.mark.parametrize("kind", ["there", pytest.param("dangling", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    "moment", ["between", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("before", "behind"))]
)
def test_no_run_leaves_its_folder(memory_dir, moment, kind):
    base = Path(memory_dir)
    outside = base / "outside"
    Run(outside, tempfile.mkdtemp(dir=base), 100).save(1, 2, 3)
    before = tree(outside)
    for index in itertools.count():
        run = Run(base / f"run-{index}", tempfile.mkdtemp(dir=base), 0)
        run.save(*{"before": (), "between": (1,), "behind": (1, 2, 3)}[moment])
        places = sorted(tree(outside if moment == "before" else run.root))
        if index == len(places):
            break
        plant(run.root, places[index], kind, outside)
        if moment != "behind":
            run.save(2, 3)
        assert {number for number in run.loaded() if number > 3} == set(), places[index]
        assert tree(outside) == before, places[index]
        named = [each for each in run.errors if "is a symbolic link" in str(each)]
        assert all(isinstance(each, RestoreError | CheckpointNotFoundError) or each in named for each in run.errors)
    assert index > 5


def test_dirpath_itself_and_folders_above_may_be_links(memory_dir):
    base = Path(memory_dir)
    (base / "disk" / "runs").mkdir(parents=True)
    (base / "scratch").symlink_to(base / "disk")
    (base / "disk" / "mine").symlink_to("runs")
    for root in (base / "scratch" / "mine", base / "scratch" / "mine" / "new" / "run"):
        run = Run(root, tempfile.mkdtemp(dir=base), 0)
        run.save(1, 2, 3)
        assert run.loaded() == [3, 3, 3]
        assert run.errors == []
    assert (base / "disk" / "runs" / "new" / "run" / "deep" / "step_3.ckpt").is_file()


def test_a_link_of_lightnings_own_is_replaced_by_a_save_and_not_read(memory_dir):
    """As ``save_last="link"`` leaves one without this package."""
    base = Path(memory_dir)
    run = Run(base / "run", tempfile.mkdtemp(dir=base), 0)
    run.root.mkdir()
    torch.save({"w": torch.zeros(64), "global_step": 0}, run.root / "stock.ckpt")
    (run.root / "last.ckpt").symlink_to("stock.ckpt")
    io = run.io("second")
    with pytest.raises(TieredCheckpointError, match="'last.ckpt' is a symbolic link.*replace the link by the file"):
        io.load_checkpoint("last.ckpt")
    io.teardown()
    before = (run.root / "stock.ckpt").read_bytes()
    run.save(1, 2)
    assert run.loaded()[:2] == [2, 2]
    assert (run.root / "stock.ckpt").read_bytes() == before
