"""What tests against a server share."""

import os

import pytest
from support.fault_proxy import FaultProxy

from tiered_checkpoint_io.testing.servers import S3Server


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
