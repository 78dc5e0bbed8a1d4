"""Two runs, one place, in a virtual time: who is refused, who goes on, and when."""

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from support.clocks import VirtualClock

from tiered_checkpoint_io.engine.leasing.lease_keeper import LeaseKeeper
from tiered_checkpoint_io.engine.leasing.leases import Lease
from tiered_checkpoint_io.errors import ConfigError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import ObjectInfo


class World:
    """A store and a clock for several keepers."""

    def __init__(self):
        self.clock = VirtualClock()
        self.objects = {}
        self.puts = 0


@dataclass
class _Requests:
    world: World
    is_silent: Callable[[], bool] = lambda: False
    url: str = "sim://place"

    def _turn(self):
        if self.is_silent():
            raise StoreError("no answer", operation="test", reason="unavailable")

    def put(self, key, data):
        self._turn()
        self.world.puts += 1
        self.world.objects[key] = (data, self.world.clock.now)

    def get(self, key):
        self._turn()
        if key not in self.world.objects:
            raise StoreNotFoundError("gone", operation="get", key=key)
        return self.world.objects[key][0]

    def list(self, prefix):
        self._turn()
        return [ObjectInfo(key, len(data), at) for key, (data, at) in self.world.objects.items() if prefix in key]

    def delete(self, key):
        self._turn()
        self.world.objects.pop(key, None)


def _keeper(world, store, name, threads, *, waits=True):
    """One that has had its first look, if it ``waits`` for that; its thread is one of those by which the clock moves."""
    made = LeaseKeeper(lambda: store, "ns", logging.getLogger("test.sim"), owner=name, clock=world.clock)
    made._lease = replace(made._lease, boot_id=name)
    made.start()
    threads.append(made._thread)
    made.check(world.clock.timing.lease_first_look_s if waits else 0.0)
    return made


def test_the_whole_story_of_a_lease_takes_no_time():
    """Claimed, kept for a day, a newcomer refused, expired, taken over, given back: by a clock that only this moves."""
    world, silent, threads = World(), set(), []

    def keeper_of(name):
        return _keeper(world, _Requests(world, lambda: name in silent), name, threads)

    def held():
        return [lease.owner for data, _ in world.objects.values() if (lease := Lease.from_json(data)).held]

    first = keeper_of("first")
    assert held() == ["first"]
    world.clock.advance(24 * 3600, *threads)
    ((_, beat),) = world.objects.values()
    assert world.clock.now - beat <= world.clock.timing.lease_rest_s
    assert world.puts <= 27, "each is a version in a bucket that keeps versions"
    newcomer = keeper_of("newcomer")
    world.clock.advance(20, *threads)
    with pytest.raises(ConfigError, match="another run writes to the same dirpath: .* is running"):
        newcomer.check()
    assert len(world.objects) == 1, "a refused run leaves nothing behind"
    silent.add("first")
    heir = keeper_of("heir")
    world.clock.advance(world.clock.timing.lease_ttl_s - 1, *threads)
    assert held() == ["first"]
    world.clock.advance(10, *threads)
    assert held() == ["heir"]
    heir.check()
    silent.clear()
    world.clock.advance(20, *threads)
    with pytest.raises(ConfigError, match="took over"):
        first.check()
    heir.close(5.0)
    assert not world.objects


def test_processes_of_one_launch_do_not_take_each_other_for_another_run():
    """Two sessions of one launch, or two processes of which one began the other, for a day; then another run comes."""
    world, threads = World(), []
    first, second = (_keeper(world, _Requests(world), name, threads) for name in ("launch", "launch/child"))
    world.clock.advance(60, *threads)
    met = first.met, second.met
    world.clock.advance(24 * 3600, *threads)
    assert first.is_held and second.is_held
    assert (first.met, second.met) == met, "each would give the next save a new run id"
    assert world.puts <= 2 * 27, "each is a version in a bucket that keeps versions"
    second.close(5.0)
    threads.pop()
    world.clock.advance(60, *threads)
    assert first.met == met[0] + 1, "what it has saved meanwhile is older than what we save now"
    newcomer = _keeper(world, _Requests(world), "other", threads)
    world.clock.advance(40, *threads)
    with pytest.raises(ConfigError, match="launch.* is running"):
        newcomer.check()
    assert first.met > met[0] + 1
    first.close(5.0)


def test_where_deletes_are_refused_a_run_is_as_safe_and_as_quiet_as_elsewhere(caplog):
    """The leases of ended runs stay in a bucket whose policy allows no deletes."""
    world, threads = World(), []

    class Denied(_Requests):
        def delete(self, key):
            raise StoreError("denied", operation="delete", key=key, reason="access")

    def keeper_of(name):
        return _keeper(world, Denied(world), name, threads)

    def held():
        leases = [Lease.from_json(data) for data, _ in world.objects.values()]
        return [lease.owner for lease in leases if lease.held]

    keeper_of("earlier").close(5.0)
    threads.clear()
    assert held() == ["earlier"]
    # Of two that only look, the one whose owner sorts last yields: this one holds its lease.
    running = keeper_of("z-running")
    world.clock.advance(2 * world.clock.timing.lease_ttl_s, *threads)
    assert running.is_held
    assert held() == ["z-running"], "retention would leave all to the earlier one"
    before = world.puts
    world.clock.advance(3000, *threads)
    assert world.puts == before, "each is a version in a bucket that keeps versions"
    newcomer = keeper_of("a-newcomer")
    world.clock.advance(40, *threads)
    with pytest.raises(ConfigError, match="z-running.* is running"):
        newcomer.check()
    running.check()
    assert not [each.message for each in caplog.records if each.levelno == logging.WARNING]
    running.close(5.0)


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", "b", "c"), ("c", "b", "a")])
def test_of_runs_that_begin_at_once_one_goes_on(names):
    """Requests of two machines in any order, and machines that die or are silent, are simulated in tests/sim."""
    world, threads, all_asked = World(), [], threading.Barrier(len(names))

    class Together(_Requests):
        """Each has written its lease before any of them looks."""

        def list(self, prefix):
            with contextlib.suppress(threading.BrokenBarrierError):
                all_asked.wait(10)
                all_asked.abort()
            return super().list(prefix)

    keepers = [_keeper(world, Together(world), name, threads, waits=False) for name in names]
    world.clock.advance(4 * world.clock.timing.lease_ttl_s, *threads)
    assert sum(each.is_held for each in keepers) == 1
    for keeper in keepers:
        with contextlib.nullcontext() if keeper.is_held else pytest.raises(ConfigError, match="is running"):
            keeper.check()
        keeper.close(5.0)
    assert not world.objects
