"""Exchange between ranks, the interface that replicas travel over, and attempts of torchrun that ranks are in."""

import contextlib
import itertools
import multiprocessing
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.failing import failing
from support.restoring import SMALL, in_ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiered_checkpoint_io.adapters import calls
from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.ranks import coordination
from tiered_checkpoint_io.engine.ranks.coordination import (
    Group,
    current_group,
    machine,
    node_of,
)
from tiered_checkpoint_io.engine.ranks.run import Run
from tiered_checkpoint_io.engine.replication.meeting import address_here, choose
from tiered_checkpoint_io.errors import ConfigError, RestoreError, StoreError
from tiered_checkpoint_io.memory import node
from tiered_checkpoint_io.memory.node import memory_of
from tiered_checkpoint_io.model import ids


@contextlib.contextmanager
def rank_0(backend="gloo", store=dist.HashStore, of=1):
    dist.init_process_group(backend, store=store(), rank=0, world_size=of)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Unpicklable(Exception):
    def __reduce__(self):
        raise TypeError("stays here")


def fails(error):
    if error is not None:
        raise error


def test_all_ranks_raise_the_error_of_the_lowest_that_failed_if_any():
    def work(errors):
        return lambda group: group.together(lambda: fails(errors.get(group.rank)))

    error = StoreError("slow down", key="k", hint="wait", reason="unavailable")
    raised = in_ranks(["n"] * 4, work({1: error, 2: Unpicklable("other")}))
    assert {error.reason for error in raised} == {"unavailable"}
    assert {str(error) for error in raised} == {"slow down [tier=durable, key=k] — wait"}
    assert isinstance(raised[2].__cause__, Unpicklable)
    # An error that can't be pickled arrives as its text.
    raised = in_ranks(["n", "n"], work({1: Unpicklable("it broke")}))
    assert [(type(error), error.rank, "Unpicklable: it broke" in str(error)) for error in raised] == [
        (RestoreError, 1, True)
    ] * 2
    assert in_ranks(["n", "m", "m"], work({})) == [None] * 3


@pytest.mark.parametrize("failing", [None, "report", "choice"])
def test_what_rank_0_chooses_from_all_reports_reaches_all_or_the_error_does(failing):
    error = StoreError("slow down", reason="unavailable")

    def choice(reports):
        fails(error if failing == "choice" else None)
        return bytes(SMALL + 1), reports

    def work(group):
        return group.decide(lambda: fails(error if (failing, group.rank) == ("report", 1) else None), choice)

    got = in_ranks(["n", "n", "m"], work)
    assert list(map(str, got)) == [str(error if failing else (bytes(SMALL + 1), [None] * 3))] * 3


def test_a_load_off_the_main_thread_is_refused():
    refused = pytest.raises(ConfigError, match="from a thread .* call it on the main")
    with rank_0("fake", FakeStore, of=2), ThreadPoolExecutor() as threads, refused:
        threads.submit(current_group, SYSTEM).result()


def test_alone_an_error_is_raised_as_it_is(tmp_path):
    error = StoreError("no", reason="unavailable")
    with failing("unavailable") as caught:
        Group().together(lambda: fails(error))
    assert caught.value is error
    assert "direct cause" not in "".join(traceback.format_exception(caught.value))


def test_nodes_are_told_apart_by_their_memory_and_one_process_needs_no_group(tmp_path, monkeypatch):
    one, two = tmp_path / "1", tmp_path / "2"
    one.mkdir()
    two.mkdir()
    assert node_of(one) == node_of(tmp_path / "." / "1")
    assert node_of(one) != node_of(two)
    group, unpicklable = current_group(SYSTEM), lambda: None
    assert (group.rank, group.world_size) == (0, 1)
    assert group.decide(lambda: unpicklable, list) == [unpicklable]
    # A container of the same machine: it may see the same memory, and is lost with it.
    seen = machine(), memory_of(one), node_of(one)
    monkeypatch.setattr(coordination.socket, "gethostname", lambda: "gpt-worker-1")
    assert (machine(), memory_of(one)) == seen[:2]
    assert node_of(one) != seen[2]
    # Of a machine without a known boot.
    monkeypatch.setattr(node, "boot_id", lambda: "")
    assert machine() == "gpt-worker-1"
    # Of two that fail as one, the memories stay two.
    memory = memory_of(one)
    monkeypatch.setenv(coordination.MACHINE, "host-7")
    assert (machine(), memory_of(one)) == ("host-7", memory)


