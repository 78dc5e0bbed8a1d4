"""Judge of lives of runs: the numbers of saves, aliases and deletes, in the order of their calls.

Each operation has a number, and a checkpoint's is in it. Runs follow each other, so what is newer has the greater number.
"""

from dataclasses import dataclass, field
from pathlib import Path

from sim.machines import Machine
from sim.world import Peek
from support.restoring import flip
from support.sharded import whole

from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids

#: So long two runs may both take a dirpath for theirs: each lists every 15 s, and one that was silent counts for 60 s.
BOTH_HOLD_S = 75.0
#: A run may be refused for one that ended so long before.
REFUSED_LATE_S = 180.0

#: Runs that meet notice it within some looks. Besides, their clocks may be off.
MET_S = 40.0
#: A run that was stopped saves as before until it has looked.
WOKEN_S = 20.0


@dataclass(eq=False)
class Operation:
    """A save, an alias or a delete; it is certain once the call has returned, and its machine was not lost.

    The target of a delete is the save that it follows.
    """

    number: int
    name: str
    run: object
    kind: str = "save"
    durable: bool = True
    resumable: bool = True
    target: object = None
    report: object = None
    is_certain: bool = False
    is_lost: bool = False
    boot_id: str = field(init=False)
    at: float = field(init=False)
    #: When its call has returned.
    until: float = float("inf")

    def __post_init__(self):
        self.boot_id, self.at = self.run.boot_id, self.run.process.world.now


def content_of(store, name):
    """The content that a reader finds whole under a name; None if it is absent, text if none is whole."""
    try:
        return whole(store, name)
    except AssertionError as error:
        return str(error)


