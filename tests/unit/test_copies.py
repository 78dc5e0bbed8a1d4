"""A name that becomes a copy of another: stopped at any request, and where the store can't copy."""

import contextlib

import pytest
from support.committing import (
    KINDS,
    RUN,
    Journals,
    alias,
    check_story,
    copy,
    delete,
    deleted_under_alias,
    full_part,
    save,
)
from support.sharded import named, objects, readable, views_of

from tiered_checkpoint_io.engine.durable import aliases, commit
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreAccessError, StoreUnavailableError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import newest_first
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.testing.faulty import FaultyStore, Injected

#: Of several files none is made: then it is an alias.
COPIES = {
    "copy": (
        lambda s, k: save(s, "a", 1, kind=k),
        lambda s, k, j: copy(s, "last", "a", 2, j),
        "last",
        (None, 1),
    ),
    "copy moves": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2), save(s, "b", 3, kind=k)],
        lambda s, k, j: copy(s, "last", "b", 4, j),
        "last",
        (1, 3),
    ),
    "copy moves, its target is gone": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2), delete(s, "a"), save(s, "b", 3, kind=k)],
        lambda s, k, j: copy(s, "last", "b", 4, j),
        "last",
        (1, 3),
    ),
    "alias becomes a copy": (
        lambda s, k: [save(s, "a", 1, kind=k), alias(s, "last", "a"), save(s, "b", 3, kind=k)],
        lambda s, k, j: copy(s, "last", "b", 4, j),
        "last",
        (1, 3),
    ),
    "alias becomes a copy, off a deleted target": (
        lambda s, k: [deleted_under_alias(s, k), save(s, "b", 3, kind=k)],
        lambda s, k, j: copy(s, "last", "b", 4, j),
        "last",
        (1, 3),
    ),
    "copy becomes an alias": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2), save(s, "b", 3, kind=k)],
        lambda s, k, j: alias(s, "last", "b", j),
        "last",
        (1, 3),
    ),
    "copy becomes real": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2)],
        lambda s, k, j: save(s, "last", 3, j, kind=k),
        "last",
        (1, 3),
    ),
    "real becomes a copy": (
        lambda s, k: [save(s, "last", 1, kind=k), alias(s, "best", "last"), save(s, "a", 2, kind=k)],
        lambda s, k, j: copy(s, "last", "a", 3, j),
        "best",
        (1, 2),
    ),
    "target of a copy goes": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2)],
        lambda s, k, j: delete(s, "a", j),
        "last",
        (1, 1),
    ),
    "copy goes": (
        lambda s, k: [save(s, "a", 1, kind=k), copy(s, "last", "a", 2)],
        lambda s, k, j: delete(s, "last", j),
        "last",
        (1, None),
    ),
    "copy of a copy": (
        lambda s, k: [save(s, "a", 1, kind="full"), copy(s, "last", "a", 2)],
        lambda s, k, j: copy(s, "other", "last", 3, j),
        "other",
        (None, 1),
    ),
}


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.matrix), "after"])
@pytest.mark.parametrize("kind", ["full", *(pytest.param(kind, marks=pytest.mark.matrix) for kind in KINDS[1:])])
@pytest.mark.parametrize("story", COPIES)
def test_so_it_is_where_a_name_becomes_a_copy(story, kind, when, memory_dir, monkeypatch):
    if kind == "full, indexed":
        monkeypatch.setattr(commit, "_MAX_INLINE", 0)
    check_story(COPIES[story], kind, when, memory_dir)


class Overwriting(DirectoryStore):
    """A store in which another process overwrites ``a`` once, while it is copied."""

    def copy(self, source, target, size, *, check, **options):
        def overwritten():
            if source == "a" and read_manifest(self, "a").content.step == 1:
                part, files = full_part("a", 2)
                commit.commit(DirectoryStore(self.url), part, views_of(files))
            check()

        super().copy(source, target, size, check=overwritten, **options)


