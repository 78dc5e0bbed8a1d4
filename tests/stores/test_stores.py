"""Every Store keeps the contract, on real servers."""

import errno
import os
import secrets

import pytest
from fsspec.implementations.local import LocalFileSystem
from support.failing import failing
from support.store_contract import ContentOnDemand, StoreContract
from support.supporting import build

from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.model.s3_limits import MAX_OBJECT, MAX_PART, MAX_PARTS, MIN_PART
from tiered_checkpoint_io.stores import open_store
from tiered_checkpoint_io.stores.base import Store
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.stores.remote import RemoteStore
from tiered_checkpoint_io.stores.s3 import MIB, S3Store
from tiered_checkpoint_io.stores.s3_parts import part_size_for


class TestDirectoryStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        yield DirectoryStore(str(tmp_path / "root"))


class TestRemoteStoreInMemory(StoreContract):
    @pytest.fixture
    def store(self):
        import fsspec

        yield RemoteStore(f"memory://{secrets.token_hex(6)}")
        fsspec.filesystem("memory").store.clear()


class TestRemoteStoreThatMoves(StoreContract):
    """A file system without atomic writes goes by another name first."""

    @pytest.fixture
    def store(self, tmp_path):
        yield RemoteStore(f"file://{tmp_path}/root")

    @pytest.mark.parametrize("place", ["root", "root/a"])
    def test_a_folder_that_cannot_be_listed_is_not_taken_for_empty(self, store, place, monkeypatch):
        store.put("a/x", b"1")
        listing = LocalFileSystem.ls

        def refuse(system, path, **options):
            if path.endswith(place):
                raise PermissionError(errno.EACCES, "no")
            return listing(system, path, **options)

        monkeypatch.setattr(LocalFileSystem, "ls", refuse)
        with failing("access"):
            list(store.list(""))


@pytest.mark.matrix
class TestRemoteStoreOnS3(StoreContract):
    """The path of all object stores, by s3fs."""

    @pytest.fixture
    def store(self, s3_url):
        yield RemoteStore(s3_url)

    def test_a_missing_bucket_is_no_empty_one(self, s3_server):
        store = RemoteStore("s3://no-such-bucket-here/run")
        with failing("config", match="no-such-bucket-here"):
            list(store.list(""))
        with failing("config"):
            store.put("x", b"1")


class TestS3Store(StoreContract):
    keeps_conditions = False

    @pytest.fixture
    def store(self, s3_url, s3_server):
        store = S3Store(s3_url, part_size=8 * MIB, write_concurrency=4, endpoint_url=s3_server.endpoint_url)
        yield store
        store.close()

    def test_an_upload_is_one_create_its_parts_and_one_complete(self, store):
        store.upload("x", memoryview(bytes(33 * MIB)))
        counts = store.metrics.snapshot()
        requests = {name: count for name, count in counts.items() if name.startswith("requests.")}
        assert requests == {"requests.create": 1, "requests.part": 5, "requests.complete": 1}

    def test_holds_as_many_parts_of_its_content_as_it_sends_at_once(self, store):
        content = ContentOnDemand(os.urandom(40 * MIB))
        store.upload("x", content)
        assert content.peak <= 4 * 8 * MIB


@pytest.mark.parametrize("size", [1, 64 * MIB, 700 << 30, 48 << 40, MAX_OBJECT])
def test_part_sizes_stay_within_the_limits(size):
    part = part_size_for(size, 8 * MIB)
    assert -(-size // part) <= MAX_PARTS
    assert MIN_PART <= part <= MAX_PART


def test_what_is_above_the_limit_is_refused_and_no_manifest_has_it():
    with pytest.raises(StoreError, match=r"48\.8 TiB"):
        part_size_for(MAX_OBJECT + 1, 8 * MIB)
    largest = {"path": "a", "size": MAX_OBJECT, "chunk_size": MAX_OBJECT, "hashes": ["0" * 32]}
    assert FileEntry.from_json(largest).size == MAX_OBJECT
    with pytest.raises(CorruptCheckpointError, match="size"):
        FileEntry.from_json({**largest, "size": MAX_OBJECT + 1})


def test_open_store_picks_by_url(tmp_path, s3_url, s3_server):
    urls = {str(tmp_path): DirectoryStore, s3_url: S3Store, "memory://x/y": RemoteStore}
    for url, kind in urls.items():
        store = open_store(build(TieredCheckpointConfig, dirpath=url, drain="thread"))
        assert type(store) is kind
        assert isinstance(store, Store)
        store.close()
