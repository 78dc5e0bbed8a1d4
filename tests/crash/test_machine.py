"""Any order of saves, aliases, removals, drains, failures, losses, damage and deaths, against a dictionary.

``make test-soak`` runs the same for long, and with new choices each time.
"""

import copy
import logging
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.draining import names, objects
from support.faulty import FaultyStore
from support.restoring import flip
from support.story import Model
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, Drain
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.engine.durable.sweep import Survey, delete, sweep
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.memory.node import release, try_lock
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore

NAMES = st.sampled_from(["a.ckpt", "deep/b.ckpt", "last.ckpt"])
KEEP = 2
LOG = logging.getLogger("machine")
LOG.setLevel(logging.CRITICAL)

COMMON = {"deadline": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", max_examples=15, stateful_step_count=25, derandomize=True, database=None, **COMMON)
settings.register_profile("soak", max_examples=600, stateful_step_count=80, database=None, print_blob=True, **COMMON)


def state(number):
    return {"w": torch.arange(100.0) + number, "global_step": number}


class Checkpoints(RuleBasedStateMachine):
    """One job on one node, and what it must hold."""

    @initialize()
    def begin(self):
        self.folder = Path(tempfile.mkdtemp(prefix="tiered-machine-", dir="/dev/shm"))
        self.store = DirectoryStore(str(self.folder / "durable"))
        self.number = 0
        #: Content of the durable tier after all finished operations, and the pending operations in order.
        self.model = Model()
        #: (id of the operation, its arguments for the model)
        self.queue = []
        #: Name by number of the save, of what is in memory; and which copies are damaged: (tier, number).
        self.memory = {}
        self.pending = set()
        self.damaged = set()
        #: Path of each object that is lost, by the number of its save.
        self.gone = {}
        #: Numbers of the saves that were on the durable tier, and of those that a load has taken from memory.
        self.committed = set()
        self.loaded = set()
        self.cut_short = False
        self.has_failed = False
        self.lock = None
        self.start()

    def start(self):
        """A new process on this node; the drain's lock is ours, so that drains run when a rule says so."""
        self.config = build(
            TieredCheckpointConfig.from_any,
            dirpath=self.store.url,
            memory_dir=str(self.folder),
            namespace="default",
            memory_keep_last=KEEP,
            max_pending=100,
            # No process of a drain begins by itself.
            drain="thread",
        )
        self.made = Checkpointer(self.config, logger=LOG)
        self.root = namespace_root(str(self.folder), "default")
        self.made.session.open()
        if self.lock is None:
            self.lock = try_lock(self.root / LOCK_FILE)

    def end(self):
        self.made.session.release()
        self.made.session._opened.drain.close(timeout_s=1)

    def teardown(self):
        if hasattr(self, "folder"):
            self.end()
            release(self.lock)
            shutil.rmtree(self.folder)

    # ------------------------------------------------------------------------------------ models
    def later(self):
        """The durable tier once all that is queued is done."""
        model = copy.deepcopy(self.model)
        for _, operation in self.queue:
            model.apply(*operation)
        return model

    def asked(self, *operation):
        """Takes note of an operation, if one was asked for just now."""
        queued = {op_id for op_id, _ in self.queue}
        for op_id in sorted(self.waiting() - queued):
            self.queue.append((op_id, operation))

    def waiting(self):
        """The ids of all operations that a drain has still to do."""
        requests = {each.op_id for each in Queue(self.root).requests()}
        return requests | {stored.op_id for stored in self.made.session.open().tier.parts() if stored.pending}

    def durable(self):
        """Returns the readable saves by name: their numbers, one or two, as an operation may be half done."""
        now, then = self.model.view(), {}
        if self.cut_short and self.queue:
            model = copy.deepcopy(self.model)
            model.apply(*self.queue[0][1])
            then = model.view()
        else:
            then = now
        return {name: {now.get(name), then.get(name)} for name in {*now, *then}}

    def newest(self, *, memory=True, name=None):
        """Returns the saves that a restore may give; None for none."""
        held = {number for number, of in self.memory.items() if memory and name in (None, of)}
        held = {number for number in held if ("memory", number) not in self.damaged}
        there = [numbers for of, numbers in self.durable().items() if name in (None, of)]
        certain = {number for numbers in there if len(numbers) == 1 for number in numbers}
        possible = {number for numbers in there for number in numbers if number is not None}
        # Memory's copy is passed by if its owner deleted the checkpoint, and nothing newer is on the durable tier.
        shown = self.durable().keys() - {self.gone[n] for n in possible & self.gone.keys()}
        newest = max(possible - self.gone.keys(), default=0)
        deleted = {n for n in held & self.committed if n > newest and self.memory[n] not in shown}
        held -= set() if self.has_failed else deleted
        certain, possible = ({n for n in each if ("durable", n) not in self.damaged} for each in (certain, possible))
        least = max({*(held - self.committed if self.has_failed else held), *certain}, default=None)
        return {n for n in {*held, *possible} if least is None or n >= least} | ({None} if least is None else set())

    # ------------------------------------------------------------------------------------- rules
    @rule(name=NAMES, tiers=st.sampled_from(["memory", "both"]))
    def save(self, name, tiers):
        self.number += 1
        durable = tiers == "both"
        tiers = {"memory", "durable"} if durable else {"memory"}
        assert self.made.save(state(self.number), name, tiers=tiers, wait=False)
        self.memory[self.number] = name
        if durable:
            self.pending.add(self.number)
            self.asked(self.number, "save", name, "")
        newest_first = sorted(self.memory, reverse=True)
        for number in newest_first[KEEP:]:
            if number not in self.pending:
                del self.memory[number]

    @rule(name=NAMES, onto=NAMES)
    def alias(self, name, onto):
        if name != onto and self.later().is_real(onto):
            self.number += 1
            self.made.alias(name, onto)
            self.asked(self.number, "alias", name, onto)

    @rule(name=NAMES)
    def remove(self, name):
        here = [number for number, of in self.memory.items() if of == name]
        if name not in self.later().view() and not here:
            return
        self.number += 1
        self.made.remove(name)
        for number in here:
            if number not in self.pending:
                del self.memory[number]
        self.asked(self.number, "delete", name, "")
        assert name not in self.later().view()

    @rule()
    def drain(self):
        self._drain(self.store)
        assert self.queue == []
        if self.has_failed:
            self._clean()
        gone = set(self.gone.values())
        assert set(objects(self.store)) | gone >= set(self.model.objects()) >= set(objects(self.store))
        assert sorted(self.model.view()) == names(self.store)

    @rule(at=st.integers(1, 25), when=st.sampled_from(["before", "during", "after"]))
    def drain_that_fails(self, at, when):
        self._drain(FaultyStore(self.store, fail_at=at, when=when))
        self.has_failed = True

    def _clean(self):
        """Removes what a delete that failed may leave: objects without a manifest, and aliases without a target."""
        self.has_failed = False
        sweep(self.store, Survey(), before=math.inf)
        for name in set(names(self.store)) - self.model.view().keys():
            if read_manifest(self.store, name).alias_of:
                delete(self.store, name)

    def _drain(self, store):
        release(self.lock)
        try:
            assert Drain(self.root, logger=LOG, open_store=lambda *_: store).run(once=True)
        finally:
            self.lock = try_lock(self.root / LOCK_FILE)
        told = {outcome.op_id for outcome in Queue(self.root).outcomes() if outcome.state == "committed"}
        left = self.waiting() - told
        while self.queue and self.queue[0][0] not in left:
            _, operation = self.queue.pop(0)
            self.model.apply(*operation)
            self.pending.discard(operation[0])
            self.committed |= {operation[0]} if operation[1] == "save" else set()
        self.cut_short = bool(self.queue)

    @rule()
    def crash(self):
        self.end()
        self.start()
        # As each trainer does, it looks first.
        self.restore()

    @precondition(lambda self: not self.cut_short)
    @rule()
    def lose_the_node(self):
        self.end()
        release(self.lock)
        self.lock = None
        shutil.rmtree(self.root)
        self.memory.clear()
        self.pending.clear()
        self.queue.clear()
        self.damaged = {each for each in self.damaged if each[0] != "memory"}
        self.start()
        self.restore()

    @precondition(lambda self: not self.cut_short)
    @rule(how=st.sampled_from(["lost", "flipped"]))
    def damage_the_newest_object(self, how):
        """On the durable tier; it stays so until its name is saved anew."""
        intact = [n for n in self.model.view().values() if ("durable", n) not in self.damaged]
        if not intact:
            return
        number = max(intact)
        name = next(each for each, shown in self.model.view().items() if shown == number)
        path = read_manifest(self.store, name).content.files[0].path
        if how == "lost":
            self.store.delete(path)
            self.gone[number] = path
        else:
            flip(Path(self.store.url, path), at=200)
        self.damaged.add(("durable", number))

    @rule(which=st.integers(0, 5))
    def flip_a_byte_in_memory(self, which):
        idle = sorted(set(self.memory) - self.pending)
        idle = [number for number in idle if ("memory", number) not in self.damaged]
        if not idle:
            return
        number = idle[which % len(idle)]
        for stored in self.made.session.open().tier.parts():
            if stored.part.content.step == number:
                flip(stored.file(stored.part.content.files[0].basename), at=200)
        self.damaged.add(("memory", number))

    # ----------------------------------------------------------------------------------- restores
    @rule()
    def restore(self):
        self._restore(self.made, self.newest(), "tiered:latest")

    @rule(name=NAMES)
    def restore_by_name(self, name):
        if self.later().is_real(name) or name in self.memory.values():
            self._restore(self.made, None, name)

    @rule()
    def restore_elsewhere(self):
        """On a node whose memory is empty."""
        config = TieredCheckpointConfig.from_any(
            dirpath=self.store.url, memory_dir=str(self.folder), namespace="elsewhere"
        )
        made = Checkpointer(config, logger=LOG)
        try:
            self._restore(made, self.newest(memory=False), "tiered:latest")
        finally:
            made.session.release()
            shutil.rmtree(namespace_root(str(self.folder), "elsewhere"))

    def _restore(self, made, allowed, what):
        found = None
        try:
            loaded = made.load(what)
        except RestoreError:
            # What was set aside keeps a later start from beginning from scratch, too.
            aside = list((made.session.open().tier.root / "quarantine").iterdir())
            assert self.damaged or aside, "nothing was damaged"
        except FileNotFoundError:
            assert what != "tiered:latest"
        else:
            if loaded:
                found = loaded["global_step"]
                assert torch.equal(loaded["w"], state(found)["w"])
        if allowed is not None:
            assert found in allowed, f"restored {found} instead of one of {allowed}"
        if made is self.made:
            # Damaged copies are set aside; of those that loads have taken, the newest are kept.
            here = {stored.part.content.step: stored.part.name for stored in made.session.open().tier.parts()}
            self.loaded.add(found)
            kept = {*self.memory} - self.loaded | {*sorted({*self.memory, *here})[-KEEP:]}
            assert {n for n in self.memory if ("memory", n) not in self.damaged and n in kept} <= set(here)
            assert set(here) <= {*self.memory, found}
            self.damaged -= {("memory", number) for number in set(self.memory) - set(here)}
            self.damaged -= {("memory", found)}
            self.memory = here

    @invariant()
    def memory_holds_what_it_should(self):
        if hasattr(self, "made"):
            here = {stored.part.content.step for stored in self.made.session.open().tier.parts()}
            assert here == set(self.memory)


TestCheckpoints = Checkpoints.TestCase
TestCheckpoints.settings = settings.get_profile(os.environ.get("TIERED_PROFILE", "ci"))
