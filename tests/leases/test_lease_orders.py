"""Two runs, one place, by all orders of events in a virtual time: who is refused, who goes on, and when."""

import logging
import random
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
from support.clocks import VirtualClock

from tiered_checkpoint_io.engine.leasing.lease_keeper import LeaseKeeper
from tiered_checkpoint_io.engine.leasing.leases import Lease
from tiered_checkpoint_io.errors import ConfigError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.stores.base import ObjectInfo


class World:
    """A store and a clock for several keepers; each request to it is a turn, and the order of turns is drawn.

    Simulated, because no real store lets a test choose in which order the requests of two machines arrive.
    """

    def __init__(self, seed):
        self.chooser = random.Random(seed)
        self.clock = VirtualClock()
        self.objects = {}
        self.puts = 0
        self.away = False

    def store_for(self, player):
        return _Requests(self, player)


@dataclass
class _Requests:
    world: World
    player: "Player"
    url: str = "sim://place"

    def _turn(self):
        self.player.pause()
        if self.world.away:
            raise StoreError("away", operation="test", reason="unavailable")

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


class _Dead(Exception):
    pass


def _keeper(world, store, name, threads):
    """One that has had its first look, with its thread among the ``threads`` by which the clock moves."""
    made = LeaseKeeper(lambda: store, "ns", logging.getLogger("test.sim"), owner=name, clock=world.clock)
    made._lease = replace(made._lease, boot_id=name)
    made.start()
    threads.append(made._thread)
    made.check(world.clock.timing.lease_first_look_s)
    return made


def test_the_whole_story_of_a_lease_takes_no_time():
    """Claimed, kept for a day, a newcomer refused, expired, taken over, given back: by a clock that only this moves."""
    world, silent, threads = World(0), set(), []

    def keeper_of(name):
        def pause():
            if name in silent:
                raise StoreError("no answer", operation="test", reason="unavailable")

        return _keeper(world, _Requests(world, SimpleNamespace(pause=pause)), name, threads)

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
    world, threads = World(0), []
    first, second = (
        _keeper(world, _Requests(world, SimpleNamespace(pause=lambda: None)), name, threads)
        for name in ("launch", "launch/child")
    )
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
    newcomer = _keeper(world, _Requests(world, SimpleNamespace(pause=lambda: None)), "other", threads)
    world.clock.advance(40, *threads)
    with pytest.raises(ConfigError, match="launch.* is running"):
        newcomer.check()
    assert first.met > met[0] + 1
    first.close(5.0)


def test_where_deletes_are_refused_a_run_is_as_safe_and_as_quiet_as_elsewhere(caplog):
    """The leases of ended runs stay in a bucket whose policy allows no deletes."""
    world, threads = World(0), []

    class Denied(_Requests):
        def delete(self, key):
            raise StoreError("denied", operation="delete", key=key, reason="access")

    def keeper_of(name):
        return _keeper(world, Denied(world, SimpleNamespace(pause=lambda: None)), name, threads)

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


class Player:
    """A keeper on a machine of its own, one request at a time."""

    def __init__(self, world, name):
        self.world = world
        self.keeper = LeaseKeeper(
            lambda: world.store_for(self), "ns", logging.getLogger("test.sim"), owner=name, clock=world.clock
        )
        self.keeper._lease = replace(self.keeper._lease, boot_id=name, owner=name)
        self.due = world.clock.now
        self.is_dead = False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._in_step = False
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self):
        while True:
            self._go.acquire()
            if self.is_dead:
                return
            self._in_step = True
            try:
                pause = self.keeper.step()
            except _Dead:
                return
            except StoreError as error:
                if error.reason != "unavailable":
                    raise
                self.keeper._watched.clear()
                pause = self.world.clock.timing.lease_beat_s
            if self.is_refused:
                self.world.objects.pop(self.keeper._key, None)
            self._in_step = False
            self.due = self.world.clock.now + pause
            self._done.release()

    def pause(self):
        """Before a request: lets others have their turns."""
        self._done.release()
        self._go.acquire()
        if self.is_dead:
            raise _Dead

    def turn(self):
        self._go.release()
        assert self._done.acquire(timeout=10)

    def die(self):
        self.is_dead = True
        self._go.release()

    @property
    def is_refused(self):
        return self.keeper._refusal is not None

    @property
    def plays(self):
        return not (self.is_dead or (self.is_refused and not self._in_step))

    @property
    def holds(self):
        return self.plays and self.keeper._lease.held and not self.is_refused


def play(world, players, until, *, asleep=(), is_alone=True):
    """Turns, in a drawn order, until the clock says so; at each moment at most one may hold the place."""
    while world.clock.now < until:
        awake = [each for each in players if each.plays and each not in asleep]
        ready = [each for each in awake if each._in_step or each.due <= world.clock.now]
        if ready and world.chooser.random() < 0.9:
            world.chooser.choice(ready).turn()
        else:
            world.clock.advance(world.chooser.choice([0.01, 0.1, 1.0]) if ready else 1.0)
        if is_alone:
            assert sum(each.holds for each in players) <= 1, "two hold the place"


@pytest.mark.parametrize("block", [0, *(pytest.param(block, marks=pytest.mark.matrix) for block in range(1, 8))])
def test_in_any_order_of_requests_one_run_goes_on_and_the_first_is_never_driven_out(block):
    for seed in range(block * 25, block * 25 + 25):
        world = World(seed)
        names = [f"{world.chooser.randrange(100):02}-{number}" for number in range(world.chooser.choice([2, 3]))]
        is_there = world.chooser.random() < 0.5
        players = [Player(world, names[0])]
        if is_there:
            play(world, players, 20)
            assert players[0].holds
        players += [Player(world, name) for name in names[1:]]
        play(world, players, world.clock.now + 4 * world.clock.timing.lease_ttl_s)
        assert [each.holds for each in players].count(True) == 1, seed
        assert all(each.holds or each.is_refused for each in players), seed
        if is_there:
            assert players[0].holds, seed
        # It dies, or is silent for a while; whoever comes next takes over, and is never refused.
        (holder,) = [each for each in players if each.holds]
        fate = world.chooser.choice(["dies", "sleeps", "all lose the store"])
        if fate == "dies":
            holder.die()
        elif fate == "all lose the store":
            world.away = True
            play(world, players, world.clock.now + world.chooser.choice([10, 100, 1000]))
        heir = Player(world, f"{world.chooser.randrange(100):02}-heir")
        players.append(heir)
        asleep = (holder,) if fate == "sleeps" else ()
        play(world, players, world.clock.now + 3 * world.clock.timing.lease_ttl_s, asleep=asleep, is_alone=not asleep)
        world.away = False
        # Whoever wakes has to look before it knows.
        play(world, players, world.clock.now + 3 * world.clock.timing.lease_ttl_s, is_alone=not asleep)
        survivor = holder if fate == "all lose the store" else heir
        assert [each for each in players if each.holds] == [survivor], (seed, fate)
        for each in players:
            each.die()
