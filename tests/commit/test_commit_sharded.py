"""Parts of a checkpoint on the durable tier: what is refused, what is not sent twice, and what is cleared up."""

import functools

import pytest
from support import committing
from support.committing import delete, swept
from support.faulty import FaultyStore, Injected
from support.sharded import make_part, named, objects, readable, views_of
from support.store_contract import MemoryJournal

from tiered_checkpoint_io.engine.durable import commit
from tiered_checkpoint_io.engine.durable.files import Arrivals, files_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import CorruptCheckpointError, StoreError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.directory import DirectoryStore

RUN = "20260101T000000.000000-00000000"

save = functools.partial(committing.save, kind="sharded", suffix="")


def part_only(store, name, number, rank, **options):
    part, files = make_part(name, number, rank, **options)
    assert commit.put_part(store, part, views_of(files)) == "sent"


def arrived(store, part):
    arrivals = Arrivals(part)
    arrivals.look(store)
    return arrivals


def overwriting(store, suffix="-2"):
    """Sends both parts of save 2; returns a function that commits it, with other data if asked."""
    part_only(store, "a", 2, 1, suffix=suffix)
    part, data = make_part("a", 2, 0, suffix=suffix)
    journal = MemoryJournal()
    commit.put_part(store, part, views_of(data), journal=journal)

    def commits(**changed):
        return commit.commit(store, part, views_of({**data, **changed}), arrived(store, part).rows, journal=journal)

    return commits


def test_a_part_that_arrived_is_not_sent_again_and_one_that_is_not_needed_not_at_all(tmp_path):
    store = DirectoryStore(str(tmp_path))
    part, data = make_part("a", 1, 1)
    journal = MemoryJournal()
    broken = FaultyStore(store, fail_at=2, only=lambda operation, key: operation == "upload")
    with pytest.raises(Injected):
        commit.put_part(broken, part, views_of(data), journal=journal)
    before = store.metrics.snapshot()["bytes.up"]
    for _ in range(2):
        assert commit.put_part(store, part, views_of(data), journal=journal) == "sent"
    second = part.content.files[1].size
    assert store.metrics.snapshot()["bytes.up"] - before == second + len(part.to_json()), "one file, once"
    save(store, "a", 1)
    assert commit.put_part(store, part, views_of(data), journal=MemoryJournal()) == "committed"
    save(store, "a", 3, suffix="-3")
    assert commit.put_part(store, part, views_of(data), journal=MemoryJournal()) == "replaced"
    assert objects(store) == named(store)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_file_that_is_not_there_as_sent_keeps_the_checkpoint_from_being(damage, tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    commits = overwriting(store)
    store.delete("a/__1_1-2.distcp") if damage == "gone" else store.put("a/__1_1-2.distcp", b"x")
    with pytest.raises(StoreError, match="of a file are there instead of"):
        commits()
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
    commits = overwriting(store, suffix="")
    key = ids.description_key(ids.save_id(RUN, 2), 1)
    store.put(key, hostile(store.get(key)))
    with pytest.raises(CorruptCheckpointError):
        commits()
    swept(store)
    assert readable(store, "b") == 1
    assert ids.save_id(RUN, 2) not in "".join(objects(store))


@pytest.mark.parametrize("damage", ["gone", "cut", "of another save"])
@pytest.mark.parametrize("which", ["index", "description"])
def test_an_index_or_description_that_is_not_as_committed_is_damage(which, damage, tmp_path):
    store = DirectoryStore(str(tmp_path))
    save(store, "a", 1)
    save(store, "b", 2)
    key_of = ids.index_key if which == "index" else lambda save_id: ids.description_key(save_id, 1)
    key, other = (key_of(ids.save_id(RUN, number)) for number in (1, 2))
    if damage == "gone":
        store.delete(key)
    else:
        store.put(key, store.get(key)[:-5] if damage == "cut" else store.get(other))
    content = read_manifest(store, "a").content
    with pytest.raises(CorruptCheckpointError) as caught:
        files_of(store, content).of_rank(1)
    assert key in caught.value.key
    # The checkpoint can still be overwritten and deleted.
    save(store, "a", 3, suffix="-3")
    assert readable(store, "a") == 3
    delete(store, "a")
    assert readable(store, "b") == 2
    assert not [key for key in objects(store) if ids.save_id(RUN, 3) in key]
