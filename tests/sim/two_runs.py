"""Drains of two runs on the same names: the first run has ended and left its queue to its nodes, the second trains on others.

Behind every request each name must read as whole; what the second run has saved must not go by a delete, nor by a
left-over save, of the first; and in the end all must be as if the operations had come one after the other, each run's
in its own order.
"""

import contextlib
import copy
import os
from dataclasses import replace

from sim.drains import NAMES, PATIENCE_S, followed, keep_draining, plan_of, shown
from sim.world import Fates, Serial, World
from support.draining import Node
from support.sharded import full_part, make_part
from support.story import Model

from tiered_checkpoint_io.engine.drain.operations import Request, blocked_by_failures
from tiered_checkpoint_io.model import ids

RUNS = ("20260101T000000.000000-00000001", "20260102T000000.000000-00000002")
#: Numbers of the second run's operations begin behind it: a step shows its run.
SECOND = 100
#: Why a save of several parts may come to nothing, that was half done when another run took its name or deleted it.
LOST = ("removed or replaced after its upload", "none of them has come for")
SAVE, ALIAS, DELETE = "save", "alias", "delete"


def is_second(step):
    return step is not None and step > SECOND


def outcomes(model, run, number, operation, *, left_over):
    """Returns the possible results of an operation, as models; some of the first run spare the second's saves."""
    kind, name, target = operation
    done = copy.deepcopy(model)
    if kind == ALIAS and not model.is_real(target):
        return [model]
    done.apply(number, kind, name, target)
    if run == 1:
        return [done]
    if name in model.view() and not model.is_real(name):
        # Of an alias it is known what its target was when it was made, and the target may have been saved anew.
        return [model, done]
    if not is_second(model.view().get(name)):
        return [done]
    return [model] if kind != SAVE or left_over else [model, done]


def ends(plans, held, *, left_over):
    """All that the names may show in the end, for every order of two plans that keeps the order within each.

    The requests that are ``held`` back come to nothing.
    """
    seen, todo, found = set(), [((frozenset(), frozenset()), Model())], []
    while todo:
        done, model = todo.pop()
        key = (done, repr(sorted(vars(model).items())))
        if key in seen:
            continue
        seen.add(key)
        if all(len(done[run]) == len(plans[run]) for run in (0, 1)):
            found.append(model.view())
        for run, plan in enumerate(plans):
            for index, operation in enumerate(plan):
                before = [plan[each] for each in range(index) if each not in done[run]]
                # A save may overtake saves of other names; deletes and aliases wait.
                if index in done[run] or any(
                    each[0] != SAVE or operation[0] != SAVE or each[1] == operation[1] for each in before
                ):
                    continue
                number = index + 1 + run * SECOND
                now = tuple(each | {index} if which == run else each for which, each in enumerate(done))
                is_held = ids.save_id(RUNS[run], number) in held
                after = [model] if is_held else outcomes(model, run, number, operation, left_over=left_over)
                todo += [(now, each) for each in after]
    return found


class Judge:
    """Looks at each name behind every change."""

    def __init__(self, world, plans, *, left_over):
        self._world, self._last = world, {}
        kinds = [{kind for kind, _, _ in plan} for plan in plans]
        self._may_go = DELETE in kinds[1] or ALIAS in kinds[0] | kinds[1]
        self._may_go_back = not left_over or ALIAS in kinds[0] | kinds[1]

    def __call__(self):
        for name in NAMES:
            step = shown(self._world, name)
            before = self._last.get(name)
            if isinstance(step, str):
                self._world.violation = step
            elif is_second(before) and step is None and not self._may_go:
                self._world.violation = f"{name} showed {before}, and is gone by a delete of the first run"
            elif is_second(before) and step is not None and not is_second(step) and not self._may_go_back:
                self._world.violation = (
                    f"{name} showed {before}, and shows {step} of the first run, which was left over"
                )
            self._last[name] = step


