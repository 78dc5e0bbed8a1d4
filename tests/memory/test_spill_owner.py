"""Owner of a spill, if several node memories have it under one path, as containers on one disk do."""

import contextlib
import os
import shutil
import subprocess
import sys
import textwrap

import pytest

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.errors import MemoryTierError
from tiered_checkpoint_io.memory.spill import OWNER_FILE, claim, spill_root
from tiered_checkpoint_io.memory.tier import MemoryTier

CLAIM = """
    import os, sys
    from pathlib import Path
    from tiered_checkpoint_io.clock import SYSTEM
    from tiered_checkpoint_io.memory import node
    from tiered_checkpoint_io.memory.spill import claim
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

    def again(self):
        """Claims it once more."""
        self._process.stdin.write("again\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

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
    assert process("b", make=False).name == "None", "nobody made one"
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


def test_what_was_removed_beside_it_keeps_its_owner(process, tmp_path):
    base = tmp_path / "disk" / "job"
    one = process("a")
    os.utime(base / OWNER_FILE, (1, 1))
    assert one.again() == "job"
    assert (base / OWNER_FILE).stat().st_mtime > 1, "else what clears temporary folders would take it"
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "a").mkdir()
    assert (one.again(), process("a").name) == ("job", "job")
    shutil.rmtree(base)
    assert (one.again(), process("b").name) == ("job", "job-2")


def test_a_node_takes_no_spill_of_another_memory_under_its_path(process, tmp_path, memory_dir):
    """As containers have them that share one disk, each with a /dev/shm of its own."""
    memory = MemoryTier.open(memory_dir, "default")
    base = spill_root(tmp_path / "disk", memory.root)
    base.parent.mkdir(0o700)
    assert process("a", base=base).name == base.name
    memory.use_spill(str(tmp_path / "disk"))
    assert memory.open_spill().root == base.with_name(f"{base.name}-2")
    memory.close()


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
