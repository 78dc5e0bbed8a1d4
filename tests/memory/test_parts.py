"""Parts, slots and folders of node memory: whole, used again, safe, after deaths; and how much memory the node has."""

import contextlib
import mmap
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.failing import failing

from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.memory.parts import opened, reading
from tiered_checkpoint_io.memory.tier import MemoryTier, namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.documents import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part

MIB = 1 << 20
RUN = ids.new_run_id()


@pytest.fixture
def tier(memory_dir):
    tier = MemoryTier.open(memory_dir, "test")
    yield tier
    tier.close()


def part_of(data, number, *, durable=False):
    entry = FileEntry(f"step={number}.ckpt", len(data), 16 << 20, (hash_bytes(data),))
    content = Content(ids.save_id(RUN, number), number, 0, "full", 1.0, 1, {}, (entry,), switch=entry.basename)
    return Part(entry.path, 0, content, "d", durable)


def save(tier, data, number, **options):
    slot = tier.acquire(len(data))
    with slot.view as view:
        view[: len(data)] = data
    part = part_of(data, number, **options)
    return tier.commit(part, {part.content.files[0].basename: slot})


def content_of(tier, stored):
    with reading(stored) as views:
        return bytes(views[stored.part.content.files[0].basename])


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def inode(stored):
    return os.stat(stored.file(stored.part.content.files[0].basename)).st_ino


