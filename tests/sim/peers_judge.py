"""Rules for each life with replicas: a dictionary of each machine's memory, kept at each change."""

import contextlib

from tiered_checkpoint_io.memory.tier import MemoryTier

#: A mark follows the last copy by two looks at the store, and requests between.
MARKED_S = 60.0


class Judge:
    """Learns of each part that is committed, marked or removed, on the machine whose turn it is."""

    def __init__(self, life):
        self.life, self.world = life, life.world
        names = [machine.name for machine in life.machines]
        self.size = len(names)
        self.factor = life.factor
        self._files = {}
        #: Parts (of a save, a rank) on each machine, own ones or replicas.
        self.held = [set() for _ in names]
        #: Saves that each machine has marked as replicated.
        self.marked = [set() for _ in names]
        #: The same, with what was removed or lost since all ranks started: ranks that still run do not know of a loss.
        self.came = [set() for _ in names]
        #: Saves that were on all peers, at some time.
        self.placed = set()
        #: Parts whose bytes the machine that saved them has changed.
        self.damaged = set()
        self._promised = False

    def expect(self, part, files):
        """Learns what a part has to hold that is about to be saved."""
        self._files[part.save_id, part.rank] = dict(files)

    @contextlib.contextmanager
    def watching(self):
        """Looks at what memory tiers do."""
        before = {name: getattr(MemoryTier, name) for name in ("commit", "mark_replicated", "remove", "quarantine")}

        def commit(tier, part, slots, **options):
            stored = before["commit"](tier, part, slots, **options)
            self._committed(stored)
            return stored

        def mark_replicated(tier, stored):
            before["mark_replicated"](tier, stored)
            self._marked(stored)

        def remove(tier, stored):
            if stored.pending and not (stored.folder / "drained").exists():
                self._violate(f"{self._text(stored)} is removed, which waits for the durable tier")
            before["remove"](tier, stored)
            self._gone(stored, "removed")

        def quarantine(tier, folder, reason):
            for stored in tier.held():
                if stored.folder == folder:
                    self._gone(stored, "quarantined")
            return before["quarantine"](tier, folder, reason)

        instead = {"commit": commit, "mark_replicated": mark_replicated, "remove": remove, "quarantine": quarantine}
        try:
            for name, method in instead.items():
                setattr(MemoryTier, name, method)
            yield
        finally:
            for name, method in before.items():
                setattr(MemoryTier, name, method)

    # -------------------------------------------------------------------------------------- events
    def _here(self):
        return self.life.machines.index(self.world.current.process.machine)

    def _at(self, stored):
        """On which machine a part lies: a peer may have it verified, and quarantined, from afar."""
        return next(at for at, each in enumerate(self.life.machines) if stored.folder.is_relative_to(each.folder))

    def _text(self, stored):
        kind = "replica of " if stored.is_replica else ""
        return f"{kind}part {stored.part.rank} of {stored.part.name} on node {self._at(stored)}"

    def _violate(self, text):
        if not self.world.is_over:
            self.world.violation = self.world.violation or text

    def _committed(self, stored):
        key, files = (stored.save_id, stored.part.rank), {}
        for entry in stored.part.content.files:
            files[entry.basename] = stored.file(entry.basename).read_bytes()[: entry.size]
        self.world.note(f"{self._text(stored)} is committed")
        if files != self._files[key]:
            own = stored.part.rank == self._here() and not stored.is_replica
            if not own or key not in self.damaged:
                self._violate(f"{self._text(stored)} has other bytes than were saved")
            return
        self.held[self._here()].add(key)
        self.came[self._here()].add(key)
        if self.is_placed(stored.save_id, self.came):
            self.placed.add(stored.save_id)
        self._promise(stored.save_id)

    def _marked(self, stored):
        self.world.note(f"{self._text(stored)} is marked as replicated")
        if stored.save_id not in self.placed:
            self._violate(f"{self._text(stored)} is marked as replicated, and never was on all peers")
        self.marked[self._here()].add(stored.save_id)
        self._promise(stored.save_id)

    def _promise(self, save_id):
        """From now on any machine may be lost, if all know that a save is on enough machines, and it still is."""
        all_know = all(save_id in marked for marked in self.marked)
        self._promised = self._promised or (all_know and self.is_placed(save_id, self.held))

    def _gone(self, stored, how):
        self.world.note(f"{self._text(stored)} is {how}")
        self.held[self._at(stored)].discard((stored.save_id, stored.part.rank))
        if self._promised:
            for lost in range(self.size):
                if self.newest_whole(without=lost) is None:
                    self._violate(f"{self._text(stored)} is {how}: without node {lost} no checkpoint is whole any more")

    def started(self):
        """All ranks start."""
        self.came = [set(held) for held in self.held]

    def lost(self, machine):
        """A machine is about to be lost."""
        number = self.life.machines.index(machine)
        self.held[number].clear()
        self.marked[number].clear()
        if self._promised and self.newest_whole() is None:
            self._violate(f"{machine.name} is lost, and no checkpoint is whole without it")
        self._promised = False

    # -------------------------------------------------------------------------------------- states
    def is_placed(self, save_id, parts):
        """Returns True if each part of a save is on as many machines as it is to be."""
        return all(sum((save_id, rank) in there for there in parts) >= self.factor for rank in range(self.size))

    def newest_whole(self, without=None):
        """The newest save of which the memories of the machines hold all parts together."""
        there = set().union(*(held for number, held in enumerate(self.held) if number != without))
        return max(
            (
                save_id
                for save_id in {each for each, _ in there}
                if all((save_id, rank) in there for rank in range(self.size))
            ),
            default=None,
        )

    # --------------------------------------------------------------------------------------- looks
    def chosen(self, rank, save_id):
        """Notes the save that a rank is about to load, and judges the choice."""
        self.world.note(f"{rank.process.name} loads {save_id}")
        if save_id != (best := self.newest_whole()) and not any(
            each.saved or not each.process.is_alive for each in self.life.ranks
        ):
            self._violate(f"{rank.process.name} loads {save_id}, and {best} is whole")

    def await_copies(self, rank, bound_s):
        """Waits until the newest whole save has all of its copies again, after the ranks met."""
        deadline, newest = self.world.now + bound_s, self.newest_whole()
        while newest is not None and not self.is_placed(newest, self.held):
            if any(save_id == newest for save_id, _ in self.damaged) or newest != self.newest_whole():
                return
            if self.world.now > deadline:
                self._violate(f"{newest} does not get its copies again")
                return
            rank.machine.clock.sleep(1.0)

    def await_marks(self, rank):
        """The newest save of the last start is on all peers, and every machine learns of it."""
        clock = rank.machine.clock
        newest, deadline = max(save_id for save_id, _ in self._files), clock.monotonic() + MARKED_S
        while any(each.saved < rank.saved or each.peering.pending for each in self.life.ranks):
            clock.sleep(1.0)
            deadline = clock.monotonic() + MARKED_S
        # The store ends with rank 0: none ends before all know.
        while not all(newest in marked for marked in self.marked):
            if clock.monotonic() > deadline:
                self._violate(f"not all machines learn that {newest} is replicated")
                return
            clock.sleep(1.0)
        if not self.is_placed(newest, self.held):
            self._violate(f"{newest} is not on all peers in the end")
