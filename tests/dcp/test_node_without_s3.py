"""One node that can't reach the durable tier, while the others can."""

import contextlib
import os
import signal
from pathlib import Path

import pytest
from support.fault_proxy import FaultProxy, refuse

from tiered_checkpoint_io.engine.drain.queue import Queue

#: No save may wait as long as that.
BOUND_S = 60


@pytest.fixture
def ended(memory_dir):
    """Ends the drains, which try for minutes."""
    yield
    for root in Path(memory_dir).glob("*/tiered-*/*"):
        if pid := Queue(root).progress().pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def queued_after_saves(ranks, s3_url, without, endpoint_url, patience_s=1):
    """Of each rank, the durable saves that its node's memory has after seven; one rank is told of another server."""
    options = {"drain": "process", "pending_timeout_s": patience_s, "wait_timeout_s": BOUND_S}
    options["of_rank"] = {without: {"endpoint_url": endpoint_url}}
    saves = [["save", step, {"wait": False}] for step in range(1, 8)]
    for answer in ranks(2, *saves, nodes="ab", dirpath=s3_url, save_to_s3=True, **options):
        assert [step.get("message") for step in answer] == [None] * 7
        assert max(step["seconds"] for step in answer) < BOUND_S / 2
        yield {name for name, _, _, durable, _ in answer[-1]["got"] if durable}


@pytest.mark.usefixtures("ended")
@pytest.mark.parametrize("without", [1, pytest.param(0, marks=pytest.mark.matrix)], ids=["other node", "coordinator"])
def test_training_does_not_wait_for_it_and_its_queue_stays_bounded(ranks, s3_url, without):
    """The coordinator's own drain gets on all the time: it looks for the parts of the other node."""
    for queued in queued_after_saves(ranks, s3_url, without, "http://127.0.0.1:9"):
        assert len(queued) <= 2, "max_pending"


@pytest.mark.usefixtures("ended")
def test_what_it_gives_up_the_coordinator_gives_up_as_well(ranks, s3_url, s3_server):
    """Parts that do not come would hold up later saves."""
    with FaultProxy(s3_server.endpoint_url, lambda *_: refuse(403, "AccessDenied")) as proxy:
        for queued in queued_after_saves(ranks, s3_url, 1, proxy.endpoint_url, patience_s=15):
            assert "step_7" in queued
            # Two wait, and three that were cancelled may not be taken off yet; and this one.
            assert len(queued) <= 6
