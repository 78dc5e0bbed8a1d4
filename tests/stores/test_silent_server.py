"""A server that accepts and never answers: a restart takes what node memory has, and training does not wait."""

import logging
import threading
import time

import pytest
from support.bad_input import state
from support.clocks import hurried, quick
from support.failing import failing
from support.fault_proxy import where
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.stores.base import Metrics
from tiered_checkpoint_io.stores.retry import Retry, answer_within


class Book(logging.Handler):
    """Log records, and an action for the record that has some text."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines, self.then = [], {}
        self.log = logging.getLogger(f"silent.{id(self)}")
        self.log.setLevel(logging.INFO)
        self.log.addHandler(self)

    def emit(self, record):
        line = record.getMessage()
        self.lines.append(line)
        for text, act in self.then.items():
            if text in line:
                act()

    def having(self, text):
        return [line for line in self.lines if text in line]


@pytest.fixture
def book():
    return Book()


@pytest.fixture(autouse=True)
def soon():
    with hurried(
        silence_line_s=1.0,
        lease_first_look_s=0.2,
        retry_first_wait_s=0.05,
        retry_max_wait_s=0.2,
        redo_first_s=0.05,
        redo_max_s=0.2,
    ):
        yield


class Gate:
    """The proxy is silent from now on, until it is opened; what waited is then cut off."""

    def __init__(self, proxy):
        self.proxy, self.is_open = proxy, threading.Event()
        proxy.plan = where(self._wait)

    def _wait(self, exchange):
        while not (self.is_open.wait(0.05) or exchange.owner.closing.is_set()):
            pass
        exchange.cut()

    def open(self):
        self.proxy.plan = lambda *_: None
        self.is_open.set()


@pytest.fixture
def io_of(s3_url, memory_dir, proxy, book):
    made = []

    def io_of(**changes):
        options = {"dirpath": s3_url, "memory_dir": memory_dir, "endpoint_url": proxy.endpoint_url, "drain": "thread"}
        options |= {"wait_timeout_s": 120, "durable_timeout_s": 1, "logger": book.log}
        made.append(build(TieredCheckpointIO, **{**options, **changes}))
        return made[-1]

    yield io_of
    proxy.plan = lambda *_: None
    for io in made:
        io.teardown()


def test_a_save_that_waits_stays_in_memory_and_is_uploaded_later(io_of, proxy, book):
    gate, io = Gate(proxy), io_of(pending_timeout_s=1)
    made = io.checkpointer
    io.save_checkpoint(state(1), "1.ckpt")
    assert made.session.is_pending("1.ckpt")
    assert book.having("1.ckpt stays in node memory, queued for upload: nothing has reached S3 for 1 s")
    assert book.having("saved 1.ckpt to memory")
    assert made.session.counts["failed"] == 0
    assert io.load_checkpoint("tiered:latest")["global_step"] == 1
    strict = io_of(pending_timeout_s=1, on_save_error="raise", namespace="strict")
    with pytest.raises(SaveError, match="is in memory, but not on the durable tier: nothing has reached S3 for 1 s"):
        strict.save_checkpoint(state(3), "3.ckpt")
    gate.open()
    made.session.wait()
    assert {each.name: each.state for each in made.session.poll()} == {"1.ckpt": "committed"}
    io.teardown()
    assert book.having("1.ckpt is durable")
    elsewhere = io_of(namespace="another-node")
    assert elsewhere.load_checkpoint("tiered:latest")["global_step"] in (1, 3)
    assert elsewhere.checkpointer.restored.tier == "durable"


def test_each_answer_begins_a_new_silence():
    """A long listing of a server that answers is no silence; counted from the last answer, silence ends it."""
    counts, clock = [], quick(silence_line_s=0.1)

    def ask():
        retry = Retry(Metrics(), clock)
        for _ in range(5):
            retry(lambda: time.sleep(0.3))
        return "listed"

    assert answer_within(1.2, ask, clock=clock, count_down=lambda *figures: counts.append(figures)) == "listed"
    assert counts, "a part of a second of silence is said"
    never = threading.Event()
    with failing("unavailable", match="S3 has not answered for 1 s"):
        answer_within(1.0, never.wait, what="S3", clock=clock)
    never.set()
    with pytest.raises(KeyError):
        answer_within(1.0, {}.popitem, clock=clock)
