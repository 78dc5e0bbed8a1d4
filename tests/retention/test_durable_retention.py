"""Retention and holds on the durable tier: as stories on S3, and stopped or met by others at any request."""

import contextlib
import io
import itertools

import pytest
import torch
from support.committing import RUN, alias, delete, lease_of, save, swept
from support.draining import Node, names
from support.draining import objects as files
from support.failing import failing
from support.fault_proxy import FaultProxy, locked
from support.faulty import FaultyStore, Injected
from support.sharded import FlatStore, named, objects, readable
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.engine.durable.retention import removed
from tiered_checkpoint_io.engine.durable.sweep import LIFETIME_S, Survey, hold, release
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.retention import Latest
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore


def apply(*arguments, **options):
    """Removes all checkpoints that no policy keeps; returns those that are gone."""
    return [each.checkpoint for each in removed(*arguments, **options) if each.is_gone]


@pytest.fixture
def s3(s3_url):
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    yield store
    store.close()


def save_of(number):
    return ids.save_id(RUN, number)


class Tomorrow(Clock):
    """The clock of a day and a minute later."""

    def wall(self):
        return super().wall() + LIFETIME_S + 60


def test_what_is_held_stays_until_it_is_released_or_its_program_is_dead(s3):
    for number in (1, 2, 3):
        save(s3, f"c{number}", number)
    first, second = hold(s3, "c1", save_of(1)), hold(s3, "c1", save_of(1))
    hold(s3, "c3", save_of(3))
    with failing("held", match="c1 is in use by another program .* — it stays"):
        delete(s3, "c1")
    assert [each.name for each in apply(s3, [Latest(1)], Survey())] == ["c2"]
    release(s3, first)
    with failing("held"):
        delete(s3, "c1")
    assert readable(s3, "c1")
    release(s3, second)
    assert [each.name for each in apply(s3, [Latest(1)], Survey())] == ["c1"]
    save(s3, "c4", 4)
    apply(s3, [Latest(1)], Survey())
    assert files(s3) == ["c3", "c4"]
    apply(s3, [Latest(1)], Survey(), clock=Tomorrow())
    assert files(s3) == ["c4"]
    assert not list(s3.list(ids.HOLDS_PREFIX)), "an expired hold is removed on the way"
    with pytest.raises(CheckpointNotFoundError, match="c3 was deleted or overwritten, so nothing is held"):
        hold(s3, "c3", save_of(3))
    with pytest.raises(CheckpointNotFoundError, match="c4 was deleted or overwritten"):
        hold(s3, "c4", save_of(3))
    assert not list(s3.list(ids.HOLDS_PREFIX))


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.matrix)])
def test_retention_that_is_stopped_at_any_request_is_finished_by_the_next_try(memory_dir, kind):
    for at in itertools.count(1):
        store = FlatStore(f"{memory_dir}/{at}")
        for number in range(1, 5):
            save(store, f"c{number}", number, kind=kind)
        alias(store, "kept", "c2")
        faulty = FaultyStore(store, fail_at=at)
        with contextlib.suppress(Injected):
            apply(faulty, [Latest(1)], Survey())
        assert {"c2", "c4", "kept"} <= {*names(store)} and all(readable(store, name) for name in names(store))
        apply(store, [Latest(1)], Survey())
        assert names(store) == ["c2", "c4", "kept"]
        swept(store)
        assert objects(store) == named(store)
        if faulty.operations < at:
            break
    assert at > 10


class Meeting(FaultyStore):
    """Something is done before the ``at``-th request."""

    def __init__(self, store, at, act):
        super().__init__(store)
        self._at, self._act = at, act

    def _count(self, operation, key):
        super()._count(operation, key)
        if self.operations == self._at:
            act, self._act = self._act, None
            act()
        return False


@pytest.mark.parametrize("kind", ["full", pytest.param("sharded", marks=pytest.mark.matrix)])
def test_a_hold_that_meets_a_delete_keeps_it_out_or_is_refused(memory_dir, kind):
    held = 0
    for at in itertools.count(1):
        store = FlatStore(f"{memory_dir}/{at}")
        save(store, "a", 1, kind=kind)
        made = []

        def act(store=store, made=made):
            with contextlib.suppress(CheckpointNotFoundError):
                made.append(hold(store, "a", save_of(1)))

        meeting = Meeting(store, at, act)
        with contextlib.suppress(ConfigError):
            delete(meeting, "a")
        if made and meeting.operations >= at:
            held += 1
            assert readable(store, "a"), f"held before request {at}, and gone"
        else:
            assert not names(store) and not list(store.list(ids.HOLDS_PREFIX))
        if meeting.operations < at:
            break
    assert held > 3


