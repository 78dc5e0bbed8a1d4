"""The choice of what to restore, against an oracle that tries every save on every node."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.restoring import make_content, save_id

from tiered_checkpoint_io.engine.restore.choice import Candidate, Catalog, Held, Selector, choose
from tiered_checkpoint_io.model.manifest import Manifest

NAMES = ["a.ckpt", "b.ckpt", "last.ckpt", "x/last-v1.ckpt", "blast.ckpt"]
LAST = {"last.ckpt", "x/last-v1.ckpt"}


def content(name, number):
    return make_content(name, b"x", number)


def chosen(memory, durable, selector, aliases=None):
    return [
        (c.name, c.content.step, {node: "+".join(c.sources(node)) for node in memory})
        for c in choose(Catalog(memory, durable, aliases or {}), selector)
    ]


def held(name, number):
    return Held(name, 0, content(name, number))


LATEST = Selector("latest")


def test_the_last_may_be_weights_alone_where_there_is_no_other():
    weights = Manifest("last.ckpt", replace(content("last.ckpt", 3), resumable=False))
    whole = Manifest("a/last.ckpt", content("a/last.ckpt", 2))
    assert [step for _, step, _ in chosen({"n": []}, [weights], Selector("last"))] == [3]
    assert [step for _, step, _ in chosen({"n": []}, [weights, whole], Selector("last"))] == [2]
    assert chosen({"n": []}, [weights], LATEST) == []
    # One that no node can get in whole is no other.
    half = Held("b/last.ckpt", 0, replace(facts(4), parts=2))
    assert [step for _, step, _ in chosen({"n": [half]}, [weights], Selector("last"))] == [3]


def test_a_save_of_which_only_copies_are_left_is_orphaned_unless_the_durable_tier_has_it():
    copy = replace(held("a.ckpt", 1), owns=False)

    def orphaned(memory, durable=()):
        return [each.is_orphaned() for each in choose(Catalog(memory, durable), LATEST)]

    assert orphaned({"n": [copy], "m": [copy]}) == [True]
    assert orphaned({"n": [copy], "m": [held("a.ckpt", 1)]}) == [False]
    assert orphaned({"n": [copy], "m": []}, [Manifest("a.ckpt", content("a.ckpt", 1))]) == [False]


@st.composite
def tiers(draw):
    """Returns saves of a few names: each on some nodes' memory, and in some manifests as content or previous."""
    nodes = [f"n{i}" for i in range(draw(st.integers(1, 3)))]
    saves = [(draw(st.sampled_from(NAMES)), number) for number in range(draw(st.integers(0, 6)))]
    memory = {node: [held(*save) for save in saves if draw(st.booleans())] for node in nodes}
    durable = []
    for name in NAMES:
        kept = [number for other, number in saves if other == name and draw(st.booleans())]
        if kept:
            newest, *older = sorted(kept, reverse=True)
            previous = tuple(content(name, number) for number in older)
            durable.append(Manifest(name, content(name, newest), previous))
    taken = {manifest.name for manifest in durable}
    for name in draw(st.lists(st.sampled_from(sorted(LAST)), unique=True)):
        if name not in taken and saves:
            target, number = draw(st.sampled_from(saves))
            durable.append(Manifest(name, content(target, number), alias_of=target))
    aliases = {}
    if saves and draw(st.booleans()):
        aliases["last.ckpt"] = draw(st.sampled_from(saves))[0]
    selector = draw(
        st.sampled_from([Selector("latest"), Selector("last"), *(Selector("name", name) for name in NAMES)])
    )
    return memory, draw(st.permutations(durable)), selector, aliases


def wanted_names(selector):
    return {"latest": set(NAMES), "last": LAST, "name": {selector.name}}[selector.kind]


def oracle(memory, durable, selector, aliases):
    names = wanted_names(selector)
    names = names | {target for alias, target in aliases.items() if alias in names}
    manifests = {manifest.name: manifest for manifest in durable}
    readable = set()
    for name in names & set(manifests):
        manifest = manifests[name]
        if manifest.alias_of:
            manifest = manifests.get(manifest.alias_of)
        if manifest is None or manifest.alias_of:
            continue
        readable |= {each.step for each in (manifest.content, *manifest.previous)}
    expected = []
    for number in range(9, -1, -1):
        on = {node for node, entries in memory.items() if any(e.content.step == number for e in entries)}
        meant = number in readable or any(
            e.content.step == number and e.name in names for entries in memory.values() for e in entries
        )
        if meant:
            sources = {
                node: tuple(
                    t
                    for t, has in (
                        ("memory", node in on),
                        ("peer", bool(on - {node})),
                        ("durable", number in readable),
                    )
                    if has
                )
                for node in memory
            }
            expected.append((save_id(number), sources))
    return expected


@settings(max_examples=400, deadline=None)
@given(tiers())
def test_every_save_that_all_nodes_can_get_is_offered_once_the_latest_first(facts):
    memory, durable, selector, aliases = facts
    made = choose(Catalog(memory, durable, aliases), selector)
    assert all(isinstance(candidate, Candidate) for candidate in made)
    assert [(c.save_id, {node: c.sources(node) for node in memory}) for c in made] == oracle(*facts)


def part(number, rank, *, commits=None, **more):
    return Held(f"step_{number}", rank, facts(number, **more), rank == 0 if commits is None else commits)


def facts(number, *, world_size=2, kind="sharded", step=None):
    step = number if step is None else step
    parts = 1 if kind == "full" else world_size
    made = make_content("x", b"x", number, kind=kind)
    return replace(made, world_size=world_size, parts=parts, step=step, files=())


def manifest(number, **more):
    return Manifest(f"step_{number}", facts(number, **more))


def names(memory, durable=(), selector=LATEST, accepts="sharded"):
    return [each.name for each in choose(Catalog(memory, durable), selector, accepts)]


def test_a_save_that_lacks_a_part_or_that_of_its_coordinator_is_no_candidate():
    memory = {"a": [part(1, 0), part(1, 1), part(2, 0), part(3, 0, commits=False), part(3, 1)], "b": []}
    assert names(memory) == ["step_1"]


@pytest.mark.parametrize(
    ("accepts", "offered"),
    [("full", ["step_3", "step_2", "step_1"]), ("sharded", ["step_2", "step_1"]), ("local", ["step_3"])],
)
def test_local_checkpoints_lie_beside_the_others_but_a_full_one_never_hides_a_sharded_one(accepts, offered):
    memory = {"a": [part(2, 0), part(2, 1), part(3, 0, kind="local"), part(3, 1, kind="local")]}
    durable = [manifest(1, kind="full")]
    assert names(memory, durable, accepts=accepts) == offered
    # By its name it is offered with any payload, and refused by its payload.
    assert names(memory, durable, Selector("name", "step_2"), accepts) == ["step_2"]
