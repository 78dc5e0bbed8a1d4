"""Two runs, one place: who is refused, who goes on, and when; by real processes, and by all orders of events."""

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.clocks import VirtualClock, quick
from support.counting_proxy import CountingProxy
from support.launch import free_port
from support.running import Run, runner
from support.tenants import descriptors_to_spare

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.leasing import lease_keeper
from tiered_checkpoint_io.engine.leasing.lease_keeper import LeaseKeeper
from tiered_checkpoint_io.engine.leasing.leases import Lease
from tiered_checkpoint_io.engine.leasing.namespace_lock import NamespaceLock
from tiered_checkpoint_io.errors import StoreNotFoundError, StoreUnavailableError, UsageError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import LEASE_PREFIX, lease_key
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.base import ObjectInfo


@pytest.fixture(scope="module")
def path():
    with runner() as path:
        yield path


@pytest.fixture
def runs(memory_dir, path):
    """Starts runs, each on a node of its own."""
    with contextlib.ExitStack() as stack:

        def start(*places, nodes=range(9), machines=("",) * 9, **options):
            made = []
            for place, number, machine in zip(places, nodes, machines, strict=False):
                node = f"{memory_dir}/{number}"
                Path(node).mkdir(mode=0o700, exist_ok=True)
                made.append(Run(path, place, node, machine=machine, **options))
                stack.callback(made[-1].close)
            return made

        yield start


def names_and_leases(dirpath):
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    keys = [entry.key for entry in store.list("")]
    store.close()
    return sorted(key for key in keys if not key.startswith(".")), [key for key in keys if LEASE_PREFIX in key]


def test_a_second_run_on_a_node_is_refused_before_it_writes_and_a_crashed_one_holds_up_nobody(runs, s3_url):
    first, second, elsewhere, other = runs(s3_url, s3_url, s3_url + "-2", s3_url)
    assert first.do("save a.ckpt") == "ok"
    refused = second.do("save b.ckpt")
    assert refused.startswith("UsageError: another run writes to the same dirpath: process ")
    assert f"process {first.pid} on" in refused
    assert "stop one of the two, or give it a dirpath of its own" in refused
    # It stays refused, whatever it does, until it makes a new start.
    assert second.do("save b.ckpt") == refused
    assert second.do("close") == "ok"
    assert elsewhere.do("save b.ckpt") == "ok"
    assert first.do("save c.ckpt") == "ok"
    objects, kept = names_and_leases(s3_url)
    assert (objects, len(kept)) == (["a.ckpt", "c.ckpt"], 1)
    first.kill()
    began = time.monotonic()
    assert other.do("save d.ckpt") == "ok"
    assert time.monotonic() - began < 10
    assert other.do("close") == "ok"
    assert names_and_leases(s3_url) == (["a.ckpt", "c.ckpt", "d.ckpt"], [])