def trainer(world, nodes, run, plan, *, left_over, is_full):
    """All ranks of a run, one after the other, at each of its operations."""

    def work(process):
        process.sleep(world.rng.choice([0.0, 1.0, 30.0]) * run)
        for index, (kind, name, target) in enumerate(plan):
            number = index + 1 + run * SECOND
            if run:
                process.sleep(world.rng.choice([0.0, 0.2, 3.0]))
            if kind == SAVE:
                for rank, node in enumerate(nodes):
                    part, files = (
                        full_part(name, number)
                        if is_full
                        else make_part(
                            name, number, rank, world_size=len(nodes), suffix=f"-{number}", dirpath="d", size=40
                        )
                    )
                    created = 1.0 if left_over and not run else world.now + 1e9
                    content = replace(part.content, save_id=ids.save_id(RUNS[run], number), created=created)
                    node.commit(replace(part, content=content), files)
            else:
                earlier = followed(plan, index + 1) if kind == DELETE else 0
                of = ids.save_id(RUNS[run], earlier + run * SECOND) if earlier else target
                nodes[0].queue.submit(Request(ids.save_id(RUNS[run], number), kind, name, "d", of))
            world.note(f"run {run + 1}: {kind} {number} {name} {target}")

    return work


def life(seed, fates=Fates(), *, folder):
    """One simulated life; its world, closed, with the violation that was found if any."""
    world = World(seed, fates)
    rng = world.rng
    with contextlib.ExitStack() as stack:
        stack.enter_context(Serial())
        stack.callback(world.close)
        runs = []
        for run in (0, 1):
            nodes = []
            for rank in range(rng.choice([1, 1, 2])):
                os.mkdir(f"{folder}/{run}-{rank}", 0o700)
                nodes.append(Node(f"{folder}/{run}-{rank}", "d", wait_timeout_s=500))
                stack.callback(nodes[-1].tier.close)
            runs.append(nodes)
        plans, left_over = [plan_of(rng, rng.randint(1, 4)) for _ in runs], rng.random() < 0.5
        kinds = [len(nodes) == 1 and rng.random() < 0.5 for nodes in runs]
        world.note(f"{[len(each) for each in runs]} nodes, full: {kinds}, left over: {left_over}: {plans}")
        trainers = [
            world.spawn(
                f"run {run + 1}",
                trainer(world, runs[run], run, plans[run], left_over=left_over, is_full=kinds[run]),
                immortal=True,
            )
            for run in (0, 1)
        ]
        world.check = Judge(world, plans, left_over=left_over)
        nodes = {f"{run + 1}.{rank}": node for run in (0, 1) for rank, node in enumerate(runs[run])}

        keep_draining(world, nodes)

        def lost():
            """Saves that were half done when the other run replaced them: their parts went, or did not come."""
            outcomes = (outcome for node in nodes.values() for outcome in node.queue.outcomes())
            return {each.op_id for each in outcomes if any(text in each.error for text in LOST)}

        def is_done():
            if any(each.is_alive for each in trainers):
                return False
            given_up = lost()
            for node in nodes.values():
                left = node.queue.look(node.tier)
                if {each.op_id for each in left} - given_up - blocked_by_failures(left, given_up):
                    return False
            return True

        def held():
            """Returns what came to nothing: lost saves, queued requests, and deletes that follow an absent save."""
            found = lost() | {request.op_id for node in nodes.values() for request in node.queue.requests()}
            for run, plan in enumerate(plans):
                there = {each.op_id for each in runs[run][0].queue.outcomes() if each.state == "committed"}
                for index, (kind, *_) in enumerate(plan):
                    earlier, number = followed(plan, index + 1), index + 1 + run * SECOND
                    if kind == DELETE and earlier and ids.save_id(RUNS[run], earlier + run * SECOND) not in there:
                        found.add(ids.save_id(RUNS[run], number))
            return found

        if not world.run(is_done, PATIENCE_S) and not world.violation:
            waiting = [stored.op_id for node in nodes.values() for stored in node.tier.parts() if stored.pending]
            world.violation = f"not done within {PATIENCE_S:.0f} s: {waiting}"
        seen = {name: step for name in NAMES if (step := shown(world, name)) is not None}
        if not world.violation and not fates.failed and seen not in ends(plans, held(), left_over=left_over):
            world.violation = f"in the end {seen}, which no order of the operations gives"
    return world
