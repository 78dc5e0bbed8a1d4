"""Stories of processes that are killed at each of their effects, and the restart after each.

Each story has a verdict for each point: ``old`` or ``new``, as the restart found the state before or behind the
operation that was cut off, whole and bit for bit; ``loss``, if something is missing that was reported as done, or does
not work any more; or ``mixture``, if something is there that was never saved.
"""

import collections
import contextlib
import itertools
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from support import story
from support.draining import Node
from support.dying import GOES_ON, LIVES

from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.stores import open_store


@dataclass(frozen=True)
class Verdict:
    """Result for one point: the work cut off, the kind of effect, and the finding of a restart."""

    doing: str
    effect: str
    found: str
    why: str = ""


class Lost(AssertionError):
    """Something is missing that should be there."""


class Mixed(AssertionError):
    """Something is there that was never saved."""


class Place:
    """One story's folders, empty again for each point."""

    def __init__(self, zygote, memory, durable, *, s3=False):
        self.zygote = zygote
        self.memory = str(memory)
        self.base = str(durable)
        self.s3 = s3
        self._numbers = itertools.count()
        self.durable = ""

    def clear(self):
        """Makes an empty memory, and a new durable tier."""
        shutil.rmtree(self.memory, ignore_errors=True)
        Path(self.memory).mkdir(mode=0o700, parents=True)
        if self.durable and not self.s3:
            shutil.rmtree(self.durable, ignore_errors=True)
        self.durable = f"{self.base}/{next(self._numbers)}"

    def run(self, role, kind, **order):
        """Runs a role of ``dying.py`` here; see :meth:`Zygote.run`."""
        return self.zygote.run(
            role,
            **{
                "kind": kind,
                "memory_dir": self.memory,
                "dirpath": self.durable,
                "roots": [self.memory, self.durable],
                **order,
            },
        )

    @property
    def root(self):
        return namespace_root(self.memory, "default")

    def drain(self, **order):
        return self.run("drain", "", root=str(self.root), **order)

    @contextlib.contextmanager
    def store(self):
        opened = open_store(Node.config_of(self.memory, self.durable))
        try:
            yield opened
        finally:
            opened.close()


def verdict(killed, judge):
    """Returns the verdict of ``judge``, which returns ``old`` or ``new``, or raises."""
    doing, effect, path = killed
    try:
        return Verdict(doing, effect, judge())
    except Mixed as error:
        return Verdict(doing, effect, "mixture", f"{path}: {error}")
    except AssertionError as error:
        return Verdict(doing, effect, "loss", f"{path}: {type(error).__name__}: {error}")


def restored(place, kind, allowed, **order):
    """Returns the step that a restart loads, which must be one of the allowed steps, bit for bit."""
    found = place.run("reader", kind, **order).answer
    if found.get("error"):
        raise Lost(found["error"])
    if not found["equal"]:
        raise Mixed(f"step {found['step']} differs from what was saved")
    if found["step"] not in allowed:
        raise Lost(f"step {found['step']} instead of one of {allowed}")
    if order.get("go_on") and found["went_on"] != GOES_ON:
        raise Lost("what was saved after the restart can't be loaded")
    return found["step"]


# ----------------------------------------------------------------------------------------- trainers
def newest(kind, count):
    """Returns the step that a restart finds behind so many operations of a life; None for none."""
    there = {}
    for number, (action, name, _) in enumerate(LIVES[kind][:count], start=1):
        if action == "save":
            there[name] = number
        elif action == "delete":
            there.pop(name)
    return max(there.values(), default=None)


def newest_durable(kind, count):
    """Returns the same if the node is lost, after so many operations of the durable tier."""
    model = story.Model()
    on_tier = [(n, *each) for n, each in enumerate(LIVES[kind], start=1) if is_durable(each)]
    for number, action, name, target in on_tier[:count]:
        model.apply(number, action, name, target)
    return max(model.view().values(), default=None)


def is_durable(operation):
    """Returns True if a drain carries out the operation; a trainer does not look if the target of a removal exists."""
    action, _, what = operation
    return action != "save" or what != "memory"


