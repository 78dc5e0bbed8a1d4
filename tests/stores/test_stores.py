"""Contract of every Store, on real servers, also of another package's; a directory's promises beyond it."""

import errno
import os
import secrets
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fsspec.implementations.local import LocalFileSystem
from support.failing import failing
from support.store_contract import ContentOnDemand, StoreContract

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError, StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import MAX_OBJECT
from tiered_checkpoint_io.model.manifest import FileEntry
from tiered_checkpoint_io.stores import GROUP, open_store
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.stores.remote import RemoteStore
from tiered_checkpoint_io.stores.s3 import MIB, S3Store, part_size_for


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


def test_what_is_above_the_limit_is_refused_and_no_manifest_has_it():
    with pytest.raises(StoreError, match=r"48\.8 TiB"):
        part_size_for(MAX_OBJECT + 1, 8 * MIB)
    largest = {"path": "a", "size": MAX_OBJECT, "chunk_size": MAX_OBJECT, "hashes": ["0" * 32]}
    assert FileEntry.from_json(largest).size == MAX_OBJECT
    with pytest.raises(CorruptCheckpointError, match="size"):
        FileEntry.from_json({**largest, "size": MAX_OBJECT + 1})


KILLED = """
import os, signal, sys
from tiered_checkpoint_io.stores.directory import DirectoryStore
def die(_):
    os.kill(os.getpid(), signal.SIGKILL)
DirectoryStore(sys.argv[1]).upload("folder/x", memoryview(bytes(20 << 20)), progress=die)
"""


def temporary(root):
    folder = root / ".tiered" / "tmp"
    return sorted(folder.iterdir()) if folder.exists() else []


def test_a_killed_writer_leaves_the_old_object_and_nothing_that_lasts(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("folder/x", b"old")
    code = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60).returncode
    assert code == -signal.SIGKILL
    assert store.get("folder/x") == b"old"
    assert [entry.key for entry in store.list("")] == ["folder/x"]
    assert len(temporary(tmp_path)) == 1
    DirectoryStore(str(tmp_path)).put("y", b"1")
    assert temporary(tmp_path) == []


def test_writers_and_deleters_of_one_folder_do_not_disturb_each_other(tmp_path):
    store = DirectoryStore(str(tmp_path))
    failures = []

    def work(number):
        try:
            for _ in range(100):
                store.put(f"a/b/c/{number}", b"1")
                store.delete(f"a/b/c/{number}")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert not (tmp_path / "a").exists()


def test_its_own_folder_is_no_place_for_objects(tmp_path):
    with pytest.raises(ConfigError):
        DirectoryStore(str(tmp_path)).put(".tiered/tmp/x", b"1")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_said_and_not_retried(tmp_path, monkeypatch):
    store = DirectoryStore(str(tmp_path))
    store.put("x", b"old")
    real = os.write
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(full, data))
    with pytest.raises(StoreError, match="No space left") as caught:
        store.put("x", b"new")
    monkeypatch.undo()
    os.close(full)
    assert not caught.value.retryable
    assert store.get("x") == b"old"
    assert temporary(tmp_path) == []


ROOT = Path(__file__).parents[2]
#: The example, and a function that gives no store.
MODULE = (ROOT / "examples/sqlite_store.py").read_text()
BROKEN = """
def no_store(url, config):
    return None
"""


def install(folder, value="acme_store:open_acme", package="acme-store", scheme="acme"):
    """Writes the files that ``pip install`` leaves: a module, and the metadata of a package that names it."""
    folder.mkdir(exist_ok=True)
    (folder / "acme_store.py").write_text(MODULE + BROKEN)
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{scheme} = {value}\n")
    return folder


@pytest.fixture
def site(tmp_path, monkeypatch):
    # Each scheme is looked for once a process.
    site = install(tmp_path / "site", scheme="kept")
    monkeypatch.syspath_prepend(str(site))
    yield site
    sys.modules.pop("acme_store", None)


@pytest.mark.matrix
class TestInstalledStore(StoreContract):
    @pytest.fixture
    def store(self, site, tmp_path):
        store = open_store(TieredCheckpointConfig.from_any(dirpath=f"kept://{tmp_path}/root"))
        assert type(store).__name__ == "AcmeStore"
        yield store
        store.close()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("acme_store:missing", "acme_store:missing of acme-broken, can't be imported"),
        ("acme_store:no_store", "acme_store:no_store of acme-broken gave a NoneType"),
        ("both", "both:// has several stores: acme_store:open_acme of acme-one, acme_store:open_acme of acme-two"),
    ],
)
def test_one_that_can_not_be_used_is_an_error_that_names_its_package(value, said, tmp_path, monkeypatch):
    # Each scheme is looked for once a process.
    scheme = value.rpartition(":")[2].replace("_", "-")
    packages = {"acme-one": "acme_store:open_acme", "acme-two": "acme_store:open_acme"}
    for package, each in packages.items() if value == "both" else [("acme-broken", value)]:
        install(tmp_path / "site", each, package, scheme)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    with pytest.raises(ConfigError) as caught:
        open_store(TieredCheckpointConfig.from_any(dirpath=f"{scheme}://x"))
    sys.modules.pop("acme_store", None)
    assert said in str(caught.value)
