"""Two runs, one place; launches, and two jobs on one node: by real processes, and in a virtual time."""

import contextlib
import errno
import json
import logging
import os
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.clocks import VirtualClock
from support.committing import lease_of
from support.running import Run, runner
from support.tenants import descriptors_to_spare
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.leasing import LeaseKeeper, NamespaceLock
from tiered_checkpoint_io.engine.ranks import run
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.memory.node import Identity
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import LEASE_KEY
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore


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


def names_and_holder(dirpath):
    store = open_store(TieredCheckpointConfig(dirpath=dirpath))
    keys, holder = [entry.key for entry in store.list("")], holder_of(store)
    store.close()
    return sorted(key for key in keys if not key.startswith(".")), holder and holder.process.pid


def test_a_second_run_is_refused_in_any_namespace_and_a_crashed_one_delays_no_other(runs, s3_url):
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
    assert names_and_holder(s3_url) == (["a.ckpt", "c.ckpt"], first.pid)
    first.kill()
    began = time.monotonic()
    assert other.do("save d.ckpt") == "ok"
    assert time.monotonic() - began < 10
    assert other.do("close") == "ok"
    assert names_and_holder(s3_url) == (["a.ckpt", "c.ckpt", "d.ckpt"], None)


def test_a_job_that_cannot_find_out_whose_the_memory_is_goes_on(tmp_path, caplog):
    first = NamespaceLock(tmp_path, "one", "first", logging.getLogger(), SYSTEM)
    with descriptors_to_spare(1):
        NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    assert "could not lock this namespace of node memory" in caplog.text
    (tmp_path / "job.json").write_text("damaged")
    NamespaceLock(tmp_path, "two", "second", logging.getLogger(), SYSTEM).close()
    first.close()


class World:
    """A directory's lease, and a clock for several keepers, each of which is a process of a machine of its own."""

    def __init__(self, folder):
        self.clock, self.threads, self.writes = VirtualClock(), [], 0
        self.store = DirectoryStore(str(folder))
        self.put_if, self.store.put_if = self.store.put_if, self._count

    def _count(self, *arguments):
        self.writes += 1
        return self.put_if(*arguments)

    def keeper(self, name, *, here=None, starts=True):
        """Returns the keeper of a launch, after its first look if it starts; the clock moves by its thread, too."""
        with patch.object(Identity, "of_this_process", return_value=here or Identity(name, os.getpid(), 1)):
            log = logging.getLogger("test.leases")
            made = LeaseKeeper(lambda: self.store, "ns", log, owner=name, clock=self.clock)
        if starts:
            made.start()
            self.threads.append(made._thread)
            made.check(self.clock.timing.lease_first_look_s)
        return made

    def advance(self, seconds):
        self.clock.advance(seconds, *self.threads)

    def until_held(self, keeper):
        """Repeats a keeper's looks until it holds the lease, within the time for the lease of a dead run."""
        while not keeper.is_held:
            assert self.clock.now <= self.clock.timing.lease_ttl_s + self.clock.timing.lease_beat_s
            self.clock.advance(keeper.step())


@pytest.fixture
def place(tmp_path):
    made = World(tmp_path)
    yield made
    made.store.close()


KNOWN = lease_of("o").to_json()


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"[]",
        b"\xff",
        b"null",
        b'{"format_version": 1, "owner": 3}',
        KNOWN.replace(b'"generation": 1', b'"generation": "1"'),
        KNOWN.replace(b": 1,", b": 2,", 1),
        b'{"format_version":1}' * 2,
        b"[" * 60_000,
    ],
)
def test_an_unreadable_lease_counts_as_live_while_it_changes(data, place):
    place.store.put(LEASE_KEY, data)
    keeper = place.keeper("me", starts=False)
    keeper.step()
    assert "can't be read" in keeper.other_that_may_live()
    place.store.put(LEASE_KEY, data + b" ")
    keeper.step()
    with pytest.raises(ConfigError, match="whose lease can't be read"):
        keeper.check()
    silent = place.keeper("me", starts=False)
    place.until_held(silent)
    assert holder_of(place.store).owner == "me"


