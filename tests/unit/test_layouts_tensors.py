"""Plans made from what was kept of an earlier save, by how tensors, strings and numbers lie in a state and its file."""

import io
import zipfile

import torch
from support.changing_state import World, nth, swap
from support.planning import check, filled

from tiered_checkpoint_io.formats.layouts import Layouts


def test_tensors_that_share_other_storages_than_before():
    world, layouts = World(), Layouts()
    for seed in (1, 1, 1, 2, 2, 1):
        swap(world, seed)
        check(layouts, world.state())
    # Plans that are made anew are not the reason that it is right.
    assert layouts.reused == 2


def test_a_tensor_that_is_met_in_several_collections():
    world, layouts = World(), Layouts()
    world.begin_moments()
    world.ema = {name: each.clone() for name, each in world.model.items()}
    tensor = world.ema[nth(world, 3)]
    for more in ({"more": [tensor, tensor]}, {"more": {**world.ema}}, {"more": {}}, {"before": tensor}):
        world.more = more
        for world.step in range(3):
            check(layouts, world.state())
    assert layouts.reused >= 5


def test_tensors_that_no_longer_take_up_the_whole_of_their_storages():
    layouts, weights = Layouts(), {f"w{n}": torch.zeros(4) for n in range(40)}
    for replaced in (torch.zeros(4), torch.zeros(8)[4:], torch.zeros(4), torch.zeros(8)[:4], torch.zeros(1).expand(4)):
        weights["w7"] = replaced
        for step in range(3):
            check(layouts, {"step": step, "weights": weights})
    assert layouts.reused >= 7


def test_a_string_that_is_met_before_the_tensors_that_have_it_as_a_key():
    world, layouts = World(), Layouts()
    world.begin_moments()
    for text in ("none", nth(world, 3), "exp_avg", "0", "storage", "cpu", nth(world, 9), "none"):
        # Two saves each: the first one plans anew, where the structure has changed.
        for world.step in (1, 2):
            world.more["before"] = {"text": text, "again": [text]}
            check(layouts, world.state())
    assert layouts.reused >= 6


def test_numbers_that_become_longer():
    layouts, weights = Layouts(), {f"w{n}": torch.zeros(2) for n in range(40)}
    for count in (230, 240, 250, 260, 270, 280, 240):
        before = {f"k{n}": n for n in range(count)}
        behind = {f"m{n}": n for n in range(300)}
        for step in (1, 2):
            check(layouts, {"step": step, "rest": {**before, "tensor": torch.ones(1), **behind}, "weights": weights})
    assert layouts.reused >= 7


def test_what_moves_behind_a_longer_pickle_is_numbered_anew():
    world, layouts = World(300), Layouts()
    world.begin_moments()
    for _ in range(2):
        check(layouts, world.state())
    for names in (3, 30, 1, 0):
        state = world.state()
        state["loops"]["names"] = {f"n{n}": f"value{n}" for n in range(names)}
        check(layouts, state)
    assert layouts.reused == 4


def test_the_file_is_the_one_that_torch_save_writes_but_for_checksums_of_tensors():
    world, layouts = World(), Layouts()
    world.begin_moments()
    for world.step in range(4):
        data = filled(layouts.plan(world.state()))
    whole = io.BytesIO()
    torch.save(world.state(), whole)
    ours, theirs = (zipfile.ZipFile(io.BytesIO(each)) for each in (data, whole.getvalue()))
    facts = [
        [(each.filename, each.header_offset, each.file_size) for each in file.infolist()] for file in (ours, theirs)
    ]
    assert facts[0] == facts[1] and layouts.reused == 2
    assert ours.read("archive/data.pkl") == theirs.read("archive/data.pkl")
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert all(torch.equal(each, world.model[name]) for name, each in loaded["state_dict"].items())
    # Tensors' own checksums are the only bytes that differ, and the id that torch makes of all checksums.
    differing = {at // 64 for at, (a, b) in enumerate(zip(data, whole.getvalue(), strict=True)) if a != b}
    assert len(differing) <= 3 * len(facts[0])


def test_files_of_more_than_4_gib():
    layouts = Layouts()
    # The pages are never touched.
    big = {"a": torch.empty(1 << 30), "b": torch.empty(1 << 30), "c": torch.ones(3)}
    for step in (1, 2, 1 << 40, 5):
        check(layouts, {"step": step, "text": "x" * (step % 997), "weights": {**big}})
    assert layouts.reused == 2


def test_a_record_that_moves_over_the_limit_of_4_gib_is_planned_anew():
    layouts = Layouts()
    tensors = {"a": torch.empty((1 << 30) - 300), "b": torch.ones(3), "c": torch.ones(3)}
    for length in (0, 0, 10, 400, 4000):
        check(layouts, {"text": "x" * length, "weights": tensors})
