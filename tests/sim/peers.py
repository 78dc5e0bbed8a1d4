"""Lives of jobs whose nodes keep replicas of each other's parts: the real replication, over a network that fails.

Each machine has one rank and a drain. The ranks meet, load, and save; a rank or a drain is killed or stopped, a
machine is lost, a cable is cut, the memory for replicas is full; then all ranks start again, in the last start without
further harm. Saves are made by hand, and so is the choice of what to load: the newest that the memories hold together.
What is judged:

- what is kept was saved: each part and replica has the bytes that were saved;
- a save is marked as replicated only once all of its parts are on as many machines as they are to be;
- whichever machine is lost, the others hold a checkpoint, once all have marked one;
- what waits for the durable tier is not removed;
- no wait is longer than its bounds; in the end each part has its copies again, and the newest save is replicated.
"""

import contextlib
import itertools
import logging
import os
from collections import Counter
from types import SimpleNamespace

from sim.links import Job, torch_distributed
from sim.machines import Machine, MachineClock, Odds, operating_system
from sim.peers_judge import Judge
from sim.world import Fates, World
from support.sharded import make_part
from support.supporting import build

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.chunks import SlotDestination, read_part, verify
from tiered_checkpoint_io.engine.replication.meeting import Peering, awaited_in
from tiered_checkpoint_io.engine.replication.replicas import Replicas, leave_groups
from tiered_checkpoint_io.engine.restore.choice import Candidate
from tiered_checkpoint_io.engine.restore.peers import Peers
from tiered_checkpoint_io.engine.retention import Rules, complete_here, retain
from tiered_checkpoint_io.errors import CheckpointNotFoundError, CorruptCheckpointError, TieredCheckpointError
from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.memory.tier import MemoryTier
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.documents import Place
from tiered_checkpoint_io.stores.peer import Endpoint

LOG = logging.getLogger("simulation.peers")
LOG.propagate = False
LOG.addHandler(logging.NullHandler())
LOG.setLevel(logging.CRITICAL)

#: Bounds as in production, except for polls, which would be most of what happens.
TIMING = Timing(replica_poll_s=1.0, accept_poll_s=0.5, local_poll_s=1.0, store_rest_s=4.0, replica_patience_s=60.0)
KEEP = 2
TIMEOUT_S = 60
#: A part is given up, at the latest, after twice the patience; and rounds between.
SENT_S = 2 * TIMING.replica_patience_s + 60.0
CLOSE_S = 10.0 + 60.0
#: To be asked by a rank that is busy, and to get a part from one, or two.
FETCH_S = 60.0 + 2 * (30.0 + TIMEOUT_S + 60.0)


class PeerClock(MachineClock):
    """The time of a machine."""

    def __init__(self, world, machine):
        Clock.__init__(self, TIMING, world.rng)
        self.__dict__.update(_world=world, _machine=machine)


