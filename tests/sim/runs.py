"""Runs of a job, one behind the other and at times two at once, on several machines: the real engine, and a dictionary.

Each run is one trainer on one machine. It loads a checkpoint, saves, aliases and deletes, and ends: by itself, killed,
preempted, or with its machine. Bytes in memory may change. The drains of the machines outlive it. What is judged:

- what a load gives was saved, is of one save, and none that is newer was within reach;
- a name never goes back to older content, and is gone only if it was deleted;
- what was reported to be durable is; in the end all is as the operations say, that were not lost with a machine;
- no call takes longer than its bounds; of two runs at once one yields, never both, and never for nothing.
"""

import contextlib
import logging
import os
from dataclasses import dataclass, field

import torch
from sim.machines import Machine, Odds, Store, operating_system, start_drain
from sim.runs_judge import Judge
from sim.world import Fates, World
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer, NoCheckpoint
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    ConfigError,
    RestoreError,
    StoreError,
    TieredCheckpointError,
)
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import Metric

LOG = logging.getLogger("simulation.runs")
LOG.propagate = False
LOG.addHandler(logging.NullHandler())
LOG.setLevel(logging.CRITICAL)

#: Virtual seconds within which the drains must be done once the last run has ended.
PATIENCE_S = 20_000.0
CONFIG = {
    "spill_dir": None,
    "wait_timeout_s": 600,
    "pending_timeout_s": 60,
    "durable_timeout_s": 30,
    "memory_keep_last": 2,
}
#: No call waits for longer than ``wait_timeout_s``, and some seconds for what it does besides.
BOUND_S = 700.0
#: A run that has to leave by a time, and is not killed then, takes some more polls and requests.
LATE_S = 4.0


@dataclass
class Run:
    """One trainer, from its start to its end."""

    number: int
    machine: Machine
    #: True if another may run at the same time; then it has names of its own.
    alone: bool
    boot_id: str = ""
    process: object = None
    checkpointer: Checkpointer | None = None
    #: When it has to have left, seconds; None before it is asked to.
    leave_by: float | None = None
    leaving_since: float | None = None
    #: True if it has asked for the dirpath: a run that saves to memory alone does not, and leaves no trace elsewhere.
    has_claimed: bool = False
    #: True if it has loaded the latest; one that loads by name looks at no other, and goes by its machine's clock.
    has_looked: bool = False
    began: float = 0.0
    ended: float | None = None
    refused: float | None = None
    names: list = field(default_factory=list)

    @property
    def is_alive(self):
        return self.process is not None and self.process.is_alive

    @property
    def holds(self):
        """True if the run takes the dirpath for its own."""
        keeper = self.checkpointer.session.claims._lease if self.checkpointer is not None else None
        return self.is_alive and keeper is not None and keeper.is_held

    def name(self, text):
        return text if self.alone else f"run{self.number}-{text}"


