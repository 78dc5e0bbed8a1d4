"""Outages, refusals and empty buckets of Google's and Azure's storage, as gcsfs and adlfs report them.

Neither has a server that runs here, so the file systems are ours, and raise what those libraries raise.
"""

import importlib
import types

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.clocks import quick
from support.failing import failing

from tiered_checkpoint_io.stores.files import reason_of
from tiered_checkpoint_io.stores.remote import RemoteStore


def _error_class(module, name, base=Exception):
    return type(name, (base,), {"__module__": module})


TransportError = _error_class("google.auth.exceptions", "TransportError")
RefreshError = _error_class("google.auth.exceptions", "RefreshError")
ServiceRequestError = _error_class("azure.core.exceptions", "ServiceRequestError")
ServiceResponseError = _error_class("azure.core.exceptions", "ServiceResponseError")
HttpResponseError = _error_class("azure.core.exceptions", "HttpResponseError")


def _forbidden():
    """Raises as gcsfs.retry.validate_response does."""
    module = types.ModuleType("gcsfs.retry")
    exec("def validate_response():\n    raise OSError('Forbidden: https://x\\nno')", module.__dict__)
    module.validate_response()


def _http(status):
    error = HttpResponseError("no")
    error.status_code = status
    return error


def _raised(error, cause=None, context=None):
    """Returns an error as it is caught, with what led to it."""
    try:
        if context is not None:
            try:
                raise context
            except Exception:
                raise error
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "cause", "context", "reason"),
    [
        (TransportError(), None, None, "unavailable"),
        (RefreshError(), TransportError(), None, "unavailable"),
        (RefreshError(), None, None, None),
        (ServiceRequestError(), None, None, "unavailable"),
        (_error_class("azure.core.exceptions", "Timeout", ServiceResponseError)(), None, None, "unavailable"),
        (RuntimeError("Failed to upload block"), ServiceRequestError(), None, "unavailable"),
        (RuntimeError("Failed to upload block"), None, ServiceResponseError(), None),
        (RuntimeError("Failed to upload block"), _http(403), None, "access"),
        (RuntimeError("Failed to upload block"), _raised(OSError(), TimeoutError()), None, "unavailable"),
        (RuntimeError("not in a cache"), None, FileNotFoundError(), None),
        (_http(400), TransportError(), None, None),
        (OSError(28, "full"), None, TimeoutError(), "full"),
        (_http(404), None, None, "missing"),
        (OSError("Forbidden"), None, None, None),
    ],
)
def test_an_error_of_a_cloud_names_its_cause(error, cause, context, reason):
    assert reason_of(_raised(error, cause, context)) == reason


class Cloud(MemoryFileSystem):
    """An object store of which some calls fail."""

    protocol = "gs"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.removeprefix("gs://"))

    def __getattribute__(self, name):
        return type(self).instead.get(name) or super().__getattribute__(name)


def _raising(error):
    def call(*_, **__):
        raise error

    return call


@pytest.fixture
def cloud(monkeypatch):
    cloud = type("Cloud", (Cloud,), {"store": {}, "pseudo_dirs": [""], "instead": {}})
    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "gs", cloud)
    return cloud


def test_an_empty_bucket_that_may_not_be_looked_at_is_an_empty_one(cloud):
    store = RemoteStore("gs://bucket/run", clock=quick(retry_deadline_s=0.5))
    cloud.instead |= {"find": lambda *_, **__: {}, "ls": lambda *_, **__: []}
    # gcsfs without storage.buckets.get; adlfs with rights only on blobs; gcsfs if it is forbidden.
    for info in (_raising(FileNotFoundError("bucket")), _raising(_http(403)), lambda *_, **__: _forbidden()):
        cloud.instead["info"] = info
        assert list(store.list("")) == []
    cloud.instead["cat_file"] = lambda *_, **__: _forbidden()
    with failing("access"):
        store.get("x")
    cloud.instead["info"] = _raising(_http(503))
    with failing("unavailable"):
        list(store.list(""))


def test_a_bucket_that_is_not_there_is_no_empty_one(cloud):
    store = RemoteStore("gs://bucket/run", clock=quick(retry_deadline_s=0.5))
    cloud.instead |= dict.fromkeys(("find", "info", "ls"), _raising(FileNotFoundError("bucket")))
    with failing("config", match="bucket 'bucket' does not exist"):
        list(store.list(""))