class Rank:
    """A process that trains, from its start to its end."""

    def __init__(self, life, job, rank, saves):
        self.life, self.job, self.rank, self.saves = life, job, rank, saves
        self.world, self.rng, self.judge = life.world, life.world.rng, life.judge
        self.machine = life.machines[rank]
        self.saved = 0
        self.process = self.machine.start(f"rank {rank} of {job.number}", self._run)
        self.process.job, self.process.rank = job, rank
        job.ranks.append(self.process)

    def _run(self):
        clock, machine, world = self.machine.clock, self.machine, self.world
        self.tier = tier = MemoryTier.open(machine.folder, "sim", clock=clock)
        config = build(
            TieredCheckpointConfig.from_any,
            dirpath="d",
            memory_dir=machine.folder,
            wait_timeout_s=TIMEOUT_S,
            memory_keep_last=KEEP,
            replication_factor=self.life.factor,
        )
        self.peering = peering = Peering(config, Counter(), clock, lambda: Endpoint(machine.name, 0, ""))
        tier.on_commit, tier.awaited = lambda stored: peering.committed(stored, LOG), awaited_in
        try:
            leave_groups(tier.root)
            if not machine.drain.is_alive:
                start_drain(machine)
            peering.meet(lambda: tier, LOG, None)
            self._restore()
            if self.job.is_last:
                self.judge.await_copies(self, SENT_S)
            self._train()
            self._wait_until_sent()
            if self.job.is_last:
                self.judge.await_marks(self)
        except TieredCheckpointError as error:
            # As torchrun sees it: this rank has failed, and the others are ended.
            world.note(f"{self.process.name} fails: {type(error).__name__}: {error.message}")
            if self.job.is_last:
                world.violation = f"{self.process.name} fails: {error}"
            return
        self._timed("close", lambda: peering.close(10.0), CLOSE_S)
        tier.close()
        self.process.is_done = True
        world.note(f"{self.process.name} ends: {dict(sorted(peering._counts.items()))}")

    # ----------------------------------------------------------------------------------- restoring
    def _restore(self):
        """The newest save that the memories hold together, each rank its part."""
        from tiered_checkpoint_io.engine.replication import meeting

        held, group = self._intact(), meeting.RankGroup()
        gathered = group.all_gather(lambda: held)
        whole = Counter(save_id for save_id, _ in {each for theirs in gathered for each in theirs})
        chosen = max((save_id for save_id, count in whole.items() if count == self.job.size), default=None)
        self.judge.chosen(self, chosen)
        if chosen is None or (chosen, self.rank) in held:
            return
        there = {
            machine.name: {rank: True for save_id, rank in theirs if save_id == chosen}
            for machine, theirs in zip(self.life.machines, gathered, strict=True)
        }
        faults, tiers = self.job_faults(), SimpleNamespace(clock=self.machine.clock, log=LOG, skipped=self.world.note)
        endpoints = {name: Endpoint(name, 0, "") for name in there}
        was_cut = any(until > self.world.now for until in self.world.cuts.values())
        wanted = Candidate("the newest", SimpleNamespace(save_id=chosen, kind="sharded"), held=there)
        peers = Peers(tiers, wanted, endpoints, self.machine.name)
        try:
            self._timed("fetch", lambda: self._fetch(peers), FETCH_S)
        except TieredCheckpointError as error:
            if faults == self.job_faults() and not was_cut:
                self.world.violation = f"{self.process.name} can't fetch its part of {chosen}: {error}"
            raise
        self.world.note(f"{self.process.name} has fetched {chosen}")

    def _fetch(self, peers):
        part, copies = peers.copies_of_part(self.rank)
        read_part(copies, SlotDestination(self.tier, part))

    def job_faults(self):
        """Counts the faults of the job that excuse a failure: a cable, a process."""
        return (
            self.life.faults,
            sum(each.faults for each in [*self.job.ranks, *(each.drain for each in self.life.machines)]),
            any(not p.is_alive for p in self.job.ranks),
        )

    def _intact(self):
        held = []
        for stored in self.tier.held():
            with contextlib.suppress(CorruptCheckpointError, CheckpointNotFoundError), reading(stored) as views:
                for entry in stored.part.content.files:
                    verify(entry, views[entry.basename], where=entry.path)
                held.append((stored.save_id, stored.part.rank))
        return sorted(held)

    # ------------------------------------------------------------------------------------ training
    def _train(self):
        for number in range(1, self.saves + 1):
            self.machine.clock.sleep(self.rng.choice([0.5, 3.0, 20.0]))
            # A step needs all ranks.
            while any(each.saved < number - 1 for each in self.life.ranks):
                self.machine.clock.sleep(1.0)
            while number == self.saves and self.world.now < self.life.mended_at:
                self.machine.clock.sleep(1.0)
            self._save(number)
            self.saved = number

    def _save(self, number):
        step = 100 * self.job.number + number
        save_id = ids.save_id(self.job.run, step)
        held = self.tier.parts()
        retain(self.tier, held, complete_here(held, Rules(save_id, self.rank, "local", Place("d"), keep=KEEP)))
        part, files = make_part(
            f"step={step}.ckpt", step, self.rank, world_size=self.job.size, kind="local", run=self.job.run, size=1200
        )
        self.judge.expect(part, files)
        slots = {}
        for basename, data in files.items():
            slots[basename] = self.tier.acquire(len(data))
            slots[basename].view[: len(data)] = data
            if self.rng.random() < self.life.damaged and not self.job.is_last:
                self.life.judge.damaged.add((save_id, self.rank))
                slots[basename].view[self.rng.randrange(len(data))] ^= 1
        self.tier.commit(part, slots)

    def _wait_until_sent(self):
        def wait():
            while self.peering.pending:
                self.machine.clock.sleep(1.0)

        self._timed("replication", wait, SENT_S)

    def _timed(self, what, work, bound_s):
        began, faults = self.world.now, self.process.faults
        try:
            return work()
        finally:
            took = self.world.now - began
            if took > bound_s and faults == self.process.faults and not self.world.is_over:
                self.world.violation = f"{self.process.name}: {what} has taken {took:.0f} s"


