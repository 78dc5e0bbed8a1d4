"""Node memory: safe folders, deaths at any moment, and how much the node has."""

import mmap
import os
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.failing import failing
from support.parts import content_of, files_in, save

from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.memory.parts import opened, reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

MIB = 1 << 20


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


def test_mounts_whose_names_are_not_utf_8(memory_dir, tmp_path, monkeypatch):
    """Anything may be mounted on the node, such as a disk that an older system has named."""
    strange = tmp_path / "a b\t\\040"
    mounts = Path("/proc/self/mounts").read_bytes()
    mounts += b"x /mnt/Donn\xe9es ext4 rw 0 0\n"
    mounts += b"y " + os.fsencode(tmp_path) + rb"/a\040b\011\134040 tmpfs rw 0 0" + b"\n"
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda self: mounts if str(self) == "/proc/self/mounts" else read(self))
    monkeypatch.setattr(Path, "read_text", lambda self, *how: self.read_bytes().decode(*how))
    assert node.is_tmpfs(memory_dir)
    assert node.is_tmpfs(str(strange))
    assert node.is_tmpfs(f"{strange}/below")


def test_a_missing_memory_dir_and_one_on_disk(tmp_path):
    with pytest.raises(MemoryTierError, match="does not exist"):
        MemoryTier.open(str(tmp_path / "none"), "test")
    if node.is_tmpfs(tmp_path):
        pytest.skip("the temporary folder is on tmpfs")
    with pytest.warns(UserWarning, match="not on tmpfs"):
        tier = MemoryTier.open(str(tmp_path), "test")
    assert content_of(tier, save(tier, b"x" * 5000, 1)) == b"x" * 5000, "but it works"
    tier.close()


# ------------------------------------------------------------------------------------------ death
def test_the_slots_of_the_living_stay_and_what_the_dead_left_goes(tier, memory_dir):
    held = tier.acquire(MIB)
    tier.prepare(MIB, lambda: False)
    script = f"""
        import os, signal
        from tiered_checkpoint_io.memory.tier import MemoryTier
        tier = MemoryTier.open({memory_dir!r}, "test")
        tier.acquire({MIB})
        tier.prepare({MIB}, lambda: False)
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


def test_trash_that_a_live_process_is_still_sorting_out_does_it_no_harm(tier, memory_dir, monkeypatch):
    stored = save(tier, b"old" * 1000, 1)
    with opened(stored, keep=True), open(stored.file("step=1.ckpt"), "rb") as file:
        kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    real = os.rename

    def cleared_right_after(source, target, **options):
        real(source, target, **options)
        if "trash" in str(target) and "clean." not in str(target):
            with monkeypatch.context() as patch:
                # Removes only the marker against reuse of the file.
                patch.setattr(shutil, "rmtree", lambda folder, **_: (Path(folder) / "pinned").unlink())
                MemoryTier.open(memory_dir, "test").close()

    monkeypatch.setattr(os, "rename", cleared_right_after)
    tier.remove(stored)
    save(tier, b"new" * 1000, 2)
    save(tier, b"new" * 1000, 3)
    assert kept[:] == b"old" * 1000


# ------------------------------------------------------------------------------------------- room


def test_the_limit_of_any_cgroup_above_binds_and_what_nobody_uses_of_it_is_left(tmp_path):
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