@pytest.mark.parametrize("user", ["of this user", pytest.param("of another", marks=pytest.mark.matrix)])
def test_a_run_whose_process_is_hidden_is_judged_by_its_answers_and_a_dead_one_at_once(user, place, monkeypatch):
    """/proc may be mounted with hidepid: then other users' processes look like dead ones."""

    def hidden(path, *_):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def forbidden(*_):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    dead, here = subprocess.Popen(["true"]), Identity.of_this_process()
    dead.wait(timeout=20)
    monkeypatch.setattr(node, "open", hidden, raising=False)
    gone = lease_of("other", machine=here.machine)
    place.store.put(LEASE_KEY, replace(gone, process=gone.process._replace(pid=dead.pid)).to_json())
    keeper = place.keeper("me", here=here, starts=False)
    keeper.step()
    assert keeper.is_held
    if user == "of another":
        monkeypatch.setattr(node.os, "kill", forbidden)
    alive = replace(lease_of("other"), process=here)
    place.store.put(LEASE_KEY, alive.to_json())
    keeper = place.keeper("late", here=here, starts=False)
    keeper.step()
    assert (keeper.is_held, bool(holder_of(place.store).asker)) == (False, True)
    place.store.put(LEASE_KEY, alive.to_json())
    keeper.step()
    with pytest.raises(ConfigError, match="another run writes to the same dirpath"):
        keeper.check()


def test_processes_of_one_launch_do_not_take_each_other_for_another_run(place):
    """Two sessions of one launch, or two of its ranks, for a day; then another run comes."""
    first, second = place.keeper("launch"), place.keeper("launch", here=Identity("another", os.getpid(), 1))
    place.advance(60)
    met = first.met, second.met
    assert met == (1, 0), "each has to follow what the other has saved"
    place.advance(24 * 3600)
    assert first.is_held and second.is_held
    assert (first.met, second.met) == met, "each would give the next save a new run id"
    assert place.writes == 2, "each is a version in a bucket that keeps versions"
    second.close(5.0)
    place.threads.pop()
    place.advance(60)
    assert first.met == met[0] + 1, "what it has saved meanwhile is older than what we save now"
    newcomer = place.keeper("other")
    place.advance(40)
    with pytest.raises(ConfigError, match="launch.* is running"):
        newcomer.check()
    assert first.met == met[0] + 2
    first.close(5.0)
    assert holder_of(place.store) is None
    place.keeper("next").close(5.0)
    assert json.loads(place.store.get(LEASE_KEY))["generation"] == 3


def test_a_store_without_conditions_is_used_with_one_warning(place, caplog):
    store = place.store

    class Plain:
        url = store.url
        get, put, size = store.get, store.put, store.size

    place.store = Plain()
    place.keeper("one").close(5.0)
    assert caplog.text.count("has no conditional writes") == 1
    assert holder_of(store) is None
    store.close()
    place.store.close = lambda: None


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("a", "b", "c"), ("c", "b", "a")])
def test_of_runs_that_begin_at_once_one_goes_on(names, place):
    all_asked, get = threading.Barrier(len(names)), place.store.get_tagged

    def get_together(key):
        """Each has looked before any of them writes."""
        try:
            return get(key)
        finally:
            with contextlib.suppress(threading.BrokenBarrierError):
                all_asked.wait(10)
                all_asked.abort()

    place.store.get_tagged = get_together
    keepers = [place.keeper(name, starts=False) for name in names]
    for keeper in keepers:
        keeper.start()
        place.threads.append(keeper._thread)
    place.advance(4 * place.clock.timing.lease_ttl_s)
    assert sum(each.is_held for each in keepers) == 1
    for keeper in keepers:
        with contextlib.nullcontext() if keeper.is_held else pytest.raises(ConfigError, match="is running"):
            keeper.check()
        keeper.close(5.0)
    assert holder_of(place.store) is None


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
#: Environment that two jobs share: nothing, or tasks of Slurm that train each for itself.
SHARED = [[{}, {}], [{**TASK, "SLURM_PROCID": "0"}, {**TASK, "SLURM_PROCID": "1"}]]


@pytest.mark.parametrize("environments", SHARED, ids=["nothing", "Slurm"])
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
    dist.init_process_group("fake", rank=rank, world_size=10, store=FakeStore())
    try:
        found = run.leads_node(), run.may_lead_node()
    finally:
        dist.destroy_process_group()
    # If the first rank of a node is not known, any rank may continue the node's uploads.
    is_told = "LOCAL_RANK" in environment or str(rank) in (
        environment.get(name) for name in names if "LOCAL" not in name
    )
    assert found == (leads, leads or not is_told)
