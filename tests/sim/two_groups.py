"""Two process groups of one job save side by side to one dirpath, and one node is slow: for longer than every timeout.

Each group has a coordinator of its own, on a node of its own, and commits without a look at the other. The requests of
the slow node take up to an hour each, so parts of its group wait on the durable tier while the other group commits,
sweeps, and commits again. No process is killed, so every save must be committed in the end, and read as whole before.
"""

import contextlib
import os

from sim.drains import PATIENCE_S, drain, shown
from sim.world import Fates, MemoryStore, Serial, World
from support.draining import Node

from tiered_checkpoint_io.clock import Timing

GROUPS = ("tp0", "tp1")
RANKS = 2
#: Looks are rarer than in life: they would be most of what happens.
TIMING = Timing(drain_rest_s=5.0, full_look_s=100.0, gather_max_s=60.0, redo_max_s=300.0)
#: A wait for parts of others is over by then, and an unnamed save is old.
WAIT_S, AGE_S = 600, 3600


class SlowStore(MemoryStore):
    """The world's objects over a line on which each request takes up to an hour."""

    def _do(self, what, key, effect, *, changes=False):
        self._process.sleep(self._world.rng.choice([100.0, 1000.0, 4000.0]))
        return super()._do(what, key, effect, changes=changes)


def trainer(world, nodes, group, count, pause_s):
    """All ranks of a group, at each of its saves."""

    def work(process):
        # The saves of both groups are of one run.
        for number in range(1 + group, 1 + group + len(GROUPS) * count, len(GROUPS)):
            process.sleep(world.rng.uniform(0.5, 1.5) * pause_s)
            name = f"{GROUPS[group]}/step_{number}"
            for rank, node in enumerate(nodes):
                options = {"suffix": f"-{number}", "size": 40, "series": GROUPS[group], "world_size": RANKS}
                node.part(name, number, rank, **options)
            world.note(f"{process.name} saves {name}")
            world.saved[name] = number

    return work


def life(seed, fates=Fates(), *, folder):
    """One simulated life; its world, closed, with the violation that was found if any."""
    world = World(seed, Fates(0.0, 0.0, 0.0, 0.0), TIMING)
    world.saved, rng, ranks = {}, world.rng, [(group, rank) for group in range(len(GROUPS)) for rank in range(RANKS)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(Serial())
        stack.callback(world.close)
        nodes, slow = {}, rng.choice(ranks)
        for group, rank in ranks:
            os.mkdir(f"{folder}/{group}-{rank}", 0o700)
            nodes[group, rank] = node = Node(f"{folder}/{group}-{rank}", "d", wait_timeout_s=WAIT_S, sweep_age_s=AGE_S)
            stack.callback(node.tier.close)
            store = SlowStore if (group, rank) == slow else MemoryStore
            world.spawn(f"drain {group}.{rank}", drain(world, node, store), immortal=True)
        world.note(f"the drain of rank {slow[1]} of {GROUPS[slow[0]]} is slow")
        trainers = [
            world.spawn(
                GROUPS[group],
                trainer(world, [nodes[group, rank] for rank in range(RANKS)], group, count, pause_s),
                immortal=True,
            )
            for group, (count, pause_s) in enumerate([(rng.randint(1, 3), 3000.0), (rng.randint(3, 6), 2500.0)])
        ]

        def judge():
            for name, number in world.saved.items():
                if (step := shown(world, name)) not in (None, number):
                    world.violation = f"{name} shows {step}"

        def is_done():
            left = any(stored.pending for node in nodes.values() for stored in node.tier.parts())
            return not left and not any(each.is_alive for each in trainers)

        world.check = judge
        if not world.run(is_done, 12 * PATIENCE_S) and not world.violation:
            world.violation = f"not done within {12 * PATIENCE_S:.0f} s"
        missing = [name for name in world.saved if shown(world, name) is None]
        if missing and not world.violation:
            world.violation = f"in the end {missing} are not committed"
    return world
