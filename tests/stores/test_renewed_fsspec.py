"""A store at an fsspec URL whose credentials were renewed goes on with the new ones.

The file system is ours: of those that have credentials, none has a server that runs here.
"""

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.clocks import quick
from support.failing import failing

from tiered_checkpoint_io.stores.remote import RemoteStore


class Guarded(MemoryFileSystem):
    protocol = "guarded"
    store, pseudo_dirs = {}, [""]
    #: What a file says, what the server takes, and how often the file was read.
    key, taken, looks = "old", "old", 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        type(self).looks += 1
        self.mine = self.key

    def _check(self):
        if self.mine != self.taken:
            raise PermissionError("refused")

    def cat_file(self, *args, **kwargs):
        self._check()
        return super().cat_file(*args, **kwargs)

    def open(self, *args, **kwargs):
        self._check()
        return super().open(*args, **kwargs)


@pytest.fixture
def guarded(monkeypatch):
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    monkeypatch.setattr(Guarded, "looks", 0)
    return Guarded


def test_what_is_refused_is_asked_for_once_more_with_the_credentials_of_now(guarded, monkeypatch):
    store = RemoteStore("guarded://bucket/run", clock=quick(credentials_again_s=0.0, retry_deadline_s=0.5))
    store.put("a", b"A")
    monkeypatch.setattr(guarded, "taken", "new")
    with failing("access"):
        store.get("a")
    monkeypatch.setattr(guarded, "key", "new")
    store.put("b", b"B")
    assert (store.get("a"), store.get("b")) == (b"A", b"B")
    store.close()


def test_credentials_that_stay_refused_are_not_looked_for_at_each_request(guarded, monkeypatch):
    store = RemoteStore("guarded://bucket/run", clock=quick(credentials_again_s=3600.0, retry_deadline_s=0.5))
    monkeypatch.setattr(guarded, "taken", "new")
    for _ in range(3):
        with failing("access"):
            store.get("a")
    assert guarded.looks == 1
    store.close()
