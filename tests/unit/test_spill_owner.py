"""Whose a spill is, where several node memories have it under one path, as containers on one disk do."""

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory import node, ownership
from tiered_checkpoint_io.memory.ownership import claim


@contextlib.contextmanager
def living(base, memory):
    """Another process that claims a spill for a memory, and lives on."""
    script = f"""
        import sys
        from pathlib import Path
        from tiered_checkpoint_io.clock import SYSTEM
        from tiered_checkpoint_io.memory.ownership import claim
        print(claim(Path({str(base)!r}), Path({str(memory)!r}), SYSTEM, make=True).name, flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()
        process.wait(30)


@pytest.fixture
def memories(tmp_path):
    (tmp_path / "disk").mkdir(0o700)
    for name in "ab":
        (tmp_path / name).mkdir(0o700)
    yield tmp_path / "disk" / "job", tmp_path / "a", tmp_path / "b"
    ownership._drop_in_child()


def test_it_is_of_one_memory_until_the_last_process_of_that_has_ended(memories, monkeypatch):
    base, a, b = memories
    with living(base, a) as first, living(base, a) as again, living(base, b) as other:
        assert (first, again, other) == ("job", "job", "job-2")
        assert claim(base, b, SYSTEM, make=False).name == "job-2", "also while the first would be free again"
    ownership._drop_in_child()
    shutil.rmtree(base)
    assert claim(base, b, SYSTEM, make=False).name == "job-2", "its own rather than one that is free"
    ownership._drop_in_child()
    # After a reboot, memory is another.
    monkeypatch.setattr(node, "boot_id", lambda: "another")
    assert claim(base, a, SYSTEM, make=False).name == "job-2"
    with living(base, b) as name:
        assert name == "job"


def test_none_is_found_where_there_are_only_those_of_others(memories):
    base, a, b = memories
    assert claim(base, b, SYSTEM, make=False) is None
    with living(base, a):
        assert claim(base, b, SYSTEM, make=False) is None
        assert not base.with_name("job-2").exists()


def test_a_memory_that_was_made_anew_keeps_its_spill_and_a_spill_that_was_removed_is_made_again(memories):
    base, a, b = memories
    assert claim(base, a, SYSTEM, make=True) == base
    os.utime(base / ownership.OWNER_FILE, (1, 1))
    assert claim(base, a, SYSTEM, make=True) == base
    assert (base / ownership.OWNER_FILE).stat().st_mtime > 1, "else what clears temporary folders would take it"
    with living(base, a):
        shutil.rmtree(a)
        a.mkdir()
        assert claim(base, a, SYSTEM, make=True) == base
        with living(base, a) as another:
            assert another == "job"
        shutil.rmtree(base)
        assert claim(base, a, SYSTEM, make=True) == base
        with living(base, b) as other:
            assert other == "job-2"


class ClockThatIsMet(Clock):
    """Something happens at the first sleep."""

    def __init__(self, happens):
        super().__init__()
        self.__dict__["happens"] = [happens]

    def sleep(self, seconds):
        while self.happens:
            self.happens.pop()()


def test_a_process_that_looks_for_a_moment_keeps_no_memory_from_a_dead_ones(memories):
    base, a, b = memories
    claim(base, a, SYSTEM, make=True)
    ownership._drop_in_child()
    with (base / ownership.OWNER_FILE).open() as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert claim(base, b, ClockThatIsMet(looking.close), make=True) == base


def test_one_that_another_process_of_the_memory_makes_meanwhile_is_taken(memories):
    base, a, b = memories

    def make():
        made = base.with_name("job-3")
        made.mkdir(0o700)
        (made / ownership.OWNER_FILE).write_text(ownership._id_of(b))

    with living(base, a):
        assert claim(base, b, ClockThatIsMet(make), make=True).name == "job-3"


@pytest.fixture
def full_disk(monkeypatch):
    """A context in which bytes can be written over, and none added."""
    write = os.pwrite

    def refuse(descriptor, data, offset):
        if offset + len(data) > os.fstat(descriptor).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    @contextlib.contextmanager
    def full():
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            yield

    return full


def test_on_a_full_disk_what_is_spilled_stays_in_sight(memories, full_disk):
    base, a, b = memories
    claim(base, a, SYSTEM, make=True)
    ownership._drop_in_child()
    with full_disk():
        assert claim(base, b, SYSTEM, make=False) == base, "that of a dead one"


def test_a_worker_that_outlives_its_trainer_does_not_keep_it(memories):
    base, a, b = memories
    claim(base, a, SYSTEM, make=True)
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    os.close(read)
    ownership._drop_in_child()
    with living(base, b) as name:
        assert name == "job"
    os.close(write)
    os.waitpid(worker, 0)


def test_a_link_in_place_of_the_file_that_names_its_owner_is_not_followed(memories, tmp_path):
    base, a, _ = memories
    base.mkdir(0o700)
    (tmp_path / "victim").write_text("kept")
    (base / ownership.OWNER_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="symbolic links"):
        claim(base, a, SYSTEM, make=True)
    assert (tmp_path / "victim").read_text() == "kept"
    (base / ownership.OWNER_FILE).unlink()
    base.chmod(0o777)
    with pytest.raises(MemoryTierError, match="open to others"):
        claim(base, a, SYSTEM, make=True)


CONTAINER = """
    import subprocess, sys, warnings
    from support.bad_input import state
    from support.supporting import build
    from tiered_checkpoint_io import TieredCheckpointIO

    warnings.simplefilter("ignore")
    folder, first, loads_first = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "loads"
    for name, size in (("shm", "4m"), ("ckpt", "64m")):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", f"{folder}/{name}"], check=True)
    places = {"memory_dir": f"{folder}/shm", "spill_dir": f"{folder}/disk"}
    options = {"on_save_error": "raise", "preflight": "off", "drain": "thread", **places}
    io = build(TieredCheckpointIO, f"{folder}/ckpt", **options)
    if loads_first:
        print([each.part.name for each in io.checkpointer.session.open().tier.parts()], flush=True)
    for step in range(first, first + 3):
        io.save_checkpoint(state(step, size=1_500_000), f"{step}.ckpt")
    print("saved", flush=True)
    sys.stdin.readline()
    print(io.load_checkpoint("tiered:latest")["global_step"], flush=True)
    io.teardown()
"""


def test_containers_with_one_disk_load_and_keep_only_their_own(tmp_path):
    """Two runs in the same namespace, each with a /dev/shm and a volume of its own, under the same paths."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode != 0:
        pytest.skip("no mounts of its own")
    for name in ("shm", "ckpt", "disk"):
        (tmp_path / name).mkdir()

    def container(first, *more):
        script = [sys.executable, "-c", textwrap.dedent(CONTAINER), str(tmp_path), str(first), *more, "-"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen(["unshare", "--mount", *script], env=env, **pipes)

    with container(500) as one:
        try:
            assert one.stdout.readline() == "saved\n"
            with container(1, "loads") as other:
                assert other.communicate("\n", timeout=60)[0].split("\n") == ["[]", "saved", "3", ""]
            assert one.communicate("\n", timeout=60)[0] == "502\n"
        finally:
            one.kill()
    assert len(list((tmp_path / "disk").glob("*/*"))) == 2
