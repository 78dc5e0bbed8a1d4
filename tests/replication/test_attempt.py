"""Attempts of torchrun that ranks are in: real processes, and a store that is kept over all attempts.

With gloo, torch itself reads addresses of dead ranks in such a store. So the ranks here have no connection to each other.
"""

import itertools
import multiprocessing
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tiered_checkpoint_io.engine.ranks.local_run import Run
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids

FORK = multiprocessing.get_context("fork")


def rank_of_job(port, rank, pipe):
    """Runs a process that answers each request with its choice to load and save."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    run, run_id = Run(dist.TCPStore("127.0.0.1", port, is_master=False)), ids.new_run_id()
    pipe.send("started")
    for step in itertools.count():
        pipe.recv()
        try:
            pipe.send([run.begin_load("x"), run.save_id("job", "step_#", step, 0, lambda: run_id)])
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
        """Returns each rank's answer about a load and a save; all begin at once."""
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
    assert "other ranks of this job were started anew, and this one was not" in refused
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