def test_a_rank_that_is_in_none_of_the_groups_it_gives_is_told_so():
    outside = dist.GroupMember.NON_GROUP_MEMBER
    with rank_0():
        for replicas in (None, [0]):
            with pytest.raises(ConfigError, match="this rank is not in the process group"):
                calls.Ranks(outside, replicas).shard_role()
        for replicas in (outside, []):
            with pytest.raises(ConfigError, match=r"the replication group has ranks \[\], not 0"):
                calls.Ranks(None, replicas).shard_role()
        assert calls.Ranks(None, [0, 0]).shard_role().writes


LO, DOCKER = {"lo": "127.0.0.1"}, {"docker0": "172.17.0.1"}
ALL = {**LO, **DOCKER, "eth0": "10.0.0.5", "ib0": "10.1.0.5"}


@pytest.mark.parametrize(
    ("has", "host", "source", "chosen"),
    [
        # The route to the store's host, on any rank: its own host reaches it from the same address.
        (ALL, "10.1.0.1", "10.1.0.5", "10.1.0.5"),
        (ALL, "node0", "fd00::5", "fd00::5"),
        # All ranks are on one host.
        (ALL, "127.0.0.1", "127.0.0.1", "127.0.0.1"),
        (ALL, "localhost", "127.0.0.1", "127.0.0.1"),
        # The store's host has its name for 127.0.1.1, as Debian does: the others can't reach it there.
        (ALL, "node0", "127.0.1.1", "10.0.0.5"),
        (ALL, "172.17.0.2", "172.17.0.1", "10.0.0.5"),
        # No way to anywhere, and nothing else.
        (ALL, "", None, "10.0.0.5"),
        (LO | DOCKER, "172.17.0.2", "172.17.0.1", "172.17.0.1"),
        (LO, "node0", "127.0.0.1", "127.0.0.1"),
        ({}, "", None, "127.0.0.1"),
    ],
)
def test_which_address_is_taken(has, host, source, chosen):
    assert choose(has, host, source) == chosen


def test_an_interface_that_is_named_is_taken_or_an_error_lists_those_that_exist(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert address_here() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth9")
    with pytest.raises(ConfigError, match="GLOO_SOCKET_IFNAME is 'eth9'") as caught:
        address_here()
    assert "lo (127.0.0.1)" in caught.value.hint


FORK = multiprocessing.get_context("fork")


def rank_of_job(port, rank, pipe):
    """Runs a process that answers each request with the id of a save."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    run, run_id = Run(dist.TCPStore("127.0.0.1", port, is_master=False)), ids.new_run_id()
    pipe.send("started")
    for step in itertools.count():
        pipe.recv()
        try:
            pipe.send([run.save_id("job", "step_#", step, 0, lambda: run_id)])
        except ConfigError as error:
            pipe.send(str(error))


class Ranks:
    def __init__(self):
        self.store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self.processes = []

    def start(self, *ranks):
        begun = []
        for rank in ranks:
            here, there = FORK.Pipe()
            self.processes.append(FORK.Process(target=rank_of_job, args=(self.store.port, rank, there), daemon=True))
            self.processes[-1].start()
            begun.append(here)
        assert [here.recv() for here in begun] == ["started"] * len(ranks)
        return begun

    @staticmethod
    def ask(ranks):
        """Returns each rank's answer; all begin at once."""
        for here in ranks:
            here.send(None)
        return [here.recv() for here in ranks]

    def end(self):
        for each in self.processes:
            each.kill()
            each.join()
        self.processes.clear()


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    made = Ranks()
    yield made
    made.end()


def test_a_rank_that_takes_an_attempt_before_for_its_own_saves_nothing_then(ranks):
    ranks.ask(ranks.start(0, 1))
    ranks.end()
    # Rank 2 died before it had asked for anything.
    early = ranks.start(2)
    ranks.ask(early)
    others = ranks.start(0, 1)
    said = ranks.ask(others)
    (refused,) = ranks.ask(early)
    assert "other ranks of this job were restarted, and this one was not" in refused
    # However often it asks, the others continue.
    assert ranks.ask(early) == [refused]
    assert not [each for each in ranks.ask(others) if isinstance(each, str)]
    # torchrun then starts all of them again.
    ranks.end()
    again = ranks.ask(ranks.start(2, 1, 0))
    assert again == again[:1] * 3
    assert again[0] != said[0]


@pytest.mark.parametrize("said", [None, "False"])
def test_a_store_of_one_attempt_alone_is_not_asked(monkeypatch, said):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", said)
    assert Run(object()).attempt == "0"
