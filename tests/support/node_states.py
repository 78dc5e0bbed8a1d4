"""Stories of a node that loses its power: the states of its disk, and the restart from each state.

Either parts are spilled to the disk, and memory is gone with the power; or ``memory_dir`` is on the disk itself, with the
operation log. The durable tier is as it was at that moment. Parts in memory need not survive this. But a restart must
take no damaged part for intact, and must not fail because of one.
"""

import contextlib
import logging
import random
import shutil
import types
import warnings
from pathlib import Path
from unittest import mock

import torch
from support import crash_states
from support.draining import names
from support.sharded import readable
from support.supporting import build
from support.sweeping import Lost, Mixed

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain import log as operation_log
from tiered_checkpoint_io.engine.drain import process
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.errors import RestoreError
from tiered_checkpoint_io.memory import slots, tier
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("node-states")
LOG.propagate = False
LOG.addHandler(logging.NullHandler())
SOON = Clock(Timing(drain_lock_s=0.0))
#: Operations of a job; after ``None`` the drain carries out the queue. Memory keeps one: slots
#: are filled again. Names are overwritten, deleted and saved again; an alias moves, and loses its target.
LIFE = [
    *[("save", "a.ckpt", "both"), ("save", "b.ckpt", "both"), ("alias", "last.ckpt", "a.ckpt"), None],
    *[("save", "a.ckpt", "both"), ("save", "c.ckpt", "memory"), None, ("save", "d.ckpt", "both"), None],
    *[("delete", "b.ckpt", ""), ("alias", "last.ckpt", "d.ckpt"), None, ("save", "e.ckpt", "both"), None],
    *[("delete", "a.ckpt", ""), None, ("save", "b.ckpt", "both"), ("save", "f.ckpt", "both"), None],
    *[("delete", "d.ckpt", ""), ("delete", "c.ckpt", ""), None, ("save", "f.ckpt", "both"), None],
    *[("delete", "f.ckpt", ""), None, ("save", "a.ckpt", "both"), ("delete", "a.ckpt", ""), None],
    *[("save", "g.ckpt", "both"), None],
]
#: Bytes of a state's tensor: some pages.
SIZE = 3000


class Idle:
    """Replaces the process of a drain: lives, and does nothing. The story itself carries out the queue."""

    def __init__(self, *_, **__):
        self.pid = 0

    def poll(self):
        return None


