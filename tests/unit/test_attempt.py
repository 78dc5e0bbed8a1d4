"""Which attempt of torchrun ranks are in, by real processes and a store that is kept over all attempts."""

import json
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from support.clocks import quick

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.ranks.attempt import name_attempt
from tiered_checkpoint_io.engine.ranks.local_run import Run
from tiered_checkpoint_io.errors import UsageError

RANK = """
import json, sys
import torch.distributed as dist
from tiered_checkpoint_io.engine.ranks.local_run import Run
run = Run(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False))
print(flush=True)
sys.stdin.readline()
print(json.dumps([run.begin_load("x"), run.save_id("job", "step_#", 1, 0, lambda: sys.argv[2])]), flush=True)
sys.stdin.read()
"""
RUN_ID = "20260101T00000{}.000000-00000000"


@pytest.fixture
def rank(monkeypatch):
    """Starts a rank; it asks once it is told to."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    started = []

    def start():
        line = [sys.executable, "-c", RANK, str(store.port), RUN_ID.format(len(started))]
        started.append(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    end(started)


def end(ranks):
    for each in ranks:
        each.kill()
        each.communicate()


def ask(ranks):
    """What each says, where all begin at once."""
    for each in ranks:
        each.stdout.readline()
    for each in ranks:
        each.stdin.write("\n")
        each.stdin.flush()
    return [json.loads(each.stdout.readline()) for each in ranks]


def test_all_ranks_of_an_attempt_agree_and_no_other_attempt_has_the_same(rank):
    seen = []
    for _ in range(2):
        ranks = [rank() for _ in range(3)]
        said = ask(ranks)
        assert said == said[:1] * 3
        late = rank()
        assert ask([late]) == said[:1]
        seen.append(said[0])
        end([*ranks, late])
    (load, save), (load_after, save_after) = seen
    assert load != load_after
    assert save != save_after


def test_a_store_of_one_attempt_is_not_asked(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert name_attempt(None, "", SYSTEM) == "0"
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert name_attempt(None, "", SYSTEM) == "0"


def test_a_store_that_is_gone_is_said(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = Run(dist.TCPStore("127.0.0.1", server.port, is_master=False), quick(store_answer_s=1.0))
    del server
    with pytest.raises(UsageError, match="the store of torch.distributed does not answer"):
        run.begin_load("x")
    assert not [each for each in threading.enumerate() if each.name == "tiered-attempt"]
