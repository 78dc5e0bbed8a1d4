"""The spill: its place, its limit, its users, and its owner."""

import contextlib
import functools
import os
import shutil
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.bad_input import state
from support.tenants import mounted_tmpfs

from tiered_checkpoint_io import AsyncCheckpointIO
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.errors import MemoryTierError, SaveError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.memory.tier import OWNER_FILE, claim, disk_left, spill_dir_of

MIB = 1 << 20
LARGE = 1_500_000


@pytest.fixture
def options(tmp_path):
    """Yields a job on a node with 4 MiB of memory, for checkpoints of 6 MB."""
    with mounted_tmpfs(tmp_path / "small", 4 * MIB) as small:
        yield {"dirpath": str(tmp_path / "durable"), "memory_dir": str(small), "drain": "thread", "wait_timeout_s": 30}


@pytest.fixture
def started(start, options):
    return functools.partial(start, **options)


def session_of(io):
    return io.checkpointer.session


def saves(io, *steps):
    for step in steps:
        io.save_checkpoint(state(step, size=LARGE), f"{step}.ckpt")


@pytest.mark.parametrize(
    ("kind", "is_local"), [("ext4", True), ("fuse.fuse-overlayfs", True), ("nfs4", False), ("lustre", False)]
)
def test_what_the_key_means(kind, is_local, temporary_folder, monkeypatch):
    """The value "auto" takes no folder that other nodes may see, and none in a pod, whose disk may be small."""
    monkeypatch.setattr(node, "mounts", lambda: [("/", "tmpfs"), (str(temporary_folder), kind)])
    assert spill_dir_of("auto") == (str(temporary_folder) if is_local else None)
    monkeypatch.setattr(node, "mounts", lambda: [("/", kind), (str(temporary_folder), "tmpfs")])
    assert spill_dir_of("auto") == ("/var/tmp" if is_local else None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert [spill_dir_of(each) for each in ("auto", None, "/scratch")] == [None, None, "/scratch"]


def test_half_of_what_is_free_without_it_stays_free(tmp_path):
    free = shutil.disk_usage(tmp_path).free
    assert disk_left(tmp_path, 0, is_shared=True) == pytest.approx(free / 2, rel=0.05)
    assert disk_left(tmp_path, free, is_shared=True) <= free * 0.05
    assert disk_left(tmp_path, free, is_shared=False) == pytest.approx(free, rel=0.05)


def test_it_is_said_once_and_the_folder_is_private(options, started, tmp_path, warned):
    io = started(log_dir=str(tmp_path / "logs"))
    with warned(r"can't hold this checkpoint of 5.72 MiB .*/tiered-\d+/[\w-]+-.*may take") as said:
        saves(io, 1, 2)
    assert len(said) == 1
    root = session_of(io).open().tier.spill.root
    assert all(stat.S_IMODE(folder.stat().st_mode) == 0o700 for folder in (root, root.parent, root / "saves"))
    assert session_of(io).last_save.spilled
    assert io.load_checkpoint("tiered:latest")["global_step"] == 2
    log = next((tmp_path / "logs").glob("*_checkpointing.log")).read_text()
    assert log.count("can't hold this checkpoint") == 1
    assert "loading 2.ckpt (spill, 5.72 MiB)" in log


@pytest.mark.parametrize("wrong", ["another user's", "open to others", "a link"])
def test_a_folder_that_is_not_ours_alone_is_left_alone(wrong, options, started, tmp_path, warned):
    mine, named = tmp_path / "named" / f"tiered-{os.getuid()}", str(tmp_path / "named")
    mine.mkdir(0o700, parents=True)
    if wrong == "another user's":
        os.chown(mine, 12345, 12345)
    elif wrong == "open to others":
        mine.chmod(0o777)
    else:
        mine.rmdir()
        mine.symlink_to(tmp_path)
    io = started(spill_dir=named)
    with warned("^nothing is spilled ") as said:
        for step in (1, 2):
            with pytest.raises(SaveError, match="name a spill_dir"):
                io.save_checkpoint(state(step, size=LARGE), f"{step}.ckpt")
    assert len(said) == 1
    assert session_of(io).counts == {"failed": 2}
    assert not list(Path(named).glob("*/*/saves"))


def test_what_the_durable_tier_has_makes_room(options, started, tmp_path):
    with mounted_tmpfs(tmp_path / "disk", 20 * MIB) as disk:
        io = AsyncCheckpointIO(started(spill_dir=str(disk), memory_keep_last=5, max_pending=9))
        session = session_of(io)
        for step in (1, 2, 3, 4):
            io.save_checkpoint(state(step, size=LARGE), f"{step}.ckpt")
            io.checkpointer.session.wait()
        memory = session.open().tier
        assert [each.part.name for each in memory.parts()] == ["2.ckpt", "3.ckpt", "4.ckpt"], session.last_save
        # Even the newest goes.
        io.save_checkpoint(state(5, size=3 * LARGE), "5.ckpt")
        assert session.last_save.spilled
        assert [each.part.name for each in memory.parts()] == ["5.ckpt"]
        io.teardown()


def test_a_damaged_part_is_quarantined_where_it_lies_and_an_incomplete_one_goes(options, started, monkeypatch):
    io = started()
    saves(io, 1, 2)
    memory = session_of(io).open().tier
    (_, newest) = memory.parts()
    file = newest.file("2.ckpt")
    file.write_bytes(b"x" * file.stat().st_size)
    half = newest.folder.with_name("rank-00001.new")
    half.mkdir()
    os.utime(half, (1, 1))
    io.teardown()
    io = started()
    assert io.load_checkpoint("2.ckpt")["global_step"] == 2
    memory = session_of(io).open().tier
    assert [folder.is_relative_to(memory.spill.root) for folder in memory.quarantined()] == [True]
    assert not half.exists()


CLAIM = """
    import os, sys
    from pathlib import Path
    from tiered_checkpoint_io.clock import SYSTEM
    from tiered_checkpoint_io.memory import node
    from tiered_checkpoint_io.memory.tier import claim
    base, memory, make, boot = sys.argv[1:]
    if boot:
        node.boot_id = lambda: boot
    for line in iter(lambda: "look", None):
        found = claim(Path(base), Path(memory), SYSTEM, make=make == "make")
        print(found and found.name, flush=True)
        if sys.stdin.readline() == "fork\\n":
            # A worker that outlives its trainer.
            if os.fork() == 0:
                os.close(1)
                sys.stdin.read()
            os._exit(0)
"""


class Process:
    """A process that claims a spill for a memory, and lives on."""

    def __init__(self, base, memory, *, make=True, boot=""):
        line = [sys.executable, "-c", textwrap.dedent(CLAIM), str(base), str(memory), "make" if make else "", boot]
        self._process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = self._process.stdout.readline().strip()

    def forks_and_ends(self):
        self._process.stdin.write("fork\n")
        self._process.stdin.flush()
        self._process.wait(30)

    def end(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def process(tmp_path):
    """Starts processes of memory ``a`` or ``b``, whose spill is on one disk."""
    for name in ("disk", "a", "b"):
        (tmp_path / name).mkdir(0o700)
    with contextlib.ExitStack() as stack:

        def process(memory, *, base=tmp_path / "disk" / "job", **options):
            made = Process(base, tmp_path / memory, **options)
            stack.callback(made.end)
            return made

        yield process


def test_a_spill_is_of_one_memory_until_the_last_process_of_that_has_ended(process, tmp_path):
    assert process("b", make=False).name == "None", "no process made one"
    first, again = process("a"), process("a")
    assert (first.name, again.name, process("b", make=False).name) == ("job", "job", "None")
    other = process("b")
    assert other.name == "job-2"
    first.end()
    assert process("b", make=False).name == "job-2"
    again.forks_and_ends()
    other.end()
    assert process("b", make=False).name == "job-2", "its own rather than one that is free"
    shutil.rmtree(tmp_path / "disk" / "job-2")
    assert process("b", make=False).name == "job", "that of a dead one, worker or not"


def test_after_a_reboot_a_spill_goes_to_the_memory_that_comes_first(process):
    process("a").end()
    assert process("b", make=False, boot="another").name == "job"


def test_a_link_in_place_of_the_file_that_names_its_owner_is_not_followed(tmp_path):
    base, memory = tmp_path / "disk" / "job", tmp_path / "a"
    base.mkdir(0o700, parents=True)
    memory.mkdir()
    (tmp_path / "victim").write_text("kept")
    (base / OWNER_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        claim(base, memory, SYSTEM, make=True)
    assert (tmp_path / "victim").read_text() == "kept"
    (base / OWNER_FILE).unlink()
    base.chmod(0o777)
    with pytest.raises(MemoryTierError, match="open to others"):
        claim(base, memory, SYSTEM, make=True)