def state_of(number):
    return {"w": torch.arange(SIZE // 4) + 1000 * number, "global_step": number}


class Disk:
    """``memory_dir`` lies on the disk, operation log and all."""

    title = "memory_dir on a disk"
    budget: int | None = None

    def __init__(self, folder):
        self.folder = folder
        self.memory, self.spill, self.durable = (f"{folder}/{name}" for name in ("memory", "spill", "durable"))
        self.disk = self.memory

    def make(self):
        """Makes empty folders, except the disk's existing ones."""
        for path in (self.memory, self.spill):
            Path(path).mkdir(mode=0o700, exist_ok=True)

    @contextlib.contextmanager
    def trainer(self, on_save_error="warn"):
        """Yields a process of the job."""
        places = {"dirpath": self.durable, "memory_dir": self.memory, "spill_dir": self.spill}
        config = build(
            TieredCheckpointConfig.from_any,
            **places,
            namespace="default",
            memory_keep_last=1,
            max_pending=20,
            on_save_error=on_save_error,
            max_write_concurrency=1,
        )
        made = Checkpointer(config)
        made.session.clock = SOON
        if self.budget is not None:
            made.session.open().tier.budget = self.budget
        try:
            yield made
        finally:
            made.session.release()
            made.session.claims.close()

    def drain(self):
        assert Drain(self.root, logger=LOG, clock=SOON).run(once=True), "another drain runs"

    @property
    def root(self):
        return tier.namespace_root(self.memory, "default")


class Spill(Disk):
    """A memory into which no part fits: all are spilled."""

    title = "the spill"
    budget = 0

    def __init__(self, folder):
        super().__init__(folder)
        self.disk = self.spill


@contextlib.contextmanager
def small():
    """Sets small slots and a small log, and no process of a drain."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(slots, "_ROUND", crash_states.PAGE))
        stack.enter_context(mock.patch.object(operation_log, "_HALF", 1 << 14))
        stack.enter_context(mock.patch.object(process, "subprocess", types.SimpleNamespace(Popen=Idle, DEVNULL=None)))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        level = logging.root.manager.disable
        logging.disable(logging.CRITICAL)
        stack.callback(logging.disable, level)
        yield


class Moment:
    """Facts that judge a restart: the operations that were begun, the finished ones, and the durable tier."""

    def __init__(self, begun, ended, durable):
        self.begun, self.ended, self.durable = begun, ended, durable

    def allowed(self, name, shown):
        """Returns the saves that a name may show after the restart, if it shows ``shown`` before."""
        on_name = [number for number in self.ended if _operations()[number][1] == name]
        floor = max(on_name, default=0)
        later = [number for number in range(floor + 1, self.begun + 1) if _operations()[number][1] == name]
        allowed = {shown}
        for number in later:
            action, _, target = _operations()[number]
            if action == "save":
                allowed.add(number)
            elif action == "delete":
                allowed.add(None)
            else:
                # Any content of its target, now or later.
                allowed |= {each for each, what in _operations().items() if what[:2] == ("save", target)}
        if name == "last.ckpt":
            # The alias follows its target, which may be saved again.
            allowed |= {n for n, what in _operations().items() if what[0] == "save" and n > (shown or 0) and shown}
            # The alias goes with its target, too.
            deletes = [_operations()[number] for number in range((shown or 0) + 1, self.begun + 1)]
            allowed |= {None} if shown and ("delete", _operations()[shown][1], "") in deletes else set()
        return allowed


def _operations():
    return dict(enumerate(filter(None, LIFE), start=1))


def try_node(kind, folder, *, seed=0, sample=1.0, draws=3):
    """Returns the number of states tried, and the verdicts that are no good."""
    chooser = random.Random(seed)
    place = kind(folder)
    place.make()
    with small():
        pending = _record(place, chooser, sample, draws)
        for path in (place.memory, place.spill, place.durable):
            shutil.rmtree(path)
        bad = []
        for number, (moment, tree) in enumerate(pending):
            why = _try_state(place, moment, tree, number)
            if why:
                bad.append(why)
    return len(pending), bad


def _record(place, chooser, sample, draws):
    """Lives the life; each state of the disk at each moment of it."""
    pending, seen, numbers, at = [], set(), {}, 0

    def after(recorder):
        if chooser.random() >= sample:
            return
        ended = frozenset(numbers[each.op_id] for each in queue.outcomes() if each.state == "committed")
        durable = crash_states.read(place.durable)
        for tree in crash_states.states(recorder, chooser, draws):
            key = hash((at, ended, tuple(sorted(tree.items(), key=lambda item: item[0]))))
            if key not in seen:
                seen.add(key)
                pending.append((Moment(at, ended, durable), tree))

    with place.trainer("raise") as made:
        session = made.session
        memory, next_id = session.open().tier, session.save_ids.next
        # One of our own: the trainer's may be held by another thread, which waits for us to have looked.
        queue = Queue(place.root)
        queue.open()

        def noted():
            op_id = next_id()
            numbers[op_id] = at
            return op_id

        session.save_ids.next = noted
        with crash_states.recording(place.disk, after) as recorder:
            for operation in LIFE:
                if operation is None:
                    place.drain()
                    continue
                at += 1
                action, name, what = operation
                if action == "save":
                    made.save(
                        state_of(at), name, tiers={"memory", "durable"} if what == "both" else {"memory"}, wait=False
                    )
                elif action == "alias":
                    made.alias(name, what)
                else:
                    made.remove(name)
            assert crash_states.present(recorder.top) == crash_states.read(place.disk), "the model misses something"
        assert not queue.look(memory), "something was left undone"
    return pending


def _try_state(place, moment, tree, number):
    crash_states.write(moment.durable, place.durable)
    crash_states.write(tree, place.disk)
    place.make()
    try:
        before = _view(place)
        if number % 4 == 1 and place.root.is_dir():
            # By hand, before any trainer.
            place.drain()
            _check(moment, before, _view(place))
        _restart(place, moment, _view(place), anew=number % 4 == 2)
        _check(moment, before, _view(place))
    except Mixed as error:
        return f"mixture: {error}"
    except Exception as error:
        return f"loss: {type(error).__name__}: {error}"
    finally:
        for path in (place.memory, place.spill, place.durable):
            shutil.rmtree(path)
    return None


def _view(place):
    store = DirectoryStore(place.durable)
    try:
        return {name: readable(store, name) for name in names(store)}
    except AssertionError as error:
        raise Mixed(str(error)) from error


def _check(moment, before, after):
    for name in {*before, *after}:
        if after.get(name) not in moment.allowed(name, before.get(name)):
            text = f"{name} showed {before.get(name)}, and shows {after.get(name)}, behind {moment.begun} operations"
            raise Lost(f"{text}, of which {sorted(moment.ended)} were done")


def _restart(place, moment, durable, *, anew):
    """Loads the newest, drains the queue, and loads again; ``anew``: saves once more."""
    with place.trainer() as made:
        _load(made, moment, durable)
        made.session.open().drain.start()
        place.drain()
        left = [stored.part.name for stored in made.session.open().tier.parts() if stored.pending]
        if left:
            raise Lost(f"{left} stay in the queue")
        _load(made, moment, _view(place))
        if not anew:
            return
        name, step = "anew.ckpt", 99
        made.save(state_of(step), name, wait=False)
        place.drain()
        if made.load("tiered:latest")["global_step"] != step or _view(place).get(name) != step:
            raise Lost("what was saved behind the restart can't be loaded")
        made.remove(name)
        place.drain()


def _load(made, moment, durable):
    newest = max(filter(None, durable.values()), default=None)
    try:
        state = made.load("tiered:latest")
    except RestoreError:
        # All checkpoints are damaged: a load then raises, and does not begin from scratch.
        state = None
    if not state:
        if newest is not None:
            raise Lost(f"nothing is found, and {newest} was durable")
        return
    step = state["global_step"]
    if not torch.equal(state["w"], state_of(step)["w"]):
        raise Mixed(f"step {step} differs from what was saved")
    if not (newest or 0) <= step <= moment.begun:
        raise Lost(f"step {step} is loaded, and {newest} was durable")


NODES = (Spill, Disk)