def start_drain(machine):
    """Starts the drain of a machine, as far as it replicates; it outlives the ranks."""

    def work():
        tier = MemoryTier.open(machine.folder, "sim", clock=machine.clock)
        machine.replicas = Replicas(tier.root, tier, LOG, machine.clock)
        machine.replicas.keep_last = KEEP
        while True:
            machine.replicas.look()
            machine.clock.sleep(1.0)

    machine.replicas = SimpleNamespace(answer=lambda *_: None)
    machine.drain = machine.start(f"drain of {machine.name}", work)


class Life:
    """One simulated life of a job: its starts, and what befalls them."""

    def __init__(self, seed, fates, odds, damaged, folder):
        self.world = world = World(seed, fates)
        world.odds, world.current, world.cuts = odds, None, {}
        self.rng, self.damaged, self.faults = world.rng, damaged, 0
        size = self.rng.choice([2, 2, 3])
        self.factor = self.rng.choice([2, size])
        self.machines = [Machine(world, f"node {n}", f"{folder}/{n}") for n in range(size)]
        self.outside = Machine(world, "outside", f"{folder}/outside")
        for machine in (*self.machines, self.outside):
            machine.clock, machine.full_until = PeerClock(world, machine), 0.0
            #: On a slow machine, saves outrun replication.
            machine.slow = self.rng.choice([1, 1, 8])
        #: Probability that a rank's parts reach the durable tier within a second.
        self.drained = self.rng.choice([0.05, 0.5])
        world.machines = self.machines
        self.judge = Judge(self)
        self.ranks = []
        #: When the last cut of the last start is over, and all can know.
        self.mended_at = 0.0
        self._over = False

    def play(self):
        """Runs it to its end."""
        world = self.world
        with contextlib.ExitStack() as stack:
            stack.enter_context(operating_system(world, LOG))
            stack.enter_context(torch_distributed(world))
            stack.enter_context(self.judge.watching())
            stack.callback(world.close)
            for machine in self.machines:
                start_drain(machine)
            self.outside.start("fate", self._fate, immortal=True)
            if not world.run(lambda: self._over, 50_000.0) and not world.violation:
                world.violation = "not over within 50,000 s"
        return world

    # --------------------------------------------------------------------------------------- fates
    def _fate(self):
        starts = self.rng.choice([2, 2, 3, 4])
        after = None
        for number in range(1, starts + 1):
            is_last = number == starts
            if is_last:
                self._calm()
            job = Job(self.world, number, self.machines)
            job.is_last, job.run = is_last, ids.new_run_id(after=after, clock=self.outside.clock)
            after = ids.save_id(job.run, 0)
            self.world.note(f"start {number} of {job.size} ranks, {self.factor} copies")
            self.judge.started()
            # Each has its process before any of them runs: it looks for the others.
            saves = self.rng.randint(3 if is_last else 1, 6)
            self.ranks = [Rank(self, job, rank, saves) for rank in range(job.size)]
            self._befall(job)
            for process in job.ranks:
                process.kill()
            self.outside.clock.sleep(self.rng.choice([0.0, 5.0, 30.0]))
        self._over = True
        while True:
            self.outside.clock.sleep(1000.0)

    def _calm(self):
        self.world.fates, self.world.odds = Fates(0, 0, 0, 0), Odds()
        self.world.cuts.clear()
        for machine in self.machines:
            machine.full_until, machine.slow, machine.drain.stopped_until = 0.0, 1, 0.0

    def _befall(self, job):
        """Watches the ranks until all have ended, or one has by a failure; and does them harm."""
        left = 0 if job.is_last else self.rng.randint(0, 4)
        at = self.world.now + self.rng.uniform(0.0, 40.0)
        while any(each.is_alive for each in job.ranks):
            if any(not each.is_alive and not getattr(each, "is_done", False) for each in job.ranks):
                # The others find out by themselves, for a while.
                self.outside.clock.sleep(self.rng.choice([0.0, 5.0, 100.0]))
                break
            self.outside.clock.sleep(1.0)
            for machine in self.machines:
                if not machine.drain.is_alive and (job.is_last or self.rng.random() < 0.1):
                    self.faults += 1
                    start_drain(machine)
            self._drain(job)
            if job.is_last and not self.mended_at and min(each.saved for each in self.ranks) > 0:
                self._cut_amid()
            if left and self.world.now > at:
                left, at = left - 1, self.world.now + self.rng.uniform(0.0, 40.0)
                self._harm(job)

    def _cut_amid(self):
        """Cuts all cables for longer than a message may take, before the last save, which finds the peers again."""
        if max(each.saved for each in self.ranks) <= self.ranks[0].saves - 2:
            self.faults += 1
            self.mended_at = self.world.now + 200.0
            for one, other in itertools.combinations(self.machines, 2):
                self.world.cuts[frozenset({one.name, other.name})] = self.world.now + 40.0
            self.world.note("no network for 40 s")

    def _harm(self, job):
        rng, world = self.rng, self.world
        what = rng.choices(["kill", "stop", "lose", "cut", "full", "kill drain", "stop drain"], [1, 3, 2, 4, 3, 2, 2])[
            0
        ]
        rank = rng.randrange(job.size)
        machine, process, seconds = self.machines[rank], job.ranks[rank], rng.choice([5.0, 40.0, 200.0])
        process = machine.drain if what.endswith("drain") else process
        if what.startswith("kill"):
            process.kill()
        elif what.startswith("stop"):
            process.stop(seconds)
        elif what == "lose":
            self.judge.lost(machine)
            machine.lose()
        elif what == "cut":
            self.faults += 1
            other = rng.choice([each for each in self.machines if each is not machine])
            world.cuts[frozenset({machine.name, other.name})] = world.now + seconds
            world.note(f"no network between {machine.name} and {other.name} for {seconds:.0f} s")
        else:
            self.faults += 1
            machine.full_until = world.now + seconds
            world.note(f"{machine.name} has no room for replicas for {seconds:.0f} s")

    def _drain(self, job):
        """Some parts reach the durable tier."""
        if self.rng.random() < self.drained:
            rank = self.rng.choice(self.ranks)
            if job.ranks[rank.rank].is_alive and hasattr(rank, "tier"):
                for stored in rank.tier.parts():
                    if stored.pending:
                        rank.tier.mark_drained(stored)


CALM = Fates(0.0, 0.0, 0.0, 0.0), Odds(), 0.0
ROUGH = Fates(0.0, failed=0.001, stopped=0.0, skew=20.0), Odds(killed=0.0002), 0.02
KINDS = CALM, ROUGH


def life(seed, kind=ROUGH, *, folder):
    """One simulated life; its world, closed, with the violation that was found if any."""
    os.makedirs(folder, exist_ok=True)
    return Life(seed, *kind, folder).play()
