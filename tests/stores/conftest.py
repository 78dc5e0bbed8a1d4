"""A store on S3 behind the proxy."""

import pytest
from support.clocks import quick

from tiered_checkpoint_io.stores.s3 import MIB, S3Store


@pytest.fixture
def open_store(s3_url, proxy):
    stores = []

    def open_store(url=s3_url, *, deadline_s=20.0, endpoint_url=None, seconds=None, **options):
        given = {"retry_deadline_s": deadline_s, "retry_first_wait_s": 0.01, "retry_max_wait_s": 0.05}
        clock = quick(**{**given, **(seconds or {})})
        options = {"part_size": 8 * MIB, "write_concurrency": 3, **options}
        store = S3Store(url, endpoint_url=endpoint_url or proxy.endpoint_url, clock=clock, **options)
        stores.append(store)
        return store

    yield open_store
    for store in stores:
        store.close()
