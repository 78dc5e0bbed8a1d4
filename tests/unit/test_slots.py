"""Slots of node memory: prepared before they are needed, kept, and given up."""

import os

import pytest
from support.parts import content_of, files_in, save

from tiered_checkpoint_io.engine.staging.capture import acquire_for
from tiered_checkpoint_io.errors import MemoryFullError
from tiered_checkpoint_io.memory import pages, slots
from tiered_checkpoint_io.memory.pages import Mapped
from tiered_checkpoint_io.memory.tier import MemoryTier

MIB = 1 << 20


@pytest.fixture
def tier(memory_dir):
    tier = MemoryTier.open(memory_dir, "test")
    yield tier
    tier.close()


def resident(slot):
    """Bytes of a slot's pages that its mapping has, as the kernel counts them."""
    with open("/proc/self/smaps") as maps:
        text = maps.read().split(os.path.basename(slot.path))[1]
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))


def after(pieces):
    """Lets so many pieces be prepared; the first look is whether there is anything to do."""
    left = iter(range(pieces + 1))
    return lambda: next(left, None) is None


def test_what_is_prepared_is_taken_by_the_next_save(tier, monkeypatch):
    tier.prepare(MIB, lambda: False)
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken again"))
    assert content_of(tier, save(tier, b"x" * MIB, 1)) == b"x" * MIB


def test_preparing_touches_pages_without_changing_them(tier):
    slot = tier.acquire(3 * MIB)
    slot.view[:6] = b"kept\0!"
    tier.give_back(slot)
    tier.prepare(3 * MIB, lambda: False)
    assert (tier.acquire(3 * MIB), slot.touched) == (slot, 3 * MIB)
    assert bytes(slot.view[:6]) == b"kept\0!"
    assert resident(slot) >= 3 * MIB, "or the kernel is older than MADV_POPULATE_WRITE"
    tier.give_back(slot)


@pytest.mark.parametrize("pieces", range(6))
def test_a_save_takes_what_is_prepared_as_far_as_it_is(tier, monkeypatch, pieces):
    monkeypatch.setattr(slots, "_PIECE", MIB)
    tier.prepare(3 * MIB, after(pieces))
    (file,) = files_in(tier.root / "slots")
    slot = tier.acquire(3 * MIB)
    assert os.path.basename(slot.path) == file
    # Three pieces of space come before their pages; a save that finds none takes it as a whole.
    assert (slot.reserved, slot.touched) == (3 * MIB if pieces else 4 * MIB, MIB * max(0, pieces - 3))
    slot.view[: 3 * MIB] = b"x" * 3 * MIB
    tier.give_back(slot)


def test_pages_of_a_save_that_could_not_wait_for_huge_ones_become_huge_later(tier, monkeypatch):
    for name, value in (("_resting_until", 0.0), ("_slow_until", 0.0), ("_TOO_SLOW_S", 60.0), ("_SLOW_S", 0.0)):
        monkeypatch.setattr(pages, name, value)
    slot = tier.acquire(9 * MIB)
    if not slot.huge:
        pytest.skip("this kernel gives none")
    assert slot.huge == 2 * MIB
    slot.view[: 9 * MIB] = content = os.urandom(9 * MIB)
    tier.give_back(slot)
    assert not tier.is_prepared(9 * MIB)
    tier.prepare(9 * MIB, lambda: False)
    assert tier.is_prepared(9 * MIB)
    assert (tier.acquire(9 * MIB), slot.huge, bytes(slot.view[: 9 * MIB])) == (slot, 8 * MIB, content)
    tier.give_back(slot)


def test_who_takes_a_slot_ends_its_preparation(tier, monkeypatch):
    monkeypatch.setattr(slots, "_PIECE", MIB)
    taken, advise = [], Mapped.advise

    def take(mapped, advice, *args):
        if advice == slots._MADV_POPULATE_WRITE:
            taken.append(tier.acquire(3 * MIB))
        return advise(mapped, advice, *args)

    monkeypatch.setattr(Mapped, "advise", take)
    tier.prepare(3 * MIB, lambda: False)
    (slot,) = taken
    assert slot.touched == 0, "what it does not know is not relied upon"
    assert files_in(tier.root / "slots") == [os.path.basename(slot.path)]
    tier.give_back(slot)


def test_where_there_is_no_room_nothing_is_prepared_and_nothing_given_up(memory_dir):
    tier = MemoryTier.open(memory_dir, "test", budget_bytes=10 * MIB)
    free = tier.acquire(4 * MIB)
    tier.give_back(free)
    used = tier.usage()
    tier.prepare(7 * MIB, lambda: False)
    assert (tier.usage(), files_in(tier.root / "slots")) == (used, [os.path.basename(free.path)])
    tier.close()


def test_room_that_goes_meanwhile_ends_a_preparation(tier, monkeypatch):
    monkeypatch.setattr(slots, "_PIECE", MIB)
    rooms = iter([9 * MIB, 9 * MIB, 9 * MIB])
    monkeypatch.setattr(tier._pool, "_room", lambda: next(rooms, 0))
    tier.prepare(6 * MIB, lambda: False)
    assert (tier.usage(), files_in(tier.root / "slots")) == (0, [])


def test_no_slot_is_made_beyond_those_that_are_kept(tier, monkeypatch):
    held = [tier.acquire(MIB) for _ in range(2)]
    for slot in held:
        tier.give_back(slot)
    monkeypatch.setattr(slots.SlotPool, "_make", lambda *_: pytest.fail("a slot was made, to be discarded"))
    tier.prepare(9 * MIB, lambda: False)


def test_only_so_many_free_slots_are_kept(tier):
    stored = [save(tier, b"x" * 1000, number) for number in range(5)]
    for part in stored:
        tier.remove(part)
    assert len(files_in(tier.root / "slots")) == 2
    tier.close()
    assert tier.usage() == 0, "and none when all is over"


# ------------------------------------------------------------------------------------------- room


def test_who_registers_a_slots_pages_is_told_that_it_loses_some(memory_dir):
    """As pinned memory: a device would go on to copy into pages that the file no longer has."""
    told = []
    tier = MemoryTier.open(memory_dir, "test", unmap=lambda view, left: told.append((len(view), left)))
    first = save(tier, b"L" * 12 * MIB, 1)
    (capacity, left), *none = told
    assert (left, none) == (12 * MIB, [])
    tier.remove(first)
    save(tier, b"S" * MIB, 2)
    assert told[1:] == [(capacity, MIB)]
    tier.close()
    assert told[2:] == [(capacity, 0)]


def test_no_part_goes_for_a_slot_that_has_room_once_the_free_ones_are_given_up():
    class Tier:
        tries = 0

        def acquire(self, size):
            self.tries += 1
            if self.tries == 1:
                raise MemoryFullError("no room")
            return size

        def room(self):
            return 8 << 20

    assert acquire_for(Tier(), 1 << 20, lambda _missing: pytest.fail("nothing is missing")) == 1 << 20
