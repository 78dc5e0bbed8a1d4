"""A name that becomes a copy of another: stopped at any request, and where the store can't copy."""

import pytest
from support.committing import KINDS, alias, check_story, copy, delete, deleted_under_alias, save

from tiered_checkpoint_io.engine.durable import commit

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
