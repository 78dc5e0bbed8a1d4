"""The protocol of parts: killed before any of its requests, a reader finds old or new, whole, and a rerun ends it."""

import itertools

import pytest
from support.sharded import FlatStore, bytes_of, make_part, readable, views_of

from tiered_checkpoint_io.engine.durable import commit, commit_sharded
from tiered_checkpoint_io.errors import CorruptCheckpointError, ManifestError, StoreError, UsageError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.hashing import hash_bytes
from tiered_checkpoint_io.model.manifest import METADATA, Content, FileEntry, Part
from tiered_checkpoint_io.stores.directory import DirectoryStore
from tiered_checkpoint_io.testing.contract import MemoryJournal
from tiered_checkpoint_io.testing.faulty import FaultyStore, Injected

RUN = "20260101T000000.000000-00000000"
LATER = "20260102T000000.000000-00000000"


class Journals:
    """The journals of one story, by what they belong to."""

    def __init__(self):
        self._all = {}

    def of(self, *what):
        return self._all.setdefault(what, MemoryJournal())

    def left(self):
        return [what for what, journal in self._all.items() if journal.read() is not None]


def save(store, name, number, journals=None, **options):
    """All ranks' drains, one after the other, that of the coordinator last, and last of all what is left of others."""
    journals = journals or Journals()
    world_size = options.get("world_size", 2)
    for rank in reversed(range(world_size)):
        part, files = make_part(name, number, rank, **options)
        journal = journals.of(name, number, rank)
        fate = commit_sharded.put_part(store, part, views_of(files), journal=journal)
        if part.commits and fate != "replaced":
            parts = commit_sharded.arrived(store)
            assert fate == "committed" or not commit_sharded.missing_ranks(part, parts)
            commit_sharded.commit_parts(store, part, views_of(files), journal=journal)
            commit_sharded.collect(store, part, parts, patience_s=3600)
        elif not part.commits:
            # Its drain ends here: the part is marked.
            journal.clear() if fate == "committed" else None


def part_only(store, name, number, rank, **options):
    part, files = make_part(name, number, rank, **options)
    assert commit_sharded.put_part(store, part, views_of(files), journal=MemoryJournal()) == "sent"


def save_full(store, name, number, journals=None):
    data = bytes_of(number, 0, "full")
    entry = FileEntry(name, len(data), 16 << 20, (hash_bytes(data),))
    content = Content(ids.save_id(RUN, number), number, 0, "full", 1.0, 1, {}, (entry,))
    journal = journals.of(name, number) if journals else None
    commit.commit_full(store, Part(name, 0, content, "d", True), memoryview(data), journal=journal)


def alias(store, name, target, journals=None):
    commit.put_alias(store, name, target, journal=(journals or Journals()).of("alias", name, target))


def delete(store, name, journals=None):
    commit.delete(store, name, journal=(journals or Journals()).of("delete", name))


def objects(store):
    return sorted(entry.key for entry in store.list("") if not entry.key.startswith(ids.MANIFEST_PREFIX))


def files(name, *numbers, suffix=""):
    return [f"{name}/{basename}" for basename in (".metadata", *(f"__{n}{suffix}.distcp" for n in numbers))]


TWO = ("0_0", "0_1", "1_0", "1_1")

