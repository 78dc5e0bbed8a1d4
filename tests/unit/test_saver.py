"""A state becomes a part in memory: at once, whole, within its room, and without taking space anew."""

import errno
import os

import pytest
import torch

from tiered_checkpoint_io.engine.staging.saver import Facts, Saver, part_of
from tiered_checkpoint_io.errors import MemoryFullError
from tiered_checkpoint_io.formats.image import plan
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

MIB = 1 << 20
RUN = ids.new_run_id()


@pytest.fixture
def opened(memory_dir):
    """Opens a tier with a budget and a saver on it."""
    tiers = []

    def open_tier(budget_bytes=None, keep_last=2):
        tier = MemoryTier.open(memory_dir, "test", budget_bytes=budget_bytes)
        saver = Saver(tier, keep_last=keep_last)
        tiers.append((saver, tier))
        return tier, saver

    yield open_tier
    for saver, tier in tiers:
        saver.close()
        tier.close()


def facts_of(step, *, durable=False):
    return Facts(f"step={step}.ckpt", ids.save_id(RUN, step), step, 0, 1, 0, "s3://b/run", durable)


def state_of(step, mib=4):
    return {"w": torch.full((mib * MIB // 4,), float(step)), "global_step": step}


def save(saver, step, *, mib=4, durable=False, **options):
    return saver.save(plan(state_of(step, mib)), facts_of(step, durable=durable), **options)


def steps(tier):
    return [stored.part.content.step for stored in tier.parts()]


def load(tier, stored):
    (entry,) = stored.part.content.files
    with tier.reading(stored) as views:
        for index, (offset, length) in enumerate(entry.chunks):
            entry.check_chunk(index, views[entry.basename][offset : offset + length], tier="memory", where="x")
    return torch.load(stored.file(entry.basename), mmap=True, weights_only=True)


def test_what_was_saved_is_loaded_and_not_what_came_after(opened):
    tier, saver = opened()
    weight = torch.randn(5 << 20)
    expected = weight.clone()
    saver.save(plan({"w": weight, "global_step": 7}), facts_of(7))
    weight.zero_()
    (stored,) = tier.parts()
    loaded = load(tier, stored)
    assert torch.equal(loaded["w"], expected)
    assert loaded["global_step"] == 7
    assert (stored.part.name, stored.part.content.step, stored.part.durable) == ("step=7.ckpt", 7, False)
    assert stored.part.content.writer["torch"] == torch.__version__


def test_the_newest_stay_and_what_waits_for_the_durable_tier(opened):
    tier, saver = opened(keep_last=2)
    save(saver, 1, durable=True)
    for step in range(2, 6):
        save(saver, step)
    assert steps(tier) == [1, 4, 5]
    tier.mark_drained(tier.parts()[0])
    save(saver, 6, protect={ids.save_id(RUN, 4)})
    assert steps(tier) == [4, 5, 6]


def test_a_steady_run_takes_no_space_and_no_new_file(opened, monkeypatch):
    tier, saver = opened(keep_last=2)
    for step in range(1, 5):
        save(saver, step)
    saver.close()
    used = tier.usage()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken again"))
    inodes = set()
    for step in range(5, 12):
        stored = save(saver, step)
        inodes.add(os.stat(stored.file(f"step={step}.ckpt")).st_ino)
        assert load(tier, stored)["w"][-1] == step
    assert len(inodes) == 3
    assert tier.usage() == pytest.approx(used, abs=MIB)


def test_short_of_room_memory_goes_below_keep_last_but_never_below_one(opened):
    tier, saver = opened(budget_bytes=22 * MIB, keep_last=3)
    for step in range(1, 8):
        save(saver, step, mib=7)
        assert steps(tier)[-1] == step
        assert 1 <= len(steps(tier)) <= 3
        assert tier.usage() <= 22 * MIB
        for stored in tier.parts():
            load(tier, stored)


def test_with_no_room_even_so_nothing_is_lost(opened):
    tier, saver = opened(budget_bytes=22 * MIB)
    save(saver, 1, durable=True, mib=7)
    save(saver, 2, durable=True, mib=7)
    with pytest.raises(MemoryFullError):
        save(saver, 3, mib=12)
    assert steps(tier) == [1, 2]
    for stored in tier.parts():
        assert load(tier, stored)["w"][0] == stored.part.content.step
    assert steps(tier) == [1, 2]
    with pytest.raises(MemoryFullError):
        save(saver, 4, mib=100)
    for stored in tier.parts():
        tier.mark_drained(stored)
    save(saver, 5, mib=12)
    assert steps(tier)[-1] == 5, "once the durable tier has them there is room"


def no_more_space(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_capture_that_fails_leaves_no_part_and_gives_the_slot_back(opened, monkeypatch):
    tier, saver = opened()
    save(saver, 1)
    saver.close()
    weight = torch.ones(MIB)
    image = plan({"w": weight})
    weight.untyped_storage().resize_(4)
    used = tier.usage()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="resized"):
            saver.save(image, facts_of(2))
    monkeypatch.setattr(os, "posix_fallocate", no_more_space)
    assert steps(tier) == [1]
    assert tier.usage() == used
    save(saver, 3)
    assert steps(tier) == [1, 3]


def test_the_description_tells_the_files_name_size_and_hashes():
    image = plan(state_of(3, mib=40))
    buffer = bytearray(image.size)
    part = part_of(image, facts_of(3, durable=True), image.fill(memoryview(buffer)))
    (entry,) = part.content.files
    assert (entry.path, entry.size, len(entry.hashes)) == ("step=3.ckpt", image.size, 3)
    for index, (offset, length) in enumerate(entry.chunks):
        entry.check_chunk(index, buffer[offset : offset + length], tier="memory", where="x")
