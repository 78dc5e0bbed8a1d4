"""Commits, aliases, copies and deletes as drains do them, and stories of them that are stopped at any request."""

import contextlib
import itertools
import math
from dataclasses import replace

from support.faulty import FaultyStore, Injected
from support.sharded import FlatStore, Journals, full_part, make_part, named, objects, readable, views_of

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.durable import commit, copies, sweep
from tiered_checkpoint_io.engine.durable.files import Arrivals
from tiered_checkpoint_io.engine.durable.lease import Lease
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.durable.sweep import Survey
from tiered_checkpoint_io.memory.node import Identity
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Metric

RUN = "20260101T000000.000000-00000000"
#: Kinds: one part, listed in the manifest, or in an index; several parts; several without a switch.
KINDS = ["full", "full, indexed", "sharded", "sharded, one rank", "local"]


def save(store, name, number, journals=None, *, kind="full", world_size=2, suffix=None, clock=SYSTEM, **facts):
    """Runs all ranks' drains, one after the other, the coordinator's last; ``facts`` are of the content."""
    journals = journals or Journals()
    if kind.startswith("full"):
        part, files = full_part(name, number)
        part = replace(part, content=replace(part.content, **facts))
        return commit.commit(store, part, views_of(files), journal=journals.of(name, number), clock=clock)
    payload, _, alone = kind.partition(", ")
    ranks = 1 if alone else world_size
    suffix = f"-{number:08d}" if suffix is None else suffix
    for rank in reversed(range(ranks)):
        part, files = make_part(name, number, rank, world_size=ranks, kind=payload, suffix=suffix)
        part, journal = replace(part, content=replace(part.content, **facts)), journals.of(name, number, rank)
        fate = commit.put_part(store, part, views_of(files), journal=journal, clock=clock) if ranks > 1 else "sent"
        if part.commits and fate != "replaced":
            arrivals = Arrivals(part)
            if fate == "sent" and ranks > 1:
                arrivals.look(store)
            fate = commit.commit(store, part, views_of(files), arrivals.rows, journal=journal, clock=clock)
        elif fate == "committed":
            # Its drain ends here: the part is marked.
            journal.clear()
    return fate


def rate(store, name, monitor, value):
    """Has a checkpoint be one that was saved with a value of what a callback monitors."""
    manifest = read_manifest(store, name)
    rated = replace(manifest, content=replace(manifest.content, metric=Metric(monitor, value)))
    store.put(ids.manifest_key(name), rated.to_json())


def part_only(store, name, number, rank):
    part, files = make_part(name, number, rank, suffix=f"-{number:08d}")
    assert commit.put_part(store, part, views_of(files)) == "sent"


def alias(store, name, target, journals=None):
    copies.put_alias(store, name, target)


def copy(store, name, target, number, journals=None):
    """Copies as the drain does."""
    return copies.put_copy(
        store,
        name,
        target,
        save_id=ids.save_id(RUN, number),
        dirpath="d",
        journal=(journals or Journals()).of("copy", name, number),
    )


def delete(store, name, journals=None):
    sweep.delete(store, name)


def swept(store):
    """Removes whatever no manifest names, as if all of it were old; the names that are gone."""
    return [name for _, name in sweep.sweep(store, Survey(), before=math.inf)]


def check_story(story, kind, when, folder):
    prepare, act, name, (old, new) = story
    for n in itertools.count(1):
        store = FlatStore(f"{folder}/{n}")
        prepare(store, kind)
        assert readable(store, name) == old
        journals = Journals()
        faulty = FaultyStore(store, fail_at=n, when=when)
        try:
            act(faulty, kind, journals)
        except Injected:
            assert readable(store, name) in (old, new)
            act(store, kind, journals)
        else:
            assert n > 2
            if faulty.operations < n:
                break
        finally:
            assert readable(store, name) in (old, new)
        assert readable(store, name) == new
        swept(store)
        assert objects(store) == named(store)
    assert readable(store, name) == new
    assert objects(store) == named(store)
    assert all(what[-1] == 1 for what in journals.left()), "but for those of parts that their drain has marked"


def begin_overwrite(store, name, number, *, kind="full"):
    """Overwrites a checkpoint as far as its manifest has both contents: the bytes are still the old ones."""
    for n in itertools.count(1):
        with contextlib.suppress(Injected):
            save(FaultyStore(store, fail_at=n), name, number, kind=kind)
        if read_manifest(store, name).previous:
            return


def lease_of(owner, *, machine="elsewhere", born=1):
    """Returns the lease of a launch's process, number 1 of a machine; a free one without a launch."""
    return Lease(owner, "token" if owner else "", 1, "", "ns", "host", Identity(machine, 1, born))
