"""The durable protocol: killed before any of its writes, a reader finds old or new, and a rerun ends it."""

import contextlib
import itertools
import time
from dataclasses import replace

import pytest
from support.restoring import of_a_newer_release

from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, FormatVersionError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import Content, FileEntry, Part
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.testing.contract import MemoryJournal
from tiered_checkpoint_io.testing.faulty import FaultyStore, Injected

RUN = ids.new_run_id()


def part_of(name, data, number):
    entry = FileEntry(name, len(data), 16 << 20, (hash_bytes(data),))
    content = Content(ids.save_id(RUN, number), number, 0, "full", 1.0, 1, {}, (entry,))
    return Part(name, 0, content, "d", True)


def save(store, name, data, number, journal=None):
    return commit.commit_full(store, part_of(name, data, number), memoryview(data), journal=journal)


def readable(store, name):
    """What a reader makes of a name: the content whose hashes the object matches; None if absent."""
    manifest = commit.read_manifest(store, name)
    if manifest is None:
        return None
    if manifest.alias_of and (target := commit.read_manifest(store, manifest.alias_of)):
        manifest = target
    for content in (manifest.content, *manifest.previous):
        (entry,) = content.files
        data = store.get(entry.path)
        if len(data) == entry.size and hash_bytes(data) == entry.hashes[0]:
            return data
    raise AssertionError(f"{name} matches none of its contents")


def objects(store):
    return sorted(entry.key for entry in store.list("") if not entry.key.startswith(".tiered/"))


def deleted_under_alias(store):
    save(store, "a.ckpt", b"A", 1)
    commit.put_alias(store, "last.ckpt", "a.ckpt")
    commit.delete(store, "a.ckpt", journal=MemoryJournal())
    return []


STORIES = {
    "overwrite": (
        lambda s: save(s, "a.ckpt", b"old", 1),
        lambda s, j: save(s, "a.ckpt", b"new!", 2, j),
        "a.ckpt",
        (b"old", b"new!"),
    ),
    "first": (lambda s: None, lambda s, j: save(s, "a.ckpt", b"new!", 2, j), "a.ckpt", (None, b"new!")),
    "delete": (
        lambda s: save(s, "a.ckpt", b"old", 1),
        lambda s, j: commit.delete(s, "a.ckpt", journal=j),
        "a.ckpt",
        (b"old", None),
    ),
    "alias": (
        lambda s: [save(s, "a.ckpt", b"A", 1), commit.put_alias(s, "last.ckpt", "a.ckpt"), save(s, "b.ckpt", b"BB", 2)],
        lambda s, j: commit.put_alias(s, "last.ckpt", "b.ckpt", journal=j),
        "last.ckpt",
        (b"A", b"BB"),
    ),
    "alias becomes real": (
        lambda s: [save(s, "a.ckpt", b"A", 1), commit.put_alias(s, "last.ckpt", "a.ckpt")],
        lambda s, j: save(s, "last.ckpt", b"real", 3, j),
        "last.ckpt",
        (b"A", b"real"),
    ),
    "real becomes alias": (
        lambda s: [save(s, "last.ckpt", b"real", 1), save(s, "a.ckpt", b"A", 2)],
        lambda s, j: commit.put_alias(s, "last.ckpt", "a.ckpt", journal=j),
        "last.ckpt",
        (b"real", b"A"),
    ),
    "real with an alias becomes alias": (
        lambda s: [
            save(s, "last.ckpt", b"real", 1),
            commit.put_alias(s, "best.ckpt", "last.ckpt"),
            save(s, "a.ckpt", b"A", 2),
        ],
        lambda s, j: commit.put_alias(s, "last.ckpt", "a.ckpt", journal=j),
        "best.ckpt",
        (b"real", b"A"),
    ),
    "alias moves off a deleted target": (
        lambda s: [*deleted_under_alias(s), save(s, "b.ckpt", b"BB", 2)],
        lambda s, j: commit.put_alias(s, "last.ckpt", "b.ckpt", journal=j),
        "last.ckpt",
        (b"A", b"BB"),
    ),
    "alias becomes real, off a deleted target": (
        deleted_under_alias,
        lambda s, j: save(s, "last.ckpt", b"real", 3, j),
        "last.ckpt",
        (b"A", b"real"),
    ),
    "alias of a deleted target goes": (
        deleted_under_alias,
        lambda s, j: commit.delete(s, "last.ckpt", journal=j),
        "last.ckpt",
        (b"A", None),
    ),
    "target goes, alias stays": (
        lambda s: [save(s, "a.ckpt", b"A", 1), commit.put_alias(s, "last.ckpt", "a.ckpt"), save(s, "a.ckpt", b"AA", 2)],
        lambda s, j: commit.delete(s, "a.ckpt", journal=j),
        "last.ckpt",
        (b"AA", b"AA"),
    ),
    "a deleted target is saved anew under its alias": (
        deleted_under_alias,
        lambda s, j: save(s, "a.ckpt", b"AA", 3, j),
        "last.ckpt",
        (b"A", b"AA"),
    ),
}