class Trainer:
    """Work of a run, by the seed."""

    def __init__(self, life, run):
        self.life, self.run, self.world, self.rng = life, run, life.world, life.world.rng
        self.judge = life.judge

    def __call__(self):
        run, clock = self.run, self.run.machine.clock
        config = build(
            TieredCheckpointConfig.from_any,
            dirpath=Store.url,
            memory_dir=run.machine.folder,
            **CONFIG,
            max_pending=self.rng.choice([2, 4]),
        )
        session = Session(config, logger=LOG, clock=clock)
        run.checkpointer = Checkpointer(config, session=session)
        run.process.session = session
        with self.refusal():
            self.load(first=True)
            self.train()
        with self.refusal():
            # It shows what was not raised yet.
            self.timed("close", run.checkpointer.close)
        run.ended = self.world.now
        self.world.note(f"{run.process.name} ends")

    @contextlib.contextmanager
    def refusal(self):
        """Takes note if another run has the dirpath."""
        try:
            yield
        except ConfigError as error:
            self.run.refused = self.run.refused or self.world.now
            self.world.note(f"{self.run.process.name} is refused: {error.message}")

    # -------------------------------------------------------------------------------- training
    def train(self):
        # Runs that meet last longer, for it takes them a minute to know.
        for _ in range(self.rng.randint(2, 8) if self.run.alone else self.rng.randint(5, 18)):
            self.run.machine.clock.sleep(self.rng.choice([0.5, 10.0, 45.0]))
            if self.run.leave_by is not None:
                self.leave()
                return
            actions = ["save", "memory", "queue", "overwrite", "weights", "alias", "delete", "load"]
            action = self.rng.choices(actions, [5, 3, 3, 3, 1, 3, 2, 1])[0]
            getattr(self, action)()

    def save(self, *, kind="step", tiers=("memory", "durable"), wait=True, resumable=True):
        run, judge = self.run, self.judge
        number = judge.next_number()
        name = run.name(f"{kind}{number if kind == 'step' else ''}.ckpt")
        run.has_claimed |= "durable" in tiers
        saved = judge.begin(number, name, run, durable="durable" in tiers, resumable=resumable)
        self.world.note(f"{run.process.name} saves {number} as {name} to {'+'.join(tiers)}{' and waits' * wait}")
        state = {
            "a": torch.full((8,), number),
            "b": [torch.full((5,), number)],
            "number": number,
            "global_step": number,
        }
        report = self.timed(
            f"save {number}",
            lambda: run.checkpointer.save(
                state, name, tiers=tiers, wait=wait, metric=Metric("number", float(number)), resumable=resumable
            ),
        )
        if report is None:
            self.world.note(f"{run.process.name}: save {number} has failed")
        judge.returned(saved, report)
        run.names.append(name)

    def memory(self):
        self.save(tiers=("memory",))

    def queue(self):
        self.save(wait=False)

    def overwrite(self):
        self.save(kind="best", wait=self.rng.random() < 0.5)

    def weights(self):
        self.save(resumable=False, wait=False)

    def alias(self):
        run, judge = self.run, self.judge
        target = next((each for each in reversed(judge.saves.values()) if each.run is run and each.durable), None)
        if target is not None and target.report is not None and not judge.is_deleted(target):
            number, name = judge.next_number(), run.name("last.ckpt")
            aliased = judge.begin_alias(number, name, run, target)
            self.world.note(f"{run.process.name} makes {name} ({number}) an alias of {target.name}")
            self.timed("alias", lambda: run.checkpointer.alias(name, target.name))
            judge.queued(aliased)

    def delete(self):
        run, judge = self.run, self.judge
        mine = [name for name in run.names if name in run.names[:-2]]
        if mine:
            number, name = judge.next_number(), self.rng.choice(mine)
            deleted = judge.begin_delete(number, name, run)
            self.world.note(f"{run.process.name} deletes {name} ({number})")
            self.timed("remove", lambda: run.checkpointer.remove(name))
            judge.queued(deleted)

    def leave(self):
        """Does what PreemptionCheckpoint does."""
        run, session = self.run, self.run.checkpointer.session
        run.leaving_since = self.world.now
        session.leave_by(run.leave_by)
        session.is_preempted = True
        has_time = run.leave_by - self.world.now > session.clock.timing.preemption_upload_s
        self.save(kind="preempted", tiers=("memory", "durable") if has_time else ("memory",), wait=False)
        if has_time:
            with contextlib.suppress(TieredCheckpointError):
                run.checkpointer.session.wait(max(0.0, run.leave_by - self.world.now))

    # --------------------------------------------------------------------------------- loading
    def load(self, *, first=False):
        run, judge = self.run, self.judge
        names = [each.name for each in judge.saves.values() if each.run.boot_id == run.boot_id or each.durable]
        kinds = ["tiered:latest", "tiered:last", *([self.rng.choice(names)] if names else [])]
        what = self.rng.choices(kinds, [6 if first else 2, 2, 3][: len(kinds)])[0]
        before, faults = judge.within_reach(run, what), run.process.faults
        self.world.note(f"{run.process.name} loads {what}")
        state, error = None, None
        try:
            state = self.timed(f"load {what}", lambda: run.checkpointer.load(what))
        except (CheckpointNotFoundError, RestoreError, StoreError) as caught:
            error = caught
        run.has_looked |= what == "tiered:latest" and error is None
        number = None if error is not None or isinstance(state, NoCheckpoint) else judge.number_in(state)
        self.world.note(f"{run.process.name} has loaded {number if error is None else repr(error)}")
        judge.loaded(run, what, number, error, before, excused=run.process.faults != faults)

    def timed(self, what, work):
        """Does it, and looks how long that took, but for the time in which the process was stopped."""
        process, began, faults = self.run.process, self.world.now, self.run.process.faults
        try:
            return work()
        finally:
            took = self.world.now - began
            if took > BOUND_S and process.faults == faults and not self.world.is_over:
                self.world.violation = f"{process.name}: {what} has taken {took:.0f} s"


