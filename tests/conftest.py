"""Fixtures shared by all tests: a real S3 server, fresh buckets, private folders on tmpfs."""

import contextlib
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import settings
from support.clocks import LOOKS, hurry
from support.fault_proxy import FaultProxy
from support.launch import zygote_pids
from support.rclone_server import RcloneServer, S3Server
from support.warm import warm_up

S3_FIXTURES = {"s3_server", "s3_bucket", "s3_url"}
#: A process that a test has ended may need a moment to be gone, on a busy machine.
GONE_S = 30.0
#: Variables by which Lightning takes a process for one of a launcher, and starts no further ranks.
LAUNCHED = ("GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "RANK", "WORLD_SIZE")

# The workers take all cores: threads that torch would add on each of them mostly wait for each other, and spin.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")
# On a busy machine any example may take long, and says nothing about the code. The same examples in each run.
settings.register_profile("busy", deadline=None, derandomize=True)
settings.load_profile("busy")
hurry(**LOOKS)


def pytest_collection_finish():
    warm_up()


def pytest_collection_modifyitems(items):
    for item in items:
        if S3_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("s3")


@pytest.fixture(scope="session")
def _server():
    """One server per worker; another one by TIERED_TEST_S3_ENDPOINT, _KEY and _SECRET."""
    endpoint = os.environ.get("TIERED_TEST_S3_ENDPOINT")
    if endpoint:
        yield S3Server(endpoint, os.environ["TIERED_TEST_S3_KEY"], os.environ["TIERED_TEST_S3_SECRET"])
        return
    folder = tempfile.mkdtemp(prefix="tiered-s3-", dir="/dev/shm")
    try:
        with RcloneServer(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def warned(caplog):
    """In a block of ``warned(match)`` our log warns of it; returns the texts, once the block has ended."""

    @contextlib.contextmanager
    def warned(match):
        before, said = len(caplog.records), []
        yield said
        texts = [each.getMessage() for each in caplog.records[before:] if each.levelno == logging.WARNING]
        said += [each for each in texts if re.search(match, each)]
        assert said, texts

    return warned


@pytest.fixture
def use_server(monkeypatch):
    """Has the environment name a server, its keys, and nothing else of AWS."""

    def use(server):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.delenv(name)
        for name, value in server.env().items():
            monkeypatch.setenv(name, value)
        return server

    return use


@pytest.fixture
def s3_server(_server, use_server):
    return use_server(_server)


@pytest.fixture
def s3_bucket(s3_server):
    """The name of an empty bucket, removed afterwards."""
    name = f"test-{secrets.token_hex(6)}"
    s3_server.make_bucket(name)
    yield name
    s3_server.remove_bucket(name)


@pytest.fixture(scope="session")
def _shared_bucket(_server):
    name = f"test-{secrets.token_hex(6)}"
    _server.make_bucket(name)
    yield name
    _server.remove_bucket(name)


@pytest.fixture
def s3_url(s3_server, _shared_bucket):
    """An empty prefix, emptied again afterwards."""
    prefix = f"{secrets.token_hex(6)}/run"
    yield f"s3://{_shared_bucket}/{prefix}"
    s3_server.empty(_shared_bucket, prefix)


@pytest.fixture
def proxy(s3_server):
    """Between the test and the server: it fails, delays or refuses what the test says."""
    with FaultProxy(s3_server.endpoint_url) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def moto():
    """A server that copies parts, and takes a real MD5 for their ETag, as S3 does and rclone does not."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield S3Server(f"http://{host}:{port}", "testing", "testing")
    server.stop()


@pytest.fixture
def bucket(moto):
    name = f"copies-{os.urandom(6).hex()}"
    moto.make_bucket(name)
    yield name
    moto.remove_bucket(name)


@contextlib.contextmanager
def folder_on_tmpfs():
    folder = tempfile.mkdtemp(prefix="tiered-test-", dir="/dev/shm")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def memory_dir():
    with folder_on_tmpfs() as folder:
        yield folder


@pytest.fixture
def durable_dir():
    """A durable tier in a directory, on tmpfs: there it takes no time to have a write on the disk."""
    with folder_on_tmpfs() as folder:
        yield f"{folder}/durable"


@pytest.fixture
def kept(tmp_path, memory_dir):
    """A job with a checkpoint in a directory and in memory, which both hold it at the end as well."""
    # Here, for the process that only hands out tests to others would import torch and Lightning, too.
    from support.bad_input import Kept

    kept = Kept(tmp_path / "kept", memory_dir)
    yield kept
    kept.close()
    kept.still_loads()


@pytest.fixture
def start(tmp_path, memory_dir):
    """Makes IOs, by default of one job on one node; closed at the end, if the test does not."""
    from support.supporting import build

    from tiered_checkpoint_io import TieredCheckpointIO

    made = []

    def start(**options):
        where = {"dirpath": str(tmp_path / "durable"), "memory_dir": memory_dir}
        ways = {"drain": "thread", "on_save_error": "raise", "wait_timeout_s": 60}
        made.append(build(TieredCheckpointIO, **{**where, **ways, **options}))
        return made[-1]

    yield start
    for io in made:
        io.teardown()


@pytest.fixture(autouse=True, scope="session")
def temporary_folder(tmp_path_factory):
    """Sets the system's temporary folder, to which parts are spilled, to one of this session."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        yield folder


@pytest.fixture(autouse=True)
def _no_launcher_is_left():
    """A Trainer with DDP sets them in its own process, and never takes them back."""
    before = {name: os.environ.get(name) for name in LAUNCHED}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(autouse=True)
def _no_child_is_left():
    before = set(children(os.getpid()))
    yield
    deadline = time.monotonic() + GONE_S
    while left := left_behind(before):
        if time.monotonic() > deadline:
            raise AssertionError(f"processes left behind: {left}")
        time.sleep(0.02)


def left_behind(before):
    """Children that are new and will not go by themselves, as text."""
    left = []
    for pid in set(children(os.getpid())) - before - zygote_pids():
        line = command_line(pid)
        # The session's own server, and helpers of multiprocessing, stay for later tests; so does MPI's, which is started
        # by Lightning's question whether there is MPI.
        if line and not any(each in line for each in ("serve s3", "multiprocessing", "torch", "orted")):
            left.append(f"{pid}: {line}")
    return left


def children(pid):
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
