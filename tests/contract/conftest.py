"""What tests against a server share."""

import pytest
from support.fault_proxy import FaultProxy


@pytest.fixture
def proxy(s3_server):
    """Between the test and the server: it fails, delays or refuses what the test says."""
    with FaultProxy(s3_server.endpoint_url) as proxy:
        yield proxy
