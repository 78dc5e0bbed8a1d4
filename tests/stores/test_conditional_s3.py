"""Conditional writes on S3: on moto, which keeps them, and against servers that refuse them, or whose answer is lost."""

import os

import pytest
from support import clocks
from support.failing import failing
from support.fault_proxy import lose_answer, refuse, when, where
from support.store_contract import MemoryJournal, StoreContract

from tiered_checkpoint_io.stores.s3 import MIB, S3Store


@pytest.fixture
def s3_server(moto, use_server):
    return use_server(moto)


@pytest.fixture
def store(bucket, proxy):
    quick = clocks.quick(retry_first_wait_s=0.01, retry_max_wait_s=0.05)
    store = S3Store(f"s3://{bucket}/run", part_size=8 * MIB, endpoint_url=proxy.endpoint_url, clock=quick)
    yield store
    store.close()


def is_conditional(exchange):
    return bool({name.lower() for name in exchange.headers} & {"if-match", "if-none-match"})


class TestConditions:
    """The conditional part of the contract, on a server that keeps conditions; the rest of it runs elsewhere."""

    keeps_conditions = True
    conditional_store = StoreContract.conditional_store
    test_as_read = StoreContract.test_what_is_as_it_was_read_goes
    test_changed = StoreContract.test_what_changed_since_it_was_read_stays
    test_there_already = StoreContract.test_what_it_would_write_is_there_already
    test_many = StoreContract.test_many_are_removed_where_a_store_can_do_that
    test_one_writes = StoreContract.test_of_many_who_read_the_same_one_writes


@pytest.mark.parametrize("expected", ["absent", "tag"])
def test_a_lost_answer_is_no_change_by_others(store, proxy, expected):
    tag = store.put_if("x", b"1", None) if expected == "tag" else None
    proxy.plan = where(lose_answer, operation="put", key="x", calls=[1])
    store.put_if("x", b"2", tag)
    assert store.get("x") == b"2"
    assert store.metrics.snapshot()["retries"] == 1


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (400, "InvalidArgument")])
def test_a_server_that_refuses_conditions_is_written_to_without(store, proxy, refusal):
    store.put("x", b"1")
    proxy.plan = where(when(is_conditional, refuse(*refusal)))
    before = store.metrics.snapshot()["requests.put"]
    store.put_if("x", b"2", "another")
    store.put_if("x", b"3", None)
    assert store.get("x") == b"3"
    # Known once for the store: the first of the two was asked twice.
    assert store.metrics.snapshot()["requests.put"] == before + 3
    store.delete_if("x", "another")
    assert store.tag("x") is None


@pytest.mark.parametrize("holds", [True, False])
def test_while_another_write_is_under_way_the_condition_stays(store, proxy, holds):
    """AWS answers 409 then, and does not say yet whether the condition holds; a proxy's answer, for moto never does."""
    tag = store.put_if("x", b"1", None)
    conditions = []

    def is_under_way(exchange):
        conditions.append(exchange.headers.get("If-Match"))
        return len(conditions) <= 3

    proxy.plan = where(when(is_under_way, refuse(409, "ConditionalRequestConflict")), operation="put", key="x")
    if holds:
        store.put_if("x", b"2", tag)
    else:
        with failing("changed"):
            store.put_if("x", b"2", "of-another")
    assert store.get("x") == (b"2" if holds else b"1")
    assert len(conditions) > 3 and all(conditions), "never without its condition"


def test_an_upload_in_parts_writes_over_nothing_that_came_meanwhile(store):
    store.put("x", b"old")
    data, tag, journal = os.urandom(20 * MIB), store.tag("x"), MemoryJournal()

    def another_comes(_):
        store.put("x", b"another")

    with failing("changed"):
        store.upload_if("x", memoryview(data), tag, journal=journal, progress=another_comes)
    assert store.get("x") == b"another"
    sent = store.metrics.snapshot()["requests.part"]
    # Parts that have arrived are not sent again.
    store.upload_if("x", memoryview(data), store.tag("x"), journal=journal)
    assert store.get("x") == data
    assert store.metrics.snapshot()["requests.part"] == sent


def one_refused(code):
    def act(exchange):
        exchange.forward()
        body = f"<DeleteResult><Error><Key>k</Key><Code>{code}</Code><Message>m</Message></Error></DeleteResult>"
        exchange.answer(200, body.encode())

    return act


@pytest.mark.parametrize(
    ("fault", "requests"),
    [
        (refuse(501, "NotImplemented"), 1 + 3),
        (refuse(400, "MissingContentMD5"), 1 + 3),
        (refuse(403, "AccessDenied"), 1 + 3),
        # Of one key, refused or not done.
        (one_refused("AccessDenied"), 1 + 3),
        (one_refused("InternalError"), 2),
        (lose_answer, 2),
    ],
)
def test_what_a_request_for_many_does_not_remove_is_removed_all_the_same(store, proxy, fault, requests):
    keys = ["a", "b", "c"]
    for key in keys:
        store.put(key, b"1")
    proxy.plan = where(fault, operation="post", calls=[1])
    store.delete_all(keys)
    assert list(store.list("")) == []
    assert store.metrics.snapshot()["requests.delete"] == requests


def test_so_the_server_may_say_at_its_last_request(store, proxy):
    """AWS does; servers that install from packages ignore conditions there, hence a proxy's answer."""
    proxy.plan = where(refuse(412, "PreconditionFailed"), operation="complete", key="x")
    with failing("changed"):
        store.upload_if("x", memoryview(bytes(20 * MIB)), None)
    proxy.plan = where(lose_answer, operation="complete", key="x", calls=[1])
    store.upload_if("x", memoryview(bytes(20 * MIB)), None)
    assert store.size("x") == 20 * MIB
