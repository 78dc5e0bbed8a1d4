"""The operation log: killed writers, damage, forks, a full file system, a process without descriptors."""

import fcntl
import os
import signal

import pytest
from support.tenants import Tenant, descriptors_to_spare, mounted_tmpfs

from tiered_checkpoint_io.engine.drain.log import OperationLog
from tiered_checkpoint_io.memory.space import MemoryFullError

BODY = "y" * 300
#: Start of the two halves of a log, and the length of each.
HALVES, HALF = 8192, 1 << 20


@pytest.fixture
def path(memory_dir):
    return f"{memory_dir}/log"


def numbers(log, prefix):
    return sorted(int(number) for number in log.entries(prefix))


# ------------------------------------------------------------------------------------ two writers
def test_writers_see_each_other_through_many_changes_of_half(path):
    one, other = OperationLog(path), OperationLog(path)
    for number in range(2000):
        (one, other)[number % 2].write({f"now/{number}": BODY, f"now/{number - 20}": None})
        assert numbers((other, one)[number % 2], "now/")[-1] == number
    for log in (one, other, OperationLog(path)):
        assert numbers(log, "now/") == list(range(1980, 2000))
    assert one.poll() == other.poll()


def test_a_forked_child_keeps_no_lock_alive_that_its_parent_died_with(path, monkeypatch):
    ready, go = os.pipe()
    parent, lock = os.fork(), fcntl.flock
    if not parent:
        log = OperationLog(path)

        def forking(descriptor, kind):
            lock(descriptor, kind)
            if os.fork():
                os.kill(os.getpid(), signal.SIGKILL)
            os.close(go)
            os.read(ready, 1)
            os._exit(0)

        monkeypatch.setattr(fcntl, "flock", forking)
        log.write({"b": 2})
    os.close(ready)
    assert os.waitpid(parent, 0)[1] == signal.SIGKILL
    OperationLog(path).write({"c": 3})
    assert OperationLog(path).entries("") == {"c": 3}
    os.close(go)


# --------------------------------------------------------------------------------------- scarcity
@pytest.mark.parametrize("what", ["space", "files", "descriptors"])
def test_it_goes_on_for_ever_where_nothing_is_left(what, tmp_path):
    with mounted_tmpfs(tmp_path / "tight", 4 << 20, inodes=40) as folder:
        log, tenant = OperationLog(folder / "log"), Tenant(folder)
        log.write({"first": 1})
        # In a process of its own: a server's thread of another test needs descriptors.
        child = os.fork()
        if not child:
            try:
                mine = OperationLog(folder / "log")
                mine.open()
                {"space": tenant.fills, "files": tenant.takes_all_inodes, "descriptors": lambda: None}[what]()
                with descriptors_to_spare(0 if what == "descriptors" else 10):
                    for number in range(1000):
                        mine.write({f"now/{number}": BODY, f"now/{number - 20}": None})
                        mine.beat(str(number).encode())
                os._exit(0 if mine.heartbeat() == b"999" else 2)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        assert numbers(OperationLog(folder / "log"), "now/") == list(range(980, 1000))


def test_where_there_is_no_space_for_the_file_it_is_an_error_and_reads_as_empty(tmp_path):
    with mounted_tmpfs(tmp_path / "tight", 1 << 20) as folder:
        log = OperationLog(folder / "log")
        assert (log.poll(), log.get("a"), log.heartbeat()) == (b"", None, b"")
        with pytest.raises(MemoryFullError, match="no space for the operation log"):
            log.write({"a": 1})
        assert log.get("a") is None


def test_too_much_is_an_error_and_changes_nothing(path):
    log = OperationLog(path)
    with pytest.raises(MemoryFullError, match="too much is queued"):
        for number in range(1000):
            log.write({f"now/{number}": 30 * BODY})
    assert number > 100
    assert numbers(OperationLog(path), "now/") == list(range(number))


# ----------------------------------------------------------------------------------------- damage
@pytest.mark.parametrize("at", [0, 20, 40, HALVES, HALVES + HALF, HALVES + 3000, HALVES + HALF + 3000])
def test_damage_costs_records_with_a_warning_and_all_processes_agree_again(at, path, caplog):
    live = OperationLog(path)
    for number in range(20):
        live.write({f"now/{number}": BODY})
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * 16)
    fresh = OperationLog(path)
    fresh.write({"fresh": 1})
    live.write({"live": 1})
    late = OperationLog(path)
    assert fresh.entries("") == live.entries("") == late.entries("")
    found = numbers(late, "now/")
    assert found == list(range(len(found))), "up to the damage"
    assert {"fresh", "live"} <= set(late.entries(""))
    assert len(found) == 20 or "is damaged" in caplog.text


def test_a_file_that_is_lost_is_made_anew(path, caplog):
    log = OperationLog(path)
    log.write({"a": 1})
    os.unlink(path)
    assert log.get("a") is None
    assert "was removed" in caplog.text
    log.write({"b": 2})
    assert OperationLog(path).entries("") == {"b": 2}