class Trainer:
    """A trainer that saves, overwrites, prunes, aliases and removes, and its drain: one is killed, or both."""

    def __init__(self, kind, drain, victims, limit=0):
        self.kind = kind
        self.drain = drain
        self.victims = victims
        self.limit = limit
        self.title = f"{kind} life, {victims} killed"
        self._chooser = random.Random(1)
        self._counts = {}

    def rehearse(self, place):
        place.clear()
        effects = place.run("trainer", self.kind, drain=self.drain).effects
        self._counts = {role: len(of_role) for role, of_role in effects.items()}
        return effects["drain" if self.victims == "drain" else "trainer"]

    def at(self, place, point):
        order = {"kill_at": point}
        if self.victims == "drain":
            order = {"drain_kill_at": point}
        elif self.victims == "trainer, then drain":
            order["drain_kill_at"] = self._chooser.randrange(1, self._counts["drain"])
        place.clear()
        run = place.run("trainer", self.kind, drain=self.drain, **order)
        killed = run.killed.get("drain" if self.victims == "drain" else "trainer")
        return verdict(killed, lambda: self._judge(place, len(run.done))) if killed else None

    def _judge(self, place, done):
        last = len(LIVES[self.kind])
        old, new = newest(self.kind, done), newest(self.kind, min(done + 1, last))
        found = restored(place, self.kind, (old, new))
        self._without_node(place)
        if place.root.exists() and (place.root / "drain.json").exists():
            place.drain()
        count = self._without_node(place)
        if self.victims == "drain" and count != sum(is_durable(each) for each in LIVES[self.kind]):
            raise Lost(f"{count} operations are durable, though the trainer has waited for all")
        restored(place, self.kind, (found,), go_on=True)
        return "new" if found == new and done < last else "old"

    def _without_node(self, place):
        if not place.root.exists():
            return 0
        count = sum(each.state == "committed" for each in Queue(place.root).outcomes())
        allowed = (newest_durable(self.kind, count), newest_durable(self.kind, count + 1))
        restored(place, self.kind, allowed, namespace="another-node")
        return count


# ----------------------------------------------------------------------------------------- restores
class Restore:
    """A restart that is itself killed while it restores: the next one loads what it would have loaded."""

    def __init__(self, kind, situation):
        self.kind = kind
        self.situation = situation
        self.limit = 0
        self.title = f"restore of {kind}, {situation}, killed"

    def rehearse(self, place):
        place.clear()
        place.run("trainer", self.kind, drain="thread")
        self._damage(place)
        self._template = [(Path(path), f"{path}-kept") for path in (place.memory, place.durable)]
        for path, kept in self._template:
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(path, kept)
        run = place.run("reader", self.kind)
        self.expected = run.answer["step"]
        assert run.answer["equal"], run.answer
        assert self.expected is not None, run.answer
        return run.effects["reader"]

    def _damage(self, place):
        saves = sorted((place.root / "saves").iterdir())
        if self.situation == "the node lost":
            for save in saves:
                shutil.rmtree(save)
        elif self.situation == "the newest damaged":
            for path in saves[-1].glob("rank-*/*"):
                if path.suffix in (".ckpt", ".distcp", ".pt"):
                    data = bytearray(path.read_bytes())
                    data[len(data) // 2] ^= 1
                    path.write_bytes(data)

    def at(self, place, point):
        for path, kept in self._template:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(kept, path)
        killed = place.run("reader", self.kind, kill_at=point).killed.get("reader")
        return verdict(killed, lambda: self._judge(place)) if killed else None

    def _judge(self, place):
        restored(place, self.kind, (self.expected,))
        restored(place, self.kind, (self.expected,), go_on=True)
        return "old"


def points_of(effects, *, s3=False, sample=0, seed=0):
    """Returns the points to take, from 1: all, or a sample; of a drain to S3 all requests and an eighth of the rest.

    The effects of a drain to S3 on its own files are those of a drain to a directory.
    """
    chooser = random.Random(f"{seed} {len(effects)}")
    points = [
        point
        for point, (_, kind, _) in enumerate(effects, start=1)
        if not s3 or kind.startswith("s3") or chooser.random() < 0.125
    ]
    return sorted(chooser.sample(points, min(sample, len(points)))) if sample else points


class Tally:
    """Counts verdicts."""

    def __init__(self):
        self.verdicts: list = []

    def add(self, verdict):
        if verdict is not None:
            self.verdicts.append(verdict)

    def count(self, found):
        return sum(each.found == found for each in self.verdicts)

    def rows(self, of):
        """Counts by ``of(verdict)``: what, points, old, new, losses, mixtures."""
        groups = collections.defaultdict(collections.Counter)
        for each in self.verdicts:
            groups[of(each)][each.found] += 1
        for what in sorted(groups):
            group = groups[what]
            yield (what, sum(group.values()), *(group[found] for found in ("old", "new", "loss", "mixture")))

    def bad(self):
        return [each for each in self.verdicts if each.found in ("loss", "mixture")]
