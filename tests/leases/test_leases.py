"""Two runs, one place; launches, and two jobs on one node: by real processes, and in a virtual time."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from support.clocks import VirtualClock
from support.fault_proxy import FaultProxy, refuse, where
from support.running import Run, runner
from support.tenants import descriptors_to_spare

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.leasing import lease_keeper, leases
from tiered_checkpoint_io.engine.leasing.lease_keeper import LeaseKeeper, owner_of_process
from tiered_checkpoint_io.engine.leasing.leases import Lease
from tiered_checkpoint_io.engine.leasing.namespace_lock import NamespaceLock
from tiered_checkpoint_io.engine.ranks import world
from tiered_checkpoint_io.errors import ConfigError, StoreError, StoreNotFoundError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import LEASE_PREFIX, lease_key
from tiered_checkpoint_io.model.launches import JOB_VARIABLES, are_one
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

        def start(*places, nodes=range(9), **options):
            made = []
            for place, number in zip(places, nodes, strict=False):
                node = f"{memory_dir}/{number}"
                Path(node).mkdir(mode=0o700, exist_ok=True)
                made.append(Run(path, place, node, **options))
                stack.callback(made[-1].close)
            return made

        yield start


def names_and_leases(dirpath):
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    keys = [entry.key for entry in store.list("")]
    store.close()
    return sorted(key for key in keys if not key.startswith(".")), [key for key in keys if LEASE_PREFIX in key]


def test_a_second_run_is_refused_whatever_its_namespace_and_a_crashed_one_holds_up_nobody(runs, s3_url):
    first, elsewhere, other = runs(s3_url, s3_url + "-2", s3_url)
    (second,) = runs(s3_url, nodes=[3], namespace="other")
    assert first.do("save a.ckpt") == "ok"
    refused = second.do("save b.ckpt")
    assert refused.startswith("ConfigError: another run writes to the same dirpath: process ")
    assert f"process {first.pid} on" in refused
    assert "stop one of the two, or give it a dirpath of its own" in refused
    # The run stays refused until it makes a new start.
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


def test_a_job_that_cannot_find_out_whose_the_memory_is_goes_on(tmp_path, caplog):
    first = NamespaceLock(tmp_path, "one", "first", logging.getLogger(), SYSTEM)
    with descriptors_to_spare(1):
        NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    assert "could not lock this namespace of node memory" in caplog.text
    (tmp_path / "job.json").write_text("damaged")
    NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    first.close()


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
        replace(Lease.of_this_process("o", "t"), held=True).to_json().replace(b": 1,", b": 2,", 1),
        b'{"format_version":1}' * 2,
        b"[" * 60_000,
    ],
)
def test_a_lease_that_nobody_understands_is_no_lease_of_the_dead_while_it_beats(data, tmp_path):
    clock = VirtualClock()
    assert Lease.from_json(data) is None
    store = open_store(TieredCheckpointConfig(dirpath=str(tmp_path)))
    key = lease_key("default", "strange")
    store.put(key, data)
    keeper = LeaseKeeper(lambda: store, "default", logging.getLogger("test"), owner="me", clock=clock)
    keeper.step()
    time.sleep(0.05)
    store.put(key, data)
    keeper.step()
    with pytest.raises(ConfigError, match="whose lease can't be read"):
        keeper.check()
    silent = LeaseKeeper(lambda: store, "default", logging.getLogger("test"), owner="me", clock=clock)
    while not silent._lease.held:
        assert clock.now <= clock.timing.lease_ttl_s + clock.timing.lease_beat_s
        clock.advance(silent.step())
    assert key not in {entry.key for entry in store.list(LEASE_PREFIX)}
    store.close()


@pytest.mark.parametrize("user", ["of this user", pytest.param("of another", marks=pytest.mark.matrix)])
def test_a_run_whose_process_is_hidden_is_judged_by_its_beats_and_a_dead_one_at_once(user, tmp_path, monkeypatch):
    """/proc may be mounted with hidepid: then other users' processes look like dead ones."""

    def hidden(path, *_):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def forbidden(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    clock, log = VirtualClock(), logging.getLogger("test")
    store = open_store(TieredCheckpointConfig(dirpath=str(tmp_path)))
    alive = replace(Lease.of_this_process("other", "alive"), held=True)
    monkeypatch.setattr(leases, "open", hidden, raising=False)
    dead = subprocess.Popen(["true"])
    dead.wait(timeout=20)
    store.put(lease_key("default", "dead"), replace(alive, pid=dead.pid).to_json())
    keeper = LeaseKeeper(lambda: store, "default", log, owner="me", clock=clock)
    keeper.step()
    assert keeper.is_held
    if user == "of another":
        monkeypatch.setattr(leases.os, "kill", forbidden)
    store.put(lease_key("default", "alive"), alive.to_json())
    keeper = LeaseKeeper(lambda: store, "default", log, owner="late", clock=clock)
    keeper.step()
    assert not keeper.is_held
    time.sleep(0.05)
    store.put(lease_key("default", "alive"), alive.to_json())
    keeper.step()
    with pytest.raises(ConfigError, match="another run writes to the same dirpath"):
        keeper.check()
    store.close()


def test_a_lease_that_was_archived_holds_up_nobody_for_longer_than_one_of_the_dead(s3_server, s3_url):
    clock, key = VirtualClock(), lease_key("default", "old")
    gone = replace(Lease.of_this_process("other", "old"), held=True, boot_id="elsewhere")
    with FaultProxy(s3_server.endpoint_url) as proxy:
        store = open_store(TieredCheckpointConfig(dirpath=s3_url, endpoint_url=proxy.endpoint_url))
        store.put(key, gone.to_json())
        proxy.plan = where(refuse(403, "InvalidObjectState"), operation="get", key=key)
        keeper = LeaseKeeper(lambda: store, "default", logging.getLogger("test"), owner="me", clock=clock)
        while not keeper.is_held:
            assert clock.now <= clock.timing.lease_ttl_s + clock.timing.lease_beat_s
            clock.advance(keeper.step())
        assert key not in {entry.key for entry in store.list(LEASE_PREFIX)}
        store.close()


class World:
    """A store and a clock for several keepers."""

    def __init__(self):
        self.clock = VirtualClock()
        self.objects = {}
        self.puts = 0


@dataclass
class _Requests:
    world: World
    url: str = "sim://place"

    def put(self, key, data):
        self.world.puts += 1
        self.world.objects[key] = (data, self.world.clock.now)

    def get(self, key):
        if key not in self.world.objects:
            raise StoreNotFoundError("gone", operation="get", key=key)
        return self.world.objects[key][0]

    def list(self, prefix):
        return [ObjectInfo(key, len(data), at) for key, (data, at) in self.world.objects.items() if prefix in key]

    def delete(self, key):
        self.world.objects.pop(key, None)


def _keeper(world, store, name, threads, *, waits=True):
    """Returns a keeper after its first look, if it ``waits`` for that; the clock moves by its thread, too."""
    made = LeaseKeeper(lambda: store, "ns", logging.getLogger("test.sim"), owner=name, clock=world.clock)
    made._lease = replace(made._lease, boot_id=name)
    made.start()
    threads.append(made._thread)
    made.check(world.clock.timing.lease_first_look_s if waits else 0.0)
    return made


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


@pytest.fixture
def job(memory_dir, path):
    """Starts jobs on one node, in one namespace."""
    with contextlib.ExitStack() as stack:

        def start(dirpath, **options):
            made = Run(path, dirpath, memory_dir, namespace="one", **options)
            stack.callback(made.close)
            return made

        yield start


ANOTHER_JOB = "ConfigError: another live job keeps its checkpoints in this node's memory under the same namespace"


TASK = {"SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
#: Environment that two jobs share: nothing, a shell's own word, or tasks of Slurm that train each for itself.
SHARED = [
    [{}, {}],
    [{"TIERED_CHECKPOINT_OWNER": "a/b"}, {"TIERED_CHECKPOINT_OWNER": "a/b"}],
    [{**TASK, "SLURM_PROCID": "0"}, {**TASK, "SLURM_PROCID": "1"}],
]


@pytest.mark.parametrize("environments", SHARED, ids=["nothing", "shell", "Slurm"])
def test_jobs_are_two_whatever_they_share_though_they_upload_nothing(job, tmp_path, environments):
    first, second = (job(str(tmp_path), env=env) for env in environments)
    assert first.do("keep a.ckpt") == "ok"
    refused = second.do("keep b.ckpt")
    assert refused.startswith(f"{ANOTHER_JOB}: that of {tmp_path}, process {first.pid}")
    assert "a namespace of its own" in refused
    assert first.do("keep c.ckpt") == "ok"
    # A restart of the same job takes over at once.
    first.kill()
    assert second.do("keep b.ckpt") == "ok"


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_ranks_of_a_launch_are_one_before_they_know_each_other(name, job, tmp_path):
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "SLURM_NTASKS": "2"}
    ranks = [job(str(tmp_path), env={name: str(rank), **meet}) for rank in range(2)]
    assert [each.do(f"save {number}.ckpt") for number, each in enumerate(ranks)] == ["ok", "ok"]


def test_who_is_one_launch():
    assert are_one("a", "a")
    assert are_one("shell/a", "shell/a/b")
    assert are_one("a/b/c/d", "b")
    assert not are_one("shell/a", "shell/b")
    assert not are_one("shell/a/c", "shell/b/c2")
    # All of its line but the end may be forgotten.
    assert are_one("p/a", "a/b")


def owner_in(environment):
    """Returns the owner of a new process with an environment, and the environment that it hands on."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        os.write(write, json.dumps([owner_of_process(SYSTEM), dict(os.environ)]).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = json.loads(os.read(read, 1 << 20))
    os.close(read)
    os.close(write)
    return found


@pytest.mark.parametrize(
    ("first", "second", "one"),
    [
        pytest.param({}, {}, True, id="no-scheduler"),
        pytest.param({"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": ""}, True, id="variables-stripped"),
        pytest.param({"SLURM_JOB_ID": ""}, {"SLURM_JOB_ID": "2"}, False, id="sbatch-from-a-login-node"),
        pytest.param({"PBS_JOBID": "12[1].host"}, {"PBS_JOBID": "13[1].host"}, False, id="qsub-of-an-array"),
        pytest.param({"LSB_JOBID": "5", "LSB_JOBINDEX": "1"}, {"LSB_JOBID": "5"}, True, id="lsf-child"),
    ],
)
def test_an_owner_is_handed_on_within_a_job_only(first, second, one):
    unwanted = ("TIERED_CHECKPOINT_OWNER", "TIERED_CHECKPOINT_OWNER_JOB", *JOB_VARIABLES)
    clean = {name: value for name, value in os.environ.items() if name not in unwanted}
    before, environment = owner_in(clean | first)
    after, environment = owner_in(environment | second)
    assert are_one(before, after) == one
    child, _ = owner_in(environment)
    assert are_one(after, child)
    assert are_one(before, child) == one
    assert not are_one(child, owner_in(environment)[0]), "two that one process starts are two"
    # The scheduler starts a job that is requeued again with what it was submitted with.
    again, _ = owner_in(environment | second | {"SLURM_JOB_ID": "9"})
    assert not are_one(after, again)


@pytest.mark.parametrize(
    ("rank", "environment", "leads"),
    [
        (8, {"LOCAL_RANK": "0"}, True),
        (0, {"LOCAL_RANK": "1"}, False),
        (8, {"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, True),
        (9, {"SLURM_PROCID": "9", "SLURM_LOCALID": "1"}, False),
        # torchrun, and what one task spawns itself, within a job of Slurm's.
        (9, {"LOCAL_RANK": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
        (1, {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, False),
        (8, {"OMPI_COMM_WORLD_RANK": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True),
        (8, {}, False),
        (0, {}, True),
    ],
)
def test_one_process_of_each_node_leads_whatever_started_it(rank, environment, leads, monkeypatch):
    names = ("LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(world, "current_rank", lambda: rank)
    assert world.leads_node() == leads
    # If the first rank of a node is not known, any rank may continue the node's uploads.
    is_told = "LOCAL_RANK" in environment or str(rank) in (
        environment.get(name) for name in names if "LOCAL" not in name
    )
    assert world.may_lead_node() == (leads or not is_told)