#: What was there, what is done, and which saves a reader may find under which name before and after.
STORIES = {
    "first": (lambda s: None, lambda s, j: save(s, "a", 2, j), "a", (None, 2), files("a", *TWO)),
    "overwrite": (
        lambda s: save(s, "a", 1),
        lambda s, j: save(s, "a", 2, j, suffix="-00000002"),
        "a",
        (1, 2),
        files("a", *TWO, suffix="-00000002"),
    ),
    "overwrite by fewer ranks": (
        lambda s: save(s, "a", 1, world_size=3),
        lambda s, j: save(s, "a", 2, j, world_size=1, suffix="-00000002"),
        "a",
        (1, 2),
        files("a", "0_0", "0_1", suffix="-00000002"),
    ),
    "full becomes sharded": (
        lambda s: save_full(s, "a", 1),
        lambda s, j: save(s, "a", 2, j, suffix="-00000002"),
        "a",
        (1, 2),
        files("a", *TWO, suffix="-00000002"),
    ),
    "sharded becomes full": (lambda s: save(s, "a", 1), lambda s, j: save_full(s, "a", 2, j), "a", (1, 2), ["a"]),
    "sharded becomes local": (
        lambda s: save(s, "a", 1),
        lambda s, j: save(s, "a", 2, j, kind="local", suffix="-00000002"),
        "a",
        (1, 2),
        files("a", *TWO, suffix="-00000002")[1:],
    ),
    "local over local": (
        lambda s: save(s, "a", 1, kind="local"),
        lambda s, j: save(s, "a", 2, j, kind="local", suffix="-00000002"),
        "a",
        (1, 2),
        files("a", *TWO, suffix="-00000002")[1:],
    ),
    "delete": (lambda s: save(s, "a", 1), lambda s, j: delete(s, "a", j), "a", (1, None), []),
    "alias moves": (
        lambda s: [save(s, "a", 1), alias(s, "last", "a"), save(s, "b", 2)],
        lambda s, j: alias(s, "last", "b", j),
        "last",
        (1, 2),
        files("a", *TWO) + files("b", *TWO),
    ),
    "real becomes alias": (
        lambda s: [save(s, "last", 1), save(s, "a", 2)],
        lambda s, j: alias(s, "last", "a", j),
        "last",
        (1, 2),
        files("a", *TWO),
    ),
    "alias becomes real": (
        lambda s: [save(s, "a", 1), alias(s, "last", "a")],
        lambda s, j: save(s, "last", 2, j),
        "last",
        (1, 2),
        files("a", *TWO) + files("last", *TWO),
    ),
    "target goes, alias stays": (
        lambda s: [save(s, "a", 1), alias(s, "last", "a")],
        lambda s, j: delete(s, "a", j),
        "last",
        (1, 1),
        files("a", *TWO),
    ),
    "alias moves off a deleted target": (
        lambda s: [save(s, "a", 1), alias(s, "last", "a"), delete(s, "a"), save(s, "b", 2)],
        lambda s, j: alias(s, "last", "b", j),
        "last",
        (1, 2),
        files("b", *TWO),
    ),
    "a deleted target is saved anew under its alias": (
        lambda s: [save(s, "a", 1), alias(s, "last", "a"), delete(s, "a")],
        lambda s, j: save(s, "a", 2, j, suffix="-00000002"),
        "last",
        (1, 2),
        files("a", *TWO, suffix="-00000002"),
    ),
    "what never became whole is cleared up": (
        lambda s: [save(s, "a", 1), part_only(s, "a", 2, 1, suffix="-00000002"), part_only(s, "b", 3, 1)],
        lambda s, j: save(s, "a", 4, j, suffix="-00000004"),
        "a",
        (1, 4),
        files("a", *TWO, suffix="-00000004"),
    ),
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("story", STORIES)
def test_killed_at_any_request_old_or_new_and_a_rerun_finishes(story, when, memory_dir):
    prepare, act, name, (old, new), left = STORIES[story]
    for n in itertools.count(1):
        store = FlatStore(f"{memory_dir}/{n}")
        prepare(store)
        assert readable(store, name) == old
        journals = Journals()
        faulty = FaultyStore(store, fail_at=n, when=when)
        try:
            act(faulty, journals)
        except Injected:
            assert readable(store, name) in (old, new)
            act(store, journals)
        else:
            assert n > 2
            assert faulty.operations < n
            break
        finally:
            assert readable(store, name) in (old, new)
        assert readable(store, name) == new
        assert objects(store) == sorted(left)
    assert readable(store, name) == new
    assert objects(store) == sorted(left)
    assert all(what[-1] == 1 for what in journals.left()), "but for those of parts that their drain has marked"


def test_a_first_save_and_an_overwrite_in_a_directory(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "deep/a.ckpt", 1)
    save(store, "deep/a.ckpt", 2, suffix="-00000002")
    assert readable(store, "deep/a.ckpt") == 2
    assert objects(store) == sorted(files("deep/a.ckpt", *TWO, suffix="-00000002"))


def test_a_directory_says_that_it_cannot_hold_a_file_and_a_folder_of_one_name(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save_full(store, "a", 1)
    with pytest.raises(StoreError, match="cannot have the same name"):
        save(store, "a", 2, suffix="-2")
    assert readable(store, "a") == 1


def test_the_files_of_the_old_content_are_never_written_to(tmp_path):
    store = FlatStore(str(tmp_path))
    save(store, "a", 1)
    alias(store, "last", "a")
    for prepare in (lambda: None, lambda: delete(store, "a")):
        prepare()
        with pytest.raises(UsageError, match="belongs to the checkpoint that this save is to replace"):
            save(store, "a", 2)
        assert readable(store, "last") == 1


def test_an_alias_follows_a_target_that_is_overwritten_and_outlives_it(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    alias(store, "last", "a")
    save(store, "a", 2, suffix="-2")
    assert readable(store, "last") == 2
    delete(store, "a")
    assert readable(store, "a") is None
    assert readable(store, "last") == 2


def test_corrupt_bytes_reach_nothing(tmp_path):
    store = DirectoryStore(str(tmp_path))
    part, data = make_part("a", 1, 0)
    for basename in data:
        bad = {**data, basename: data[basename][:-1] + bytes([data[basename][-1] ^ 1])}
        with pytest.raises(CorruptCheckpointError):
            commit_sharded.put_part(store, part, views_of(bad), journal=MemoryJournal())
    assert objects(store) == []


def test_metadata_that_spoils_while_it_waits_replaces_nothing(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    part_only(store, "a", 2, 1, suffix="-2")
    part, data = make_part("a", 2, 0, suffix="-2")
    journal = MemoryJournal()
    commit_sharded.put_part(store, part, views_of(data), journal=journal)
    with pytest.raises(CorruptCheckpointError):
        commit_sharded.commit_parts(store, part, views_of({**data, METADATA: b"x" * 1502}), journal=journal)
    assert readable(store, "a") == 1
    assert not commit.read_manifest(store, "a").previous


def test_a_part_that_arrived_is_not_sent_again_and_one_that_is_not_needed_not_at_all(tmp_path):
    store = DirectoryStore(str(tmp_path))
    part, data = make_part("a", 1, 1)
    journal = MemoryJournal()
    broken = FaultyStore(store, fail_at=2, only=lambda operation, key: operation == "upload")
    with pytest.raises(Injected):
        commit_sharded.put_part(broken, part, views_of(data), journal=journal)
    before = store.metrics.snapshot()["bytes.up"]
    for _ in range(2):
        assert commit_sharded.put_part(store, part, views_of(data), journal=journal) == "sent"
    second = part.content.files[1].size
    assert store.metrics.snapshot()["bytes.up"] - before == second + len(part.to_json()), "one file, once"
    save(store, "a", 1)
    assert commit_sharded.put_part(store, part, views_of(data), journal=MemoryJournal()) == "committed"
    save(store, "a", 3, suffix="-3")
    assert commit_sharded.put_part(store, part, views_of(data), journal=MemoryJournal()) == "replaced"
    assert objects(store) == sorted(files("a", *TWO, suffix="-3"))


def test_only_all_ranks_make_a_checkpoint(tmp_path):
    store = DirectoryStore(str(tmp_path))
    part_only(store, "a", 1, 0, world_size=4)
    part_only(store, "a", 1, 2, world_size=4)
    part_only(store, "a", 2, 1, world_size=4)
    part_only(store, "b", 1, 1, world_size=4)
    part, data = make_part("a", 1, 0, world_size=4)
    assert commit_sharded.missing_ranks(part, commit_sharded.arrived(store)) == [1, 3]
    with pytest.raises(StoreError):
        commit_sharded.commit_parts(store, part, views_of(data), journal=MemoryJournal())
    assert readable(store, "a") is None


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_that_is_not_there_as_sent_keeps_the_checkpoint_from_being(damage, tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    part_only(store, "a", 2, 1, suffix="-2")
    part, data = make_part("a", 2, 0, suffix="-2")
    journal = MemoryJournal()
    commit_sharded.put_part(store, part, views_of(data), journal=journal)
    store.delete("a/__1_1-2.distcp") if damage == "gone" else store.put("a/__1_1-2.distcp", b"x")
    with pytest.raises(StoreError, match="of a file are there, in place of"):
        commit_sharded.commit_parts(store, part, views_of(data), journal=journal)
    assert readable(store, "a") == 1


@pytest.mark.parametrize(
    "hostile",
    [
        lambda text: text.replace(b'"a/__1_1.distcp"', b'"b/__0_0.distcp"'),
        lambda text: text.replace(b'"rank": 1', b'"rank": 2'),
        lambda text: text[:-20],
    ],
)
def test_a_damaged_description_commits_nothing_and_removes_nothing_of_others(hostile, tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "b", 1)
    part_only(store, "a", 2, 1)
    key = ids.part_key("a", ids.save_id(RUN, 2), 1)
    store.put(key, hostile(store.get(key)))
    part, data = make_part("a", 2, 0)
    journal = MemoryJournal()
    commit_sharded.put_part(store, part, views_of(data), journal=journal)
    with pytest.raises(ManifestError):
        commit_sharded.commit_parts(store, part, views_of(data), journal=journal)
    save(store, "c", 3)
    assert readable(store, "b") == 1
    assert not [key for key in objects(store) if key.startswith(ids.PART_PREFIX)]


def test_garbage_of_other_runs_is_left_alone_until_nothing_of_it_moves(tmp_path):
    store = DirectoryStore(str(tmp_path))
    part_only(store, "a", 1, 1)
    part_only(store, "same", 2, 1)
    part_only(store, "busy", 3, 1)
    part_only(store, "future", 9, 1, run="20270101T000000.000000-00000000")
    committed, data = make_part("b", 1, 0, world_size=1, run=LATER)
    commit_sharded.put_part(store, committed, views_of(data), journal=MemoryJournal())
    parts = commit_sharded.arrived(store)
    assert commit_sharded.collect(store, committed, parts, patience_s=3600) == []
    aged = [commit_sharded.Arrived(e.key, e.modified - 4000 * (e.key.save_id < LATER)) for e in parts]
    gone = commit_sharded.collect(store, committed, aged, patience_s=3600, busy={"busy"})
    assert sorted(key.name for key in gone) == ["a", "same"]
    assert {key.split("/")[0] for key in objects(store)} == {"b", "busy", "future", ".tiered"}


def test_garbage_never_takes_what_a_checkpoint_names(tmp_path):
    """A save that died, and one of another run that gave its files the same names."""
    store = DirectoryStore(str(tmp_path))
    part_only(store, "a", 1, 1)
    save(store, "a", 1, run=LATER)
    committed, data = make_part("b", 2, 0, world_size=1, run=LATER)
    commit_sharded.put_part(store, committed, views_of(data), journal=MemoryJournal())
    gone = commit_sharded.collect(store, committed, commit_sharded.arrived(store), patience_s=-1)
    assert [key.save_id for key in gone] == [ids.save_id(RUN, 1)]
    assert readable(store, "a") == 1


def test_how_much_it_asks(tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    before = store.metrics.snapshot()
    save(store, "b", 2)
    after = store.metrics.snapshot()
    assert after["requests.list"] - before["requests.list"] == 2, "one look, one check"
    assert after["requests.put"] - before["requests.put"] == 4 + 1 + 2 + 1, "files, .metadata, parts, manifest"
