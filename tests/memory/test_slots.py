"""Slots of node memory: prepared before they are needed, kept, and given up."""

import mmap
import os

import pytest
from support.parts import content_of, files_in, save

from tiered_checkpoint_io.engine.staging.capture import acquire_for
from tiered_checkpoint_io.memory.pages import Mapped
from tiered_checkpoint_io.memory.space import MemoryFullError
from tiered_checkpoint_io.memory.tier import MemoryTier

MIB = 1 << 20


def resident(slot):
    """Bytes of a slot's pages that its mapping has, as the kernel counts them."""
    with open("/proc/self/smaps") as maps:
        text = maps.read().split(os.path.basename(slot.path))[1]
    return 1024 * next(int(line.split()[1]) for line in text.splitlines() if line.startswith("Rss:"))


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


def test_who_takes_a_slot_ends_its_preparation(tier, monkeypatch):
    taken, advise = [], Mapped.advise

    def take(mapped, advice, *args):
        # The first advice is of the mapping's making.
        if not taken and advice != mmap.MADV_DONTFORK:
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


def test_only_so_many_free_slots_are_kept(tier):
    stored = [save(tier, b"x" * 1000, number) for number in range(5)]
    for part in stored:
        tier.remove(part)
    kept = files_in(tier.root / "slots")
    assert len(kept) == 2
    tier.prepare(9 * MIB, lambda: False)
    assert files_in(tier.root / "slots") == kept, "none is made beyond these"
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