def test_another_job_in_the_same_memory_of_a_node_is_refused(runs, tmp_path):
    """Each would let go of the other's checkpoints, and tell the drain how to reach its own store."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    first, second = runs(one, two, nodes=[0, 0], namespace="one")
    apart, elsewhere = runs(two, two + "-b", nodes=[0, 1], namespace="apart")
    assert first.do("save a.ckpt") == "ok"
    refused = second.do("save b.ckpt")
    assert refused.startswith("UsageError: another live job keeps its checkpoints in this node's memory")
    assert f"that of {one}, process {first.pid}" in refused
    assert "a namespace of its own" in refused
    assert not names_and_leases(two)[0]
    assert (apart.do("save c.ckpt"), elsewhere.do("save c.ckpt")) == ("ok", "ok")
    # Another namespace at that dirpath; this one is free once the job in it has ended, however it did.
    assert apart.do("close") == "ok"
    first.kill()
    assert second.do("save b.ckpt") == "ok"


def test_a_job_that_cannot_find_out_whose_the_memory_is_goes_on(tmp_path, caplog):
    first = NamespaceLock(tmp_path, "one", "first", logging.getLogger(), SYSTEM)
    with descriptors_to_spare(1):
        NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    assert "could not lock this namespace of node memory" in caplog.text
    (tmp_path / "job.json").write_text("damaged")
    NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    first.close()


@pytest.mark.matrix
def test_of_jobs_that_begin_at_once_in_the_same_memory_one_goes_on(runs, tmp_path):
    for turn in range(5):
        made = runs(*(str(tmp_path / f"{turn}-{number}") for number in range(4)), nodes=[turn] * 4)
        for run in made:
            run.tell("save a.ckpt")
        answers = [run.hear() for run in made]
        assert answers.count("ok") == 1, answers
        for run in made:
            run.kill()


@pytest.mark.matrix
def test_a_dirpath_is_of_one_run_whatever_its_namespace(runs, tmp_path):
    place = str(tmp_path)
    (first,), (second,) = runs(place, nodes=[0]), runs(place, nodes=[1], namespace="other")
    assert first.do("save a.ckpt") == "ok"
    assert "another run writes to the same dirpath" in second.do("save b.ckpt")
    assert len(names_and_leases(place)[1]) == 1


def test_a_second_run_on_another_machine_is_refused_while_it_trains(runs, tmp_path):
    first, second = runs(str(tmp_path), str(tmp_path), machines=["one", "two"])
    assert first.do("save a.ckpt") == "ok"
    # The first may just have crashed: nobody waits to find out.
    refused = second.until("save b.ckpt", lambda answer: answer != "ok", deadline_s=10)
    assert "another run writes" in refused
    assert first.do("save c.ckpt") == "ok"
    assert second.do("close") == "ok"
    assert len(names_and_leases(str(tmp_path))[1]) == 1


def test_a_run_that_crashed_on_another_machine_holds_up_nobody(runs, tmp_path):
    first, second = runs(str(tmp_path), str(tmp_path), machines=["one", "two"])
    assert first.do("save a.ckpt") == "ok"
    (dead,) = names_and_leases(str(tmp_path))[1]
    first.kill()
    end = time.monotonic() + 10
    number = 0
    while dead in names_and_leases(str(tmp_path))[1]:
        assert second.do(f"save {number}.ckpt") == "ok"
        assert time.monotonic() < end, "the lease of the dead run is still there"
        number += 1
    assert second.do("save b.ckpt") == "ok"


def test_a_run_that_was_stopped_finds_that_another_took_over(runs, tmp_path):
    first, second = runs(str(tmp_path), str(tmp_path), machines=["one", "two"])
    assert first.do("save a.ckpt") == "ok"
    os.kill(first.pid, signal.SIGSTOP)
    (old,) = names_and_leases(str(tmp_path))[1]
    assert second.do("save b.ckpt") == "ok"
    end = time.monotonic() + 10
    while old in names_and_leases(str(tmp_path))[1]:
        assert time.monotonic() < end
        time.sleep(0.1)
    os.kill(first.pid, signal.SIGCONT)
    told = first.until("save c.ckpt", lambda answer: answer != "ok", deadline_s=10)
    assert "took over while this run did not renew its lease" in told
    assert second.do("save d.ckpt") == "ok"


@pytest.mark.matrix
def test_of_runs_that_begin_at_once_one_goes_on(runs, s3_url):
    started = runs(*[s3_url] * 4)
    for number, run in enumerate(started):
        run.tell(f"save {number}.ckpt")
    first = [run.hear() for run in started]
    assert first.count("ok") >= 1
    time.sleep(0.5)
    answers = [run.do(f"save {number}.ckpt") for number, run in enumerate(started)]
    assert answers.count("ok") == 1, answers
    assert all("another run writes" in answer for answer in answers if answer != "ok")


@pytest.mark.matrix
def test_without_the_store_training_goes_on_and_the_claim_is_made_when_it_is_back(memory_dir, s3_url, s3_server):
    port = free_port()
    options = {"dirpath": s3_url, "memory_dir": memory_dir, "endpoint_url": f"http://127.0.0.1:{port}"}
    config = TieredCheckpointConfig.from_any(options)
    ends, made = Checkpointer(config), Checkpointer(config)
    ends.session.claims.claim(wait_s=0.2)
    began = time.monotonic()
    ends.close()
    assert time.monotonic() - began < 2, "nothing is asked of a store that has not answered yet"
    made.save({"global_step": 1}, "a.ckpt", wait=False)
    with CountingProxy(s3_server.endpoint_url, port):
        made.wait()
        end = time.monotonic() + 60
        while not names_and_leases(s3_url)[1]:
            assert time.monotonic() < end
            time.sleep(0.1)
        made.save({"global_step": 2}, "b.ckpt")
        made.close()


@pytest.mark.matrix
def test_a_process_may_have_several_and_its_children_belong_to_it(runs, tmp_path, memory_dir, monkeypatch):
    (run,) = runs(str(tmp_path), nodes=[0])
    made = [Checkpointer(TieredCheckpointConfig(dirpath=str(tmp_path), memory_dir=memory_dir)) for _ in range(2)]
    for number, each in enumerate(made):
        each.session.claims.claim()
        each.save({"global_step": number}, f"{number}.ckpt")
    assert "another run writes" in run.do("save a.ckpt")
    monkeypatch.setattr(lease_keeper.os, "environ", {**os.environ})
    child = "import os, sys; sys.exit(os.environ.get('TIERED_CHECKPOINT_OWNER') != sys.argv[1])"
    owner = lease_keeper.owner_of_process(SYSTEM)
    assert subprocess.run([sys.executable, "-c", child, owner], check=False).returncode == 0
    for each in made:
        each.close()
    assert names_and_leases(str(tmp_path))[1] == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"null",
        b'{"format_version": 1, "owner": 3}',
        b'{"format_version":1}' * 2,
        b"[" * 60_000,
    ],
)
def test_a_lease_that_nobody_understands_is_no_lease_of_the_dead_while_it_beats(data, tmp_path):
    clock = quick(lease_beat_s=0.1, lease_ttl_s=0.5)
    assert Lease.from_json(data) is None
    store = open_store(TieredCheckpointConfig(dirpath=str(tmp_path)))
    key = lease_key("default", "strange")
    store.put(key, data)
    keeper = LeaseKeeper(lambda: store, "default", logging.getLogger("test"), owner="me", clock=clock)
    keeper.step()
    time.sleep(0.05)
    store.put(key, data)
    keeper.step()
    with pytest.raises(UsageError, match="whose lease can't be read"):
        keeper.check()
    silent = LeaseKeeper(lambda: store, "default", logging.getLogger("test"), owner="me", clock=clock)
    end = time.monotonic() + 10
    while not silent._lease.held:
        silent.step()
        assert time.monotonic() < end
        time.sleep(0.05)
    assert key not in {entry.key for entry in store.list(LEASE_PREFIX)}
    store.close()


# ------------------------------------------------------------------------- all orders of events
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
            raise StoreUnavailableError("away", operation="test")

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


def test_the_whole_story_of_a_lease_takes_no_time():
    """Claimed, kept for a day, a newcomer refused, expired, taken over, given back: by a clock that only this moves."""
    world, silent, threads = World(0), set(), []

    def keeper_of(name):
        def pause():
            if name in silent:
                raise StoreUnavailableError("no answer", operation="test")

        store = _Requests(world, SimpleNamespace(pause=pause))
        made = LeaseKeeper(lambda: store, "ns", logging.getLogger("test.sim"), owner=name, clock=world.clock)
        made._lease = replace(made._lease, boot_id=name)
        made.start()
        threads.append(made._thread)
        made.check(world.clock.timing.lease_first_look_s)
        return made

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
    with pytest.raises(UsageError, match="another run writes to the same dirpath: .* is running"):
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
    with pytest.raises(UsageError, match="took over"):
        first.check()
    heir.close(5.0)
    assert not world.objects


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
            except StoreUnavailableError:
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