class Judge:
    """Knows all that was asked for, and looks at what became of it."""

    def __init__(self, world, life):
        self._world, self._life = world, life
        self._number = 0
        self._skew = world.fates.skew
        self._met_s = MET_S + 2 * self._skew
        #: All operations by name, and the saves among them by number.
        self.operations = {}
        self.saves = {}
        #: The save that each run began last for the durable tier.
        self._followed = {}
        #: The greatest number that each name has shown, or the delete that it has followed.
        self._shown = {}
        self._both = (0.0, frozenset())
        #: Boots of machines, and the numbers of the saves of which a byte in their memory has changed.
        self._damaged = set()

    def _blame(self, text):
        self._world.violation = self._world.violation or text

    # ------------------------------------------------------------------------------ operations
    def next_number(self):
        self._number += 1
        return self._number

    def _add(self, operation):
        self.operations.setdefault(operation.name, []).append(operation)
        return operation

    def begin(self, number, name, run, *, durable, resumable):
        saved = Operation(number, name, run, durable=durable, resumable=resumable)
        self.saves[number] = saved
        if durable:
            self._followed[run.number] = saved
        return self._add(saved) if durable else saved

    def returned(self, saved, report):
        """A save has returned: what it has reported holds."""
        saved.report, saved.until = report, self._world.now
        if report is None:
            return
        saved.is_certain = not saved.is_lost
        if "durable" not in report.tiers and saved.durable:
            # Too many waited: it is in memory alone.
            saved.durable = False
            self.operations[saved.name].remove(saved)
        elif saved.durable and not report.queued and self._shown.get(saved.name, 0) < saved.number:
            self._blame(f"save {saved.number} was reported durable, and {saved.name} does not show it")

    def begin_alias(self, number, name, run, target):
        return self._add(Operation(number, name, run, "alias", target=target))

    def begin_delete(self, number, name, run):
        return self._add(Operation(number, name, run, "delete", target=self._followed.get(run.number)))

    def queued(self, operation):
        operation.is_certain = not operation.is_lost

    def is_deleted(self, saved):
        """Returns True if the save's name was deleted since."""
        later = (each for each in self.operations.get(saved.name, ()) if each.number > saved.number)
        return any(each.kind == "delete" for each in later)

    def lost(self, machine):
        """All that only this machine knows is gone."""
        for operation in (*self.saves.values(), *(each for named in self.operations.values() for each in named)):
            if operation.boot_id == machine.boot_id:
                operation.is_lost, operation.is_certain = True, False

    def damage(self, machine):
        """Changes a byte of the newest checkpoint in a machine's memory that waits for no upload."""
        root = self.root_of(machine)
        parts = MemoryTier(root, clock=machine.clock).parts() if root is not None else []
        for stored in [each for each in parts if not each.pending][-1:]:
            number = int(stored.part.content.metric.value)
            self._world.note(f"save {number} in the memory of {machine.name} is damaged")
            self._damaged.add((machine.boot_id, number))
            flip(stored.file(stored.part.content.files[0].basename), at=200)

    # ---------------------------------------------------------------------------- durable tier
    def check(self):
        """Checks the content that each name shows now; called behind each change."""
        for name in self.operations:
            number, last = self._number_shown(name), self._shown.get(name, 0)
            if number is None:
                deletes = [each.number for each in self._ends_of(name) if each.number > last and self._is_due(each)]
                if last and not deletes and not self._is_delete(name, last):
                    self._blame(f"{name} is gone, which has shown {last}, and no delete was due")
                elif last and not self._is_delete(name, last):
                    self._shown[name] = deletes[0]
            elif number < last and not self._is_alias_anew(name, last):
                self._blame(f"{name} shows {number}, behind {last}")
            else:
                self._shown[name] = max(last, number)

    def _ends_of(self, name):
        """The deletes by which a name goes: its own, and those of what it was made an alias of."""
        names = {name, *(each.target.name for each in self.operations[name] if each.kind == "alias")}
        found = (each for named in names for each in self.operations.get(named, ()))
        return sorted((each for each in found if each.kind == "delete"), key=lambda each: each.number)

    def _is_delete(self, name, number):
        return number in [each.number for each in self._ends_of(name)]

    def _is_due(self, delete):
        """Returns True if the save that it follows was on the durable tier."""
        return delete.target is None or self._shown.get(delete.target.name, 0) >= delete.target.number

    def _is_alias_anew(self, name, last):
        """Returns True if a name that had gone may now show an older save: that of the target of an alias."""
        return self._is_delete(name, last) and any(each.kind == "alias" for each in self.operations[name])

    def _number_shown(self, name):
        content = content_of(Peek(self._world), name)
        if isinstance(content, str):
            self._blame(content)
            return None
        return None if content is None else int(content.metric.value)

    def _durable(self, what):
        shown = {name: self._number_shown(name) for name in self.operations if self._is_meant(what, name)}
        return {name: number for name, number in shown.items() if number is not None}

    # --------------------------------------------------------------------------------- loading
    @staticmethod
    def _is_meant(what, name):
        return what == "tiered:latest" or (ids.is_last(name) if what == "tiered:last" else name == what)

    def _serving(self, what, numbers):
        """Those of them of which a load has to give the newest: weights alone if they are asked for, or all there is."""
        resumable = [number for number in numbers if self.saves[number].resumable]
        if what == "tiered:latest":
            return resumable
        return (resumable if what == "tiered:last" else []) or numbers

    def within_reach(self, run, what):
        """Returns the saves that a load must find now, if nothing fails: in memory, and by name on the durable tier."""
        here = [each for each in self.saves.values() if each.boot_id == run.boot_id and each.report is not None]
        newest = max(
            (each for each in here if "memory" in each.report.tiers), key=lambda each: each.number, default=None
        )
        is_there = newest is not None and self._is_meant(what, newest.name) and not self.is_deleted(newest)
        return [newest.number] if is_there else [], self._durable(what)

    def loaded(self, run, what, number, error, before, *, excused):
        """A load has returned."""
        memory, durable = [each for each in before[0] if (run.boot_id, each) not in self._damaged], before[1]
        now = self._durable(what)
        # Meanwhile weights alone may have taken the name of what training can resume from.
        kept = [
            each
            for name, each in durable.items()
            if name in now and (self.saves[now[name]].resumable or not self.saves[each].resumable or name == what)
        ]
        bounds = self._serving(what, [*memory, *(kept if not excused else [])])
        bound = max(bounds, default=0)
        who = f"{run.process.name}, loading {what},"
        if number is None:
            if bound and not (excused and error is not None):
                self._blame(f"{who} finds nothing ({error}), and {bound} was there")
            return
        saved = self.saves[number]
        is_better = bound and saved.resumable and not self.saves[bound].resumable and what == "tiered:last"
        if number < bound and not is_better and not self._met(saved, self.saves[bound]):
            self._blame(f"{who} got {number}, and {bound} was there")
        if number not in self._serving(what, [number, *bounds]):
            self._blame(f"{who} got {number}, which training can't resume from")
        names = {saved.name, *(each.name for each in self._aliases_of(saved.name))}
        if not any(self._is_meant(what, name) for name in names):
            self._blame(f"{who} got {number}, which was saved as {saved.name}")

    def _met(self, one, other):
        """Returns True if two runs made them at about the same time: either may pass for the newer one."""
        if not other.run.has_looked and other.run.began - one.at < 2 * self._skew:
            return True
        in_memory_alone = self._number_shown(one.name) != one.number
        if one.boot_id != other.boot_id and in_memory_alone and other.at - one.at < 2 * self._skew:
            # What is in the memory of another machine alone can't be followed, and clocks are off by so much.
            return True
        runs = one.run, other.run
        if runs[0] is not runs[1] and min(one.until, one.run.process.ended_at) > other.at:
            # A process that was stopped in its call: of calls that overlap, either may pass for the later one.
            return True
        overlap = runs[0].process.ended_at > runs[1].began and runs[1].process.ended_at > runs[0].began
        has_just_woken = 0 <= other.at - other.run.process.stopped_until < WOKEN_S
        # An id has the time at which its run began, by a clock that is off.
        is_unseen = has_just_woken or not one.run.has_claimed or abs(runs[0].began - runs[1].began) < 2 * self._skew
        return runs[0] is not runs[1] and overlap and (abs(one.at - other.at) < self._met_s or is_unseen)

    def _aliases_of(self, name):
        aliases = (each for named in self.operations.values() for each in named if each.kind == "alias")
        return [each for each in aliases if each.target.name == name]

    def number_in(self, state):
        """The one save that a state is of."""
        numbers = {state["number"], state["global_step"], *state["a"].tolist(), *state["b"][0].tolist()}
        if len(numbers) != 1 or not numbers <= self.saves.keys():
            self._blame(f"a load gave a mixture, or what was never saved: {sorted(numbers)}")
        return max(numbers)

    def late(self, run):
        """A run has not left in time, though nothing has befallen it."""
        if run.leaving_since is not None and run.leaving_since < run.leave_by and not run.process.faults:
            self._blame(f"run {run.number} has not left {self._world.now - run.leave_by:.0f} s behind its time")

    # ---------------------------------------------------------------------------------- leases
    def look_at_leases(self):
        """Two runs that both take the dirpath for theirs have to notice it within a bound."""
        holders = frozenset(run.number for run in self._life.runs if run.holds and not run.process.is_stopped)
        since, before = self._both
        if len(holders) < 2 or holders != before:
            self._both = (self._world.now, holders)
        elif self._world.now - since > BOTH_HOLD_S:
            self._blame(f"runs {sorted(holders)} both hold the dirpath for {self._world.now - since:.0f} s")

    def look_at_refusals(self):
        """Checks the refusals of runs that have ended: none without a cause, and not all of the runs that met."""
        runs = self._life.runs
        for run in (each for each in runs if each.refused is not None and not each.process.faults):
            met = [
                each
                for each in runs
                if each is not run
                and each.began <= run.refused
                and each.process.ended_at >= run.refused - REFUSED_LATE_S - 8000.0 * (each.process.faults > 0)
            ]
            if not met:
                self._blame(f"run {run.number} was refused, and no other was there")
            elif all(each.refused is not None for each in met):
                self._blame(f"run {run.number} and all that it met were refused")

    # ------------------------------------------------------------------------------------- end
    @staticmethod
    def root_of(machine: Machine):
        return next((each.parent for each in Path(machine.folder).glob("*/*/saves")), None)

    def _operations_left(self, machine):
        root = self.root_of(machine)
        if root is None:
            return []
        return Queue(root, clock=machine.clock).look(MemoryTier(root, clock=machine.clock))

    def is_busy(self, machine):
        """Returns True if a drain of the machine has something to do."""
        return bool(self._operations_left(machine))

    def left(self):
        """Returns a text for each queued operation of all machines."""
        return [
            f"{machine.name}: {each.action} {each.name} {each.op_id}"
            for machine in self._life.machines
            for each in self._operations_left(machine)
        ]

    def check_end(self):
        """All drains are done: each name shows its last operation that is certain, or a later one that may be."""
        machines = self._life.machines
        waiting = {each.name for machine in machines for each in self._operations_left(machine)}
        skipped = {each.op_id for machine in machines for each in self._outcomes(machine) if each.state == "skipped"}
        for name, operations in self.operations.items():
            number, allowed = self._number_shown(name), {None}
            for each in operations:
                both = (one for one in (each, each.target) if one is not None and one.report is not None)
                given_up = any(one.report.save_id in skipped for one in both)
                # Without a report, it is not known which save that was.
                given_up |= each.kind == "delete" and not (self._is_due(each) and (each.target or each).report)
                if each.is_certain and not given_up:
                    allowed.clear()
                allowed |= self._results(each)
            if number not in allowed and name not in waiting:
                self._blame(f"in the end {name} shows {number}, not one of {sorted(map(str, allowed))}")

    def _outcomes(self, machine):
        root = self.root_of(machine)
        return Queue(root, clock=machine.clock).outcomes() if root is not None else []

    def _results(self, operation):
        if operation.kind == "delete":
            return {None}
        if operation.kind == "save":
            return {operation.number}
        target = operation.target
        later = [each for each in self.operations.get(target.name, ()) if each.number >= target.number]
        gone = {None} if any(each.kind == "delete" for each in later) else set()
        return {each.number for each in later if each.kind == "save"} | gone