@pytest.mark.parametrize("story", STORIES)
def test_killed_at_any_write_old_or_new_and_a_rerun_finishes(story, tmp_path):
    prepare, act, name, (old, new) = STORIES[story]
    whole = DirectoryStore(str(tmp_path / "whole"))
    prepare(whole)
    act(whole, MemoryJournal())
    for n in itertools.count(1):
        store = DirectoryStore(str(tmp_path / str(n)))
        prepare(store)
        journal = MemoryJournal()
        faulty = FaultyStore(store, fail_at=n)
        try:
            act(faulty, journal)
        except Injected:
            assert readable(store, name) in (old, new)
            act(store, journal)
            assert readable(store, name) == new
            assert objects(store) == objects(whole)
            assert journal.read() is None
        else:
            assert n > 2
            assert readable(store, name) == new
            break
    assert faulty.operations < n


def test_the_objects_of_a_deleted_target_go_when_the_alias_moves_on(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    commit.put_alias(store, "last.ckpt", "a.ckpt")
    commit.put_alias(store, "keep.ckpt", "a.ckpt")
    commit.delete(store, "a.ckpt", journal=MemoryJournal())
    assert commit.read_manifest(store, "a.ckpt") is None
    assert readable(store, "last.ckpt") == b"A"
    save(store, "b.ckpt", b"B", 2)
    commit.put_alias(store, "last.ckpt", "b.ckpt")
    assert readable(store, "keep.ckpt") == b"A"
    commit.delete(store, "keep.ckpt", journal=MemoryJournal())
    assert objects(store) == ["b.ckpt"]


def test_an_alias_follows_a_target_that_is_overwritten(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"1", 1)
    commit.put_alias(store, "last.ckpt", "a.ckpt")
    save(store, "a.ckpt", b"22", 2)
    assert readable(store, "last.ckpt") == b"22"
    assert commit.read_manifest(store, "a.ckpt").aliases == ("last.ckpt",)


def test_corrupt_bytes_never_replace_good_ones(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"good", 1)
    with pytest.raises(CorruptCheckpointError):
        commit.commit_full(store, part_of("a.ckpt", b"next", 2), memoryview(b"nexT"))
    assert readable(store, "a.ckpt") == b"good"
    assert not commit.read_manifest(store, "a.ckpt").previous


def test_a_second_commit_of_the_same_save_does_nothing(tmp_path):
    store = DirectoryStore(str(tmp_path))
    assert save(store, "a.ckpt", b"x", 1) == "written"
    before = store.metrics.snapshot()
    assert save(store, "a.ckpt", b"x", 1) == "there"
    assert store.metrics.snapshot()["requests.put"] == before["requests.put"]


def test_an_alias_to_nothing_is_refused_and_the_old_one_stays(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    commit.put_alias(store, "last.ckpt", "a.ckpt")
    with pytest.raises(CheckpointNotFoundError):
        commit.put_alias(store, "last.ckpt", "never.ckpt")
    assert readable(store, "last.ckpt") == b"A"


def test_a_delete_spares_a_later_save(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"later", 5)
    commit.delete(store, "a.ckpt", before=ids.save_id(RUN, 4), journal=MemoryJournal())
    assert readable(store, "a.ckpt") == b"later"


def test_what_a_newer_release_wrote_is_left_alone(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"x", 1)
    key = ids.manifest_key("a.ckpt")
    newer = of_a_newer_release(store.get(key))
    store.put(key, newer)
    for act in (
        lambda: save(store, "a.ckpt", b"y", 2),
        lambda: commit.delete(store, "a.ckpt", journal=MemoryJournal()),
        lambda: commit.put_alias(store, "last.ckpt", "a.ckpt"),
    ):
        with pytest.raises(FormatVersionError, match="upgrade"):
            act()
    assert store.get(key) == newer
    assert store.get("a.ckpt") == b"x"


def test_a_target_saved_anew_keeps_its_alias_when_it_goes_again(tmp_path):
    store = DirectoryStore(str(tmp_path))
    deleted_under_alias(store)
    save(store, "a.ckpt", b"AA", 3)
    commit.delete(store, "a.ckpt", journal=MemoryJournal())
    assert readable(store, "last.ckpt") == b"AA"


def test_an_alias_to_itself_changes_nothing(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    commit.put_alias(store, "a.ckpt", "a.ckpt")
    assert readable(store, "a.ckpt") == b"A"
    assert commit.read_manifest(store, "a.ckpt").alias_of is None


def test_an_alias_request_spares_a_later_save_of_its_name(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    save(store, "last.ckpt", b"later", 5)
    commit.put_alias(store, "last.ckpt", "a.ckpt", before=ids.save_id(RUN, 4))
    assert readable(store, "last.ckpt") == b"later"


def test_an_alias_request_that_was_left_over_spares_an_alias_of_a_later_save(tmp_path):
    """As one of a dead run, on a node that comes back when the job has long gone on elsewhere."""
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    save(store, "b.ckpt", b"BB", 3)
    commit.put_alias(store, "last.ckpt", "b.ckpt", before=ids.save_id(RUN, 4))
    commit.put_alias(store, "last.ckpt", "a.ckpt", before=ids.save_id(RUN, 2))
    assert readable(store, "last.ckpt") == b"BB"
    commit.put_alias(store, "last.ckpt", "a.ckpt", before=ids.save_id(RUN, 5))
    assert readable(store, "last.ckpt") == b"A"


@pytest.mark.parametrize("n", range(1, 7))
def test_a_delete_tried_again_spares_what_took_the_name_in_between(n, tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a.ckpt", b"A", 1)
    journal = MemoryJournal()
    with contextlib.suppress(Injected):
        commit.delete(FaultyStore(store, fail_at=n), "a.ckpt", before=ids.save_id(RUN, 2), journal=journal)
    save(store, "a.ckpt", b"anew", 3)
    commit.delete(store, "a.ckpt", before=ids.save_id(RUN, 2), journal=journal)
    assert readable(store, "a.ckpt") == b"anew"


def test_a_file_that_never_became_a_checkpoint_is_removed_by_its_name(tmp_path):
    store = DirectoryStore(str(tmp_path))
    store.put("left.ckpt", b"upload without a manifest")
    commit.delete(store, "left.ckpt", journal=MemoryJournal())
    deleted_under_alias(store)
    commit.delete(store, "a.ckpt", journal=MemoryJournal())
    assert readable(store, "last.ckpt") == b"A"
    assert objects(store) == ["a.ckpt"]


def test_a_save_that_a_later_one_of_its_run_has_gone_past_leaves_that_one_alone(tmp_path):
    """As one that waits in node memory while its successor, for which there was no room, was uploaded directly."""
    store = DirectoryStore(str(tmp_path))
    assert save(store, "last.ckpt", b"newer", 2) == "written"
    assert save(store, "last.ckpt", b"older", 1) == "replaced"
    assert readable(store, "last.ckpt") == b"newer"
    # Clocks of different runs may disagree: there, who comes last has the name, but for what was left over.
    other = part_of("last.ckpt", b"rerun", 1)
    old_run = "20200101T000000.000000-00000000"
    left_over = replace(other, content=replace(other.content, save_id=ids.save_id(old_run, 1)))
    assert commit.commit_full(store, left_over, memoryview(b"rerun")) == "replaced"
    assert readable(store, "last.ckpt") == b"newer"
    other = replace(left_over, content=replace(left_over.content, created=time.time()))
    assert commit.commit_full(store, other, memoryview(b"rerun")) == "written"
    assert readable(store, "last.ckpt") == b"rerun"