def test_a_copy_has_an_id_of_its_own_and_says_of_which_save_it_is(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    copy(store, "last", "a", 2)
    copy(store, "other", "last", 3)
    origin = read_manifest(store, "a").content
    for name, number in (("last", 2), ("other", 3)):
        made = read_manifest(store, name)
        assert (made.alias_of, made.content.save_id) == (None, ids.save_id(RUN, number))
        assert made.content.copy_of == origin.save_id
        assert [(each.path, each.hashes) for each in made.content.files] == [(name, origin.files[0].hashes)]
        assert store.get(name) == store.get("a")
    assert newest_first([made.content, origin]) == [origin, made.content]


def test_what_others_overwrite_while_it_is_copied_is_copied_once_it_stands(tmp_path):
    store = Overwriting(str(tmp_path))
    save(store, "b", 0)
    copy(store, "last", "b", 0)
    save(store, "a", 1)
    journals = Journals()
    with pytest.raises(StoreUnavailableError, match="overwritten"):
        copy(store, "last", "a", 3, journals)
    assert readable(store, "last") == 0
    copy(store, "last", "a", 3, journals)
    assert readable(store, "last") == 2
    assert objects(store) == named(store)


@pytest.mark.parametrize("n", range(1, 12))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_target_that_changes_between_two_tries_leaves_no_mixture(n, when, tmp_path):
    """The first try may have put the older bytes there already, and the manifest that goes with them."""
    store, journals = DirectoryStore(str(tmp_path)), Journals()
    save(store, "b", 1)
    copy(store, "last", "b", 2)
    save(store, "a", 3)
    with contextlib.suppress(Injected):
        copy(FaultyStore(store, fail_at=n, when=when), "last", "a", 4, journals)
    save(store, "a", 5)
    for m in range(1, 20):
        faulty = FaultyStore(store, fail_at=m, when="after")
        with contextlib.suppress(Injected):
            copy(faulty, "last", "a", 4, journals)
        assert readable(store, "last") in (1, 3, 5)
        if faulty.operations < m:
            break
    assert readable(store, "last") in (3, 5)
    assert objects(store) == named(store)
    copy(store, "last", "a", 6)
    assert (readable(store, "last"), read_manifest(store, "last").alias_of) == (5, None)


class Refusing(DirectoryStore):
    """Refuses to copy, as a server that can't."""

    def copy(self, *_, **__):
        raise StoreAccessError("S3 copy failed (AccessDenied, HTTP 403)", operation="copy")


class OfOthers(DirectoryStore):
    """A store that others wrote for an earlier release, which asked for no copies."""

    copy = None


@pytest.mark.parametrize("kind", [Refusing, OfOthers])
@pytest.mark.parametrize("data", ["in memory", "gone", "damaged"])
def test_where_a_store_does_not_copy_the_bytes_in_memory_are_uploaded_or_it_is_an_alias(kind, data, tmp_path):
    store = kind(str(tmp_path))
    save(store, "b", 1)
    alias(store, "last", "b")
    save(store, "a", 2)
    view = {"in memory": memoryview(store.get("a")), "damaged": memoryview(b"?" * store.size("a"))}.get(data)
    assert "cop" in str(copy(store, "last", "a", 3, data=view))
    assert readable(store, "last") == 2
    assert read_manifest(store, "last").alias_of == (None if data == "in memory" else "a")
    assert objects(store) == named(store)


def test_a_request_to_copy_spares_what_was_saved_later(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    save(store, "last", 5)
    copy(store, "last", "a", 4)
    assert readable(store, "last") == 5
    aliases.put_alias(store, "other", "last")
    copy(store, "other", "a", 4)
    assert readable(store, "other") == 5
    for target in ("never", "other"):
        with pytest.raises(CheckpointNotFoundError):
            copy(store, "last", target, 6)
    copy(store, "a", "a", 6)
    assert (readable(store, "a"), readable(store, "last")) == (1, 5)


def test_a_source_whose_object_is_gone_changes_nothing(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    copy(store, "last", "a", 2)
    save(store, "b", 3)
    store.delete("b")
    with pytest.raises(CheckpointNotFoundError, match="missing"):
        copy(store, "last", "b", 4)
    assert readable(store, "last") == 1