def test_a_delete_that_meets_a_hold_or_an_overwrite_leaves_what_is_wanted(memory_dir):
    """The other way round: what deletes comes between two requests of a hold, and an overwrite between those of it."""
    for at in range(1, 6):
        store = FlatStore(f"{memory_dir}/hold-{at}")
        save(store, "a", 1)

        def act(store=store):
            with contextlib.suppress(ConfigError):
                delete(store, "a")

        try:
            hold(Meeting(store, at, act), "a", save_of(1))
        except CheckpointNotFoundError:
            assert not names(store) and not list(store.list(ids.HOLDS_PREFIX)), f"refused, and left a hold: {at}"
        else:
            assert readable(store, "a")
    for at in itertools.count(1):
        store = FlatStore(f"{memory_dir}/again-{at}")
        save(store, "a", 1)
        save(store, "b", 2)
        meeting = Meeting(store, at, lambda store=store: save(store, "a", 3))
        apply(meeting, [Latest(1)], Survey())
        if meeting.operations < at:
            break
        assert readable(store, "a") == 3, f"removed what was saved before request {at}"
    assert at > 5


@pytest.fixture
def node(memory_dir, durable_dir):
    """Returns a node whose run has ended, with two saves and the retention behind each still queued."""
    node = Node(memory_dir, durable_dir, retention={"latest": 1})
    for number in (1, 2):
        save_id = node.save(f"c{number}", b"data", step=number)
        node.request("retain", "retention/mine", save_id)
    return node


def test_what_a_run_left_queued_removes_nothing_of_the_run_that_took_over(node):
    """The other run holds the lease by now, and has saved; each run's drain does what its own policies say."""
    store = DirectoryStore(node.dirpath)
    save(store, "other", 9, kind="full")
    store.put(ids.LEASE_KEY, lease_of("other").to_json())
    Drain(node.root).run(once=True)
    assert names(store) == ["c1", "c2", "other"]
    skipped = [outcome for outcome in node.queue.outcomes() if outcome.action == "retain"]
    assert {(each.state, each.error.partition(" holds")[0]) for each in skipped} == {
        ("skipped", "process 1 on host (launch other)")
    }
    # That run has ended: the first one's next retention is carried out, and leaves newer checkpoints.
    store.put(ids.LEASE_KEY, lease_of("").to_json())
    node.request("retain", "retention/mine", node.save("c3", b"data", step=3))
    Drain(node.root).run(once=True)
    assert names(store) == ["other"]


def test_retention_removes_nothing_that_a_queued_copy_or_alias_needs(node):
    save_id = node.save("c4", b"data", step=4)
    node.request("retain", "retention/mine", save_id)
    node.alias("best", "c2")
    Drain(node.root).run(once=True)
    assert names(DirectoryStore(node.dirpath)) == ["best", "c2", "c4"]


def test_a_save_does_not_wait_for_all_that_new_policies_remove(memory_dir, durable_dir):
    """A run of years gets its first policy: to remove the old ones takes longer than until the next save."""
    node = Node(memory_dir, durable_dir, retention={"latest": 1})
    store, done = DirectoryStore(node.dirpath), []
    for number in range(1, 7):
        save(store, f"old{number}", number, kind="full")
    node.number = 6
    node.request("retain", "retention/mine", node.save("c1", b"data", step=7))

    class Noting(DirectoryStore):
        def delete_if(self, key, expected):
            super().delete_if(key, expected)
            if "c2" not in {stored.part.name for stored in node.tier.parts()}:
                node.save("c2", b"data", step=8)
            done.append(key)

        def upload_if(self, key, *args, **options):
            super().upload_if(key, *args, **options)
            done.append(key)

    Drain(node.root, open_store=lambda _config, dirpath, _clock: Noting(dirpath)).run(once=True)
    assert done.index("c2") <= 3, done
    assert names(store) == ["c2"], "all else is removed all the same"
    assert {outcome.state for outcome in node.queue.outcomes()} == {"committed"}


@pytest.fixture
def locks(s3_server, s3_url):
    """Yields the store of a bucket, and a proxy before it that refuses to delete what ``lock`` says."""
    bucket, _ = ids.parse_s3_url(s3_url)
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    with FaultProxy(s3_server.endpoint_url) as proxy:

        def lock(*ends):
            proxy.plan = locked(s3_server.client, bucket, *ends)
            return proxy.plan.asked

        yield store, lock, proxy.endpoint_url
    store.close()


def test_a_locked_checkpoint_keeps_no_other_and_is_named_once(locks, memory_dir, caplog):
    store, lock, endpoint = locks
    asked = lock("/manifests/c1.json")
    options = {"memory_dir": memory_dir, "drain": "thread", "endpoint_url": endpoint, "retention": {"latest": 1}}
    run = build(TieredCheckpointIO, store.url, **options)
    for step in range(1, 4):
        run.save_checkpoint({"global_step": step}, f"c{step}")
    run.teardown()
    assert names(store) == files(store) == ["c1", "c3"]
    assert torch.load(io.BytesIO(store.get("c1")), weights_only=True)["global_step"] == 1
    assert asked == {"/manifests/c1.json": 1}
    (warning,) = [
        each.getMessage() for each in caplog.records if "c1" in each.getMessage() and each.levelname == "WARNING"
    ]
    assert warning.startswith(
        "retention: c1 stays, as the server refuses to delete it (a lock or a policy may hold it): S3 d"
    )
    assert "(AccessDenied, HTTP 403)" in warning
    # The next run asks again.
    lock()
    run = build(TieredCheckpointIO, store.url, **options)
    run.save_checkpoint({"global_step": 4}, "c4")
    run.teardown()
    assert names(store) == ["c4"]
