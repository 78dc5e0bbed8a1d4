"""The writes of a commit: stopped at any of them, a reader finds old or new, complete, and a rerun finishes it.

One list of stories, over checkpoints of one part and of several, listed in the manifest and in an index.
"""

import itertools

import pytest
from support.committing import KINDS, RUN, alias, check_story, delete, save
from support.failing import failing
from support.restoring import of_a_newer_release
from support.sharded import FlatStore, objects, readable

from tiered_checkpoint_io.engine.durable import commit, copies, sweep
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.directory import DirectoryStore

#: State before, operation, and the saves that a reader may find under each name before and after.
STORIES = {
    "first": (lambda s, k: None, lambda s, k, j: save(s, "a", 2, j, kind=k), "a", (None, 2)),
    "overwrite": (
        lambda s, k: save(s, "a", 1, kind=k),
        lambda s, k, j: save(s, "a", 2, j, kind=k),
        "a",
        (1, 2),
    ),
    "delete": (lambda s, k: save(s, "a", 1, kind=k), lambda s, k, j: delete(s, "a", j), "a", (1, None)),
    "alias moves": (
        lambda s, k: [save(s, "a", 1, kind=k), alias(s, "last", "a"), save(s, "b", 2, kind=k)],
        lambda s, k, j: alias(s, "last", "b", j),
        "last",
        (1, 2),
    ),
    "alias becomes real": (
        lambda s, k: [save(s, "a", 1, kind=k), alias(s, "last", "a")],
        lambda s, k, j: save(s, "last", 3, j, kind=k),
        "last",
        (1, 3),
    ),
    "real becomes alias": (
        lambda s, k: [save(s, "last", 1, kind=k), save(s, "a", 2, kind=k)],
        lambda s, k, j: alias(s, "last", "a", j),
        "last",
        (1, 2),
    ),
    "real with an alias becomes alias": (
        lambda s, k: [save(s, "last", 1, kind=k), alias(s, "best", "last"), save(s, "a", 2, kind=k)],
        lambda s, k, j: alias(s, "last", "a", j),
        "best",
        (1, None),
    ),
    "target goes, and its alias": (
        lambda s, k: [save(s, "a", 1, kind=k), alias(s, "last", "a"), save(s, "a", 2, kind=k)],
        lambda s, k, j: delete(s, "a", j),
        "last",
        (2, None),
    ),
}
#: Cases only for several parts, and changes from one kind to another.
MIXED = {
    "overwrite by fewer ranks": (
        lambda s, k: save(s, "a", 1, kind="sharded", world_size=3),
        lambda s, k, j: save(s, "a", 2, j, kind="sharded"),
        "a",
        (1, 2),
    ),
} | {
    f"{before} becomes {after}": (
        lambda s, _, kind=before: save(s, "a", 1, kind=kind),
        lambda s, _, j, kind=after: save(s, "a", 2, j, kind=kind),
        "a",
        (1, 2),
    )
    for before, after in itertools.permutations(KINDS, 2)
}


def once(cases, *seldom):
    """Returns all cases; kinds that differ only in their index or switch are further cases, except an overwrite."""
    return [
        pytest.param(*case, marks=pytest.mark.matrix)
        if any(kind in " ".join(case) for kind in seldom) and case[0] != "overwrite"
        else pytest.param(*case)
        for case in cases
    ]


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.matrix), "after"])
@pytest.mark.parametrize(("story", "kind"), once(itertools.product(STORIES, KINDS), "indexed", "one rank", "local"))
def test_stopped_at_any_request_old_or_new_and_a_rerun_finishes(story, kind, when, memory_dir, monkeypatch):
    if kind == "full, indexed":
        monkeypatch.setattr(commit, "_MAX_INLINE", 0)
    check_story(STORIES[story], kind, when, memory_dir)


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.matrix), "after"])
@pytest.mark.parametrize("story", once(((story,) for story in MIXED), "indexed", "one rank"))
def test_so_it_is_where_the_kind_changes_and_where_parts_are_left(story, when, memory_dir, monkeypatch):
    if "indexed" in story:
        monkeypatch.setattr(commit, "_MAX_INLINE", 0)
    check_story(MIXED[story], "", when, memory_dir)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_newer_release_wrote_is_left_alone(kind, tmp_path):
    store = FlatStore(str(tmp_path))
    save(store, "a", 1, kind=kind)
    key = ids.manifest_key("a")
    newer = of_a_newer_release(store.get(key))
    store.put(key, newer)
    before = objects(store)
    for act in (
        lambda: save(store, "a", 2, kind=kind),
        lambda: delete(store, "a"),
        lambda: alias(store, "last", "a"),
    ):
        with failing("format", match="upgrade"):
            act()
    assert store.get(key) == newer
    assert objects(store) == before


def test_requests_spare_what_was_saved_or_linked_later(tmp_path):
    """A dead run's request is on a node that comes back after the job has continued elsewhere."""
    store = DirectoryStore(str(tmp_path))
    for number, name in ((1, "a"), (3, "b"), (5, "c")):
        save(store, name, number)

    def link(name, target, before):
        copies.put_alias(store, name, target, before=ids.save_id(RUN, before))
        return readable(store, name)

    sweep.delete(store, "c", before=ids.save_id(RUN, 4))
    assert readable(store, "c") == 5
    assert link("c", "a", before=4) == 5
    assert link("last", "b", before=4) == 3
    assert link("last", "a", before=2) == 3
    assert link("last", "a", before=5) == 1
    assert link("a", "a", before=5) == 1
    assert read_manifest(store, "a").alias_of is None