def test_a_committed_part_is_found_by_another_process_whole_and_private(tier, memory_dir):
    stored = save(tier, b"abc" * 1000, 1, durable=True)
    other = MemoryTier(namespace_root(memory_dir, "test"))
    (seen,) = other.parts()
    assert seen == stored
    assert seen.pending
    assert content_of(other, seen) == b"abc" * 1000
    assert stored.file("step=1.ckpt").stat().st_size == 3000, "cut to its size"
    for path in [tier.root, *tier.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("damage", ["missing", "cut", "not json", "moved"])
def test_a_damaged_part_is_shown_and_can_be_quarantined(tier, damage):
    good, bad = save(tier, b"good", 1), save(tier, b"bad!", 2)
    if damage == "missing":
        (bad.folder / "part.json").unlink()
    elif damage == "cut":
        (bad.folder / "part.json").write_bytes((bad.folder / "part.json").read_bytes()[:-9])
    elif damage == "not json":
        (bad.folder / "part.json").write_bytes(b"\xff\0")
    else:
        (bad.folder / "part.json").write_bytes((good.folder / "part.json").read_bytes())
    assert [part.save_id for part in tier.parts()] == [good.save_id]
    ((folder, _),) = tier.unreadable()
    assert folder == bad.folder
    kept = tier.quarantine(folder, "test")
    assert (kept / "step=2.ckpt").read_bytes() == b"bad!"
    assert (kept / "reason.txt").read_text() == "test"
    assert tier.unreadable() == []
    assert not bad.folder.parent.exists()
    # Another process has found it, too; later the same part is back, from a peer, and damaged again.
    assert MemoryTier(tier.root).quarantine(folder, "again") == kept.parent
    again = tier.quarantine(save(tier, b"bad!", 2).folder, "again")
    assert set(tier.quarantined()) == {kept, again}
    assert (kept / "reason.txt").read_text() == "test"
    last = tier.quarantine(save(tier, b"bad!", 2).folder, "again")
    assert set(tier.quarantined()) == {again, last}, "the same part takes no more memory, however often it is damaged"


def test_slots_go_round_for_states_that_grow_a_little(tier):
    first = save(tier, b"1" * (8 * MIB), 1)
    used = inode(first)
    for number, size in enumerate((8 * MIB - 5, 8 * MIB + MIB // 4), start=2):
        tier.remove(first)
        first = save(tier, b"%d" % number * size, number)
        assert inode(first) == used
        assert content_of(tier, first) == b"%d" % number * size
    tier.remove(first)
    larger = save(tier, b"4" * (12 * MIB), 4)
    assert content_of(tier, larger) == b"4" * (12 * MIB)
    assert files_in(tier.root / "slots") == [], "one that is too small makes way"


def test_the_pages_of_what_another_process_removed_are_given_back(tier, memory_dir):
    stored = save(tier, b"x" * MIB, 1)
    MemoryTier(namespace_root(memory_dir, "test")).remove(stored)
    assert tier.parts() == []
    assert "(deleted)" in mappings(memory_dir)
    tier.give_back(tier.acquire(10))
    assert "(deleted)" not in mappings(memory_dir)


def mappings(memory_dir):
    return "\n".join(line for line in Path("/proc/self/maps").read_text().splitlines() if memory_dir in line)


@pytest.mark.parametrize("by", ["reading", "a mapping that may outlive its reader"])
def test_a_file_that_is_being_read_is_never_written_to_again(tier, by):
    stored = save(tier, b"old" * 1000, 1)
    with contextlib.ExitStack() as stack:
        if by == "reading":
            kept = stack.enter_context(reading(stored))["step=1.ckpt"]
        else:
            with opened(stored, keep=True):
                kept = mapped_by_others(stored)
        tier.remove(stored)
        save(tier, b"new" * 1000, 2)
        save(tier, b"new" * 1000, 3)
        assert kept[:] == b"old" * 1000


def mapped_by_others(stored):
    """Returns a mapping without a lock, as torch.load makes it."""
    with open(stored.file("step=1.ckpt"), "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def test_folders_that_are_not_ours_alone_are_refused_and_left(memory_dir, tmp_path):
    base = Path(memory_dir)
    ours = base / f"tiered-{os.getuid()}"
    ours.symlink_to(tmp_path)
    with failing("unsafe", match="symbolic link"):
        MemoryTier.open(memory_dir, "test")
    assert list(tmp_path.iterdir()) == []
    ours.unlink()

    ours.mkdir(mode=0o700)
    ours.chmod(0o775)
    with failing("unsafe", match="open to others"):
        MemoryTier.open(memory_dir, "test")
    assert stat.S_IMODE(ours.stat().st_mode) == 0o775
    ours.chmod(0o700)

    (ours / "test").mkdir(mode=0o700)
    (ours / "test" / "slots").symlink_to(tmp_path)
    with failing("unsafe", match="symbolic link"):
        MemoryTier.open(memory_dir, "test")
    (ours / "test" / "slots").unlink()

    (ours / "test" / "slots").write_text("")
    with failing("unsafe", match="not a folder"):
        MemoryTier.open(memory_dir, "test")
    (ours / "test" / "slots").unlink()

    if os.getuid() == 0:
        os.chown(ours / "test", 12345, -1)
        with failing("unsafe", match="belongs to user 12345"):
            MemoryTier.open(memory_dir, "test")


def test_folders_that_kubernetes_has_opened_to_a_group_are_closed_again(memory_dir):
    """Kubernetes opens them by ``fsGroup``, each time a pod starts: u=rwx, g=rws, recursively."""
    MemoryTier.open(memory_dir, "test").close()
    folders = [each for each in Path(memory_dir).rglob("*") if each.is_dir()]
    for folder in folders:
        folder.chmod(0o2770)
    with pytest.warns(UserWarning, match="was open to its group.*OnRootMismatch") as said:
        tier = MemoryTier.open(memory_dir, "test")
    assert len(said) == 1
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in folders} == {0o700}
    assert content_of(tier, save(tier, b"x" * 5000, 1)) == b"x" * 5000
    tier.close()


def test_a_link_in_place_of_a_file_is_not_followed(tier, tmp_path):
    stored = save(tier, b"x", 1)
    (tmp_path / "secret").write_bytes(b"y")
    stored.file("step=1.ckpt").unlink()
    stored.file("step=1.ckpt").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic links"), reading(stored):
        pass


def test_a_missing_memory_dir_and_one_on_disk(tmp_path):
    with pytest.raises(MemoryTierError, match="does not exist"):
        MemoryTier.open(str(tmp_path / "none"), "test")
    if node.is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs")
    with pytest.warns(UserWarning, match="not on tmpfs"):
        tier = MemoryTier.open(str(tmp_path), "test")
    assert content_of(tier, save(tier, b"x" * 5000, 1)) == b"x" * 5000, "but it works"
    tier.close()


def test_the_slots_of_the_living_stay_and_what_the_dead_left_goes(tier, memory_dir):
    held = tier.acquire(MIB)
    tier.pool.prepare(MIB, lambda: False)
    script = f"""
        import os, signal
        from tiered_checkpoint_io.memory.tier import MemoryTier
        tier = MemoryTier.open({memory_dir!r}, "test")
        tier.acquire({MIB})
        tier.pool.prepare({MIB}, lambda: False)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(script).returncode == -signal.SIGKILL
    assert len(files_in(tier.root / "slots")) == 4
    # Another one had just begun to remove a part, and to make one.
    half = tier.root / "saves" / ids.save_id(ids.new_run_id(), 1) / "rank-00000.x.new"
    for folder in (tier.root / "trash" / "saves.x", half):
        folder.mkdir(0o700, parents=True)
        (folder / "step=1.ckpt").write_bytes(b"x")
    os.utime(half, (1, 1))
    MemoryTier.open(memory_dir, "test").close()
    assert len(files_in(tier.root / "slots")) == 2
    assert files_in(tier.root / "trash") == files_in(tier.root / "saves") == []
    assert os.path.exists(held.path)
    tier.give_back(held)


def python(script):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=150, check=False
    )


def test_the_limit_of_any_cgroup_above_binds_and_its_unused_memory_is_left(tmp_path):
    proc, cgroup, mib = tmp_path / "proc", tmp_path / "cgroup", 1 << 20
    (proc / "self").mkdir(parents=True)
    (cgroup / "job" / "step").mkdir(parents=True)
    whole = node.memory_limit(proc, cgroup)
    assert whole == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    margin = min(1 << 30, whole // 64)
    assert node.memory_left(proc, cgroup) == whole - margin, "nothing tells of less"
    (proc / "meminfo").write_text("MemTotal:  99 kB\nMemAvailable:    512000 kB\nHugePages_Total:  0\n")
    assert node.memory_left(proc, cgroup) == 500 * mib - margin
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (cgroup / "job" / "step" / "memory.max").write_text("max\n")
    assert node.memory_limit(proc, cgroup) == whole
    (cgroup / "job" / "memory.max").write_text(f"{256 * mib}\n")
    (cgroup / "job" / "memory.current").write_text(f"{200 * mib}\n")
    (cgroup / "job" / "memory.stat").write_text(
        f"anon 7\nshmem {90 * mib}\nactive_file {10 * mib}\ninactive_file {20 * mib}\n"
    )
    assert node.memory_left(proc, cgroup) == (256 - 200 + 10 + 20 - 4) * mib
    assert node.memory_limit(proc, cgroup) == 256 * mib
    (cgroup / "job" / "memory.high").write_text(f"{240 * mib}\n")
    assert node.memory_left(proc, cgroup) == (240 - 200 + 10 + 20) * mib - 240 * mib // 64
    assert node.memory_limit(proc, cgroup) == 240 * mib
    (cgroup / "memory").mkdir()
    for name, value in {"limit_in_bytes": 64 * mib, "usage_in_bytes": 70 * mib}.items():
        (cgroup / "memory" / f"memory.{name}").write_text(f"{value}\n")
    (cgroup / "memory" / "memory.stat").write_text(f"cache {9 * mib}\ntotal_inactive_file {2 * mib}\n")
    (proc / "self" / "cgroup").write_text("4:cpu,memory:/only/the/host/knows\n0::/\n")
    assert node.memory_left(proc, cgroup) == (64 - 70 + 2 - 1) * mib
    assert node.memory_limit(proc, cgroup) == 64 * mib
