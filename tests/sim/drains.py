"""Drains of one job on several nodes: what they make of saves, aliases and deletes, judged against a dictionary.

The trainers of all nodes carry out the same plan, each at its own time. Behind every request each name must read as
whole, must never go back in the history that the dictionary has for it, and in the end all must be as it says.
"""

import contextlib
import logging
import os

from sim.world import Fates, MemoryStore, Peek, Serial, World
from support.draining import Node
from support.sharded import readable
from support.story import RUN, Model

from tiered_checkpoint_io.engine.drain import worker
from tiered_checkpoint_io.engine.drain.operations import Request
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.model import ids

NAMES = ("a", "b", "last")
LOG = logging.getLogger("simulation")
LOG.propagate = False
LOG.addHandler(logging.NullHandler())
#: Virtual seconds within which all must be done once the trainers have ended.
PATIENCE_S = 50_000.0


def plan_of(rng, count):
    """Operations of a job: kind, name, target."""
    plan = []
    for _ in range(count):
        kind, name = rng.choices(["save", "alias", "delete"], [5, 2, 2])[0], rng.choice(NAMES)
        saved = [other for what, other, _ in plan if what == "save"]
        if kind == "delete" and saved:
            # Mostly, as a trainer does it: an older one makes way for the newest.
            name = rng.choice([other for other in saved if other != saved[-1]] or NAMES)
        plan.append((kind, name, rng.choice([each for each in NAMES if each != name]) if kind == "alias" else ""))
    return plan


def views_of(plan):
    """Returns the content of all names at first, and after each operation."""
    model, views = Model(), [{}]
    for number, (kind, name, target) in enumerate(plan, start=1):
        # An alias of what was never saved, or is an alias itself, is refused by the trainer.
        if kind == "alias" and not model.is_real(target):
            views.append(views[-1])
            continue
        model.apply(number, kind, name, target)
        views.append(model.view())
    return views


def followed(plan, number):
    """The number of the save that a delete follows, as a session derives it; 0 for none."""
    return max((at for at, (kind, *_) in enumerate(plan[: number - 1], start=1) if kind == "save"), default=0)


def shown(world, name):
    """The step that a reader finds complete under a name; None if it is absent; text if it finds none."""
    try:
        return readable(Peek(world), name)
    except (AssertionError, TieredCheckpointError) as error:
        return f"broken: {error}"


class Judge:
    """Follows what each name shows through the history that the dictionary has for it."""

    def __init__(self, world, plan, *, strict):
        self._world, self._plan, self._views, self._strict = world, plan, views_of(plan), strict
        self._at = dict.fromkeys(NAMES, 0)

    def __call__(self):
        for name in NAMES:
            step = shown(self._world, name)
            if isinstance(step, str):
                self._world.violation = step
            elif self._strict:
                self._follow(name, step)

    def _follow(self, name, step):
        at = self._at[name]
        later = (number for number in range(at, len(self._views)) if self._views[number].get(name) == step)
        found = next(later, None)
        if found is None:
            history = [view.get(name) for view in self._views]
            self._world.violation = f"{name} shows {step}, behind operation {at} of {history}"
        elif found > at:
            self._at[name] = found
            if self._plan[found - 1][:2] == ("delete", name):
                self._check_delete(name, found)

    def _check_delete(self, name, number):
        """Checks that a good checkpoint stays until the save that its delete follows is there."""
        earlier = followed(self._plan, number)
        if earlier and self._at[self._plan[earlier - 1][1]] < earlier:
            self._world.violation = f"{name} is gone (operation {number}), and save {earlier} is not there"


def trainer(world, node, rank, ranks, plan):
    """A rank's part of each save, and rank 0's requests."""

    def work(process):
        views = views_of(plan)
        for number, (kind, name, target) in enumerate(plan, start=1):
            process.sleep(world.rng.choice([0.0, 0.2, 3.0]))
            if kind == "save":
                node.part(name, number, rank, world_size=ranks, suffix=f"-{number}", size=40)
                world.note(f"{process.name} saves {number} as {name}")
            elif rank == 0 and (kind == "delete" or views[number] is not views[number - 1]):
                earlier = followed(plan, number) if kind == "delete" else 0
                of = ids.save_id(RUN, earlier) if earlier else target
                node.queue.submit(Request(ids.save_id(RUN, number), kind, name, "d", of))
                world.note(f"{process.name} {kind} {number} {name} {target}")

    return work


def drain(world, node, store=MemoryStore):
    """A drain of a node, started anew if it was killed."""

    def work(process):
        class Never:
            def is_set(self):
                return False

        made = worker.Drain(
            node.root,
            logger=LOG,
            stop=Never(),
            stay=True,
            open_store=lambda *_: store(world, process),
            clock=process.clock,
        )
        made._loop(once=False)

    return work


def keep_draining(world, nodes):
    """Starts the drain of each node, and again those that were killed, as trainers do."""
    drains = {}

    def guardian(process):
        while True:
            for name, node in nodes.items():
                if name not in drains or not drains[name].is_alive:
                    drains[name] = world.spawn(f"drain {name}", drain(world, node))
            process.sleep(world.rng.choice([0.1, 1.0, 30.0]))

    world.spawn("guardian", guardian, immortal=True)


def life(seed, fates=Fates(), *, folder):
    """One simulated life; its world, closed, with the violation that was found if any."""
    world = World(seed, fates)
    rng, nodes = world.rng, []
    with contextlib.ExitStack() as stack:
        stack.enter_context(Serial())
        stack.callback(world.close)
        ranks = rng.choice([1, 2, 2, 3])
        for rank in range(ranks):
            os.mkdir(f"{folder}/{rank}", 0o700)
            nodes.append(Node(f"{folder}/{rank}", "d", wait_timeout_s=100_000))
            stack.callback(nodes[-1].tier.close)
        plan = plan_of(rng, rng.randint(2, 7))
        views = views_of(plan)
        world.note(f"{ranks} nodes: {plan}")
        trainers = [
            world.spawn(f"trainer {rank}", trainer(world, node, rank, ranks, plan), immortal=True)
            for rank, node in enumerate(nodes)
        ]
        world.check = Judge(world, plan, strict=not fates.failed)

        keep_draining(world, dict(enumerate(nodes)))

        def is_done():
            return (
                not any(each.is_alive for each in trainers)
                and not any(stored.pending for node in nodes for stored in node.tier.parts())
                and not any(node.queue.requests() for node in nodes)
            )

        if not world.run(is_done, PATIENCE_S) and not world.violation:
            waiting = [stored.op_id for node in nodes for stored in node.tier.parts() if stored.pending]
            world.violation = (
                f"not done within {PATIENCE_S:.0f} s: {waiting}, {[node.queue.requests() for node in nodes]}"
            )
        seen = {name: step for name in NAMES if (step := shown(world, name)) is not None}
        if not world.violation and not fates.failed and seen != views[-1]:
            world.violation = f"in the end {seen}, not {views[-1]}"
    return world