class Life:
    """One simulated life of a job: runs, and what befalls them."""

    def __init__(self, seed, fates, odds, folder):
        self.world = world = World(seed, fates)
        world.odds, world.current = odds, None
        self.rng = world.rng
        self.runs = []
        self.judge = Judge(world, self)
        self.machines = [Machine(world, f"node {n}", f"{folder}/{n}") for n in range(self.rng.choice([1, 2, 2, 3]))]
        outside = f"{folder}/outside"
        self.outside = Machine(world, "outside", outside)
        self._over = False

    def play(self):
        """Runs it to its end."""
        world = self.world
        with contextlib.ExitStack() as stack:
            stack.enter_context(operating_system(world, LOG))
            # It says what each lost machine has lost.
            stack.enter_context(silenced("tiered_checkpoint_io.drain"))
            stack.callback(world.close)
            self.outside.start("fate", self._fate, immortal=True)
            world.check = self.judge.check
            limit = 200_000.0
            if not world.run(self._is_over, limit) and not world.violation:
                world.violation = f"not over within {limit:.0f} s"
        return world

    def _is_over(self):
        self.judge.look_at_leases()
        return self._over

    # --------------------------------------------------------------------------------- fates
    def _fate(self):
        rng, clock = self.rng, self.outside.clock
        for _ in range(rng.choice([1, 2, 3, 3, 4])):
            machine = rng.choice(self.machines)
            both = len(self.machines) > 1 and rng.random() < 0.25
            run = self.start(machine, alone=not both and self._others_are_idle(machine))
            if both:
                clock.sleep(rng.choice([0.0, 5.0, 50.0]))
                other = rng.choice([each for each in self.machines if each is not machine])
                self.start(other, alone=False)
            self._befall(run)
            while any(each.is_alive for each in self.runs):
                clock.sleep(20.0)
            self.judge.look_at_refusals()
            clock.sleep(rng.choice([0.0, 0.0, 10.0, 100.0]))
        self._finish()
        self._over = True
        while True:
            clock.sleep(1000.0)

    def start(self, machine, *, alone):
        run = Run(len(self.runs) + 1, machine, alone, machine.boot_id)
        self.runs.append(run)
        run.began = self.world.now
        self.world.note(f"run {run.number} starts on {machine.name}{'' if alone else ', with names of its own'}")
        run.process = machine.start(f"run {run.number}", Trainer(self, run))
        return run

    def _others_are_idle(self, machine):
        """Returns True if no drain elsewhere works for an earlier run: two drains on one name are not judged here."""
        return not any(self.judge.is_busy(other) for other in self.machines if other is not machine)

    def _befall(self, run):
        rng, clock = self.rng, self.outside.clock
        fates = ["nothing", "killed", "preempted", "stopped", "lost", "drain", "damaged"]
        what = rng.choices(fates, [2, 3, 3, 2, 3, 2, 3] if run.alone else [2, 1, 1, 5, 1, 1, 1])[0]
        clock.sleep(rng.choice([2.0, 30.0, 100.0, 300.0]) * rng.random())
        if not run.is_alive or what == "nothing":
            return
        if what == "killed":
            run.process.kill()
        elif what == "stopped":
            # Of two at once, the other is to be there still when this one goes on.
            run.process.stop(rng.choice([20.0, 100.0, 1000.0, 7200.0] if run.alone else [20.0, 100.0, 150.0, 250.0]))
        elif what == "lost":
            self.judge.lost(run.machine)
            run.machine.lose()
        elif what == "damaged":
            self.judge.damage(run.machine)
            if rng.random() < 0.5:
                run.process.kill()
        elif what == "drain":
            for each in run.machine.processes:
                if each.name.startswith("drain"):
                    each.kill() if rng.random() < 0.5 else each.stop(1000.0)
        else:
            grace = rng.choice([3.0, 30.0, 120.0])
            self.world.note(f"{run.process.name} has to leave within {grace:.0f} s")
            run.leave_by = self.world.now + grace
            for each in run.machine.processes:
                if each.is_alive and each.name.startswith("drain") and rng.random() < 0.5:
                    each.stop(1000.0)
            clock.sleep(grace + LATE_S)
            if run.is_alive:
                self.judge.late(run)
                run.process.kill()

    def _finish(self):
        """All is calm from now on: the drains do what is left."""
        world, clock = self.world, self.outside.clock
        world.fates, world.odds, until = Fates(0, 0, 0, 0), Odds(), world.now + PATIENCE_S
        for machine in self.machines:
            for process in machine.processes:
                process.stopped_until = 0.0
        while any(self.judge.is_busy(machine) for machine in self.machines):
            for machine in self.machines:
                if self.judge.is_busy(machine) and not any(each.is_alive for each in machine.processes):
                    start_drain(machine, self.judge.root_of(machine), LOG, immortal=True)
            if world.now > until:
                world.violation = f"not done within {PATIENCE_S:.0f} s: {self.judge.left()}"
                return
            clock.sleep(10.0)
        self.judge.check_end()


CALM = Fates(killed=0.0, failed=0.0, stopped=0.0, skew=0.0), Odds()
FATAL = Fates(killed=0.01, failed=0.0, stopped=0.0, skew=150.0), Odds(killed=0.002, stopped=0.005)
ROUGH = Fates(killed=0.005, failed=0.02, stopped=0.0, skew=20.0), Odds(killed=0.002, stopped=0.005)

KINDS = CALM, FATAL, ROUGH


@contextlib.contextmanager
def silenced(name):
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def life(seed, kind=FATAL, *, folder):
    """One simulated life; its world, closed, with the violation that was found if any."""
    os.makedirs(folder, exist_ok=True)
    return Life(seed, *kind, folder).play()
