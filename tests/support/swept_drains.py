"""Drains that are killed at each of their effects; see ``sweeping.py``."""

import functools
import random

from support import sharded, story
from support.committing import swept
from support.draining import Node, names, objects, readable
from support.sweeping import Lost, Mixed, verdict

#: Above the smallest part size, so that an upload to S3 goes in two parts.
LARGE = (8 << 20) + 5000
MOMENTS = story.moments()


@functools.cache
def content(number, large):
    is_large = large and story.OPERATIONS[number - 1][1] == "deep/c.ckpt"
    return random.Random(number).randbytes(LARGE if is_large else 1000 + number)


class FullDrain:
    """A drain that carries out the thirteen operations of ``story.py``, killed once, or once more at its restart."""

    title = "drain of full checkpoints killed"

    def __init__(self, *, large=False, limit=0):
        self.limit = limit
        self._large = large
        self._chooser = random.Random(2)
        self._count = 0

    def rehearse(self, place):
        _, run = self._run(place, 0)
        self._count = len(run.effects["drain"])
        return run.effects["drain"]

    def at(self, place, point):
        node, run = self._run(place, point)
        killed = run.killed.get("drain")
        return verdict(killed, lambda: self._judge(place, node)) if killed else None

    def _run(self, place, point):
        place.clear()
        node = Node(place.memory, place.durable, chunk_size_MB=8, max_write_concurrency=1)
        self.fill(node)
        node.tier.close()
        return node, place.drain(kill_at=point)

    def fill(self, node):
        for number, (action, name, target) in enumerate(story.OPERATIONS, start=1):
            if action == "save":
                node.save(name, content(number, self._large))
            else:
                node.request(action, name, target)

    def _judge(self, place, node):
        with place.store() as store:
            found = self.moment(store, node)
            if self._chooser.random() < 0.5:
                place.drain(kill_at=self._chooser.randrange(1, self._count))
                self.moment(store, node)
            place.drain()
            self.finished(store, node)
            if [stored for stored in node.tier.parts() if stored.pending] or node.queue.requests():
                raise Lost("the queue is not empty")
        return found

    def number_of(self, data):
        saves = [n for n, (action, *_) in enumerate(story.OPERATIONS, start=1) if action == "save"]
        return next((n for n in saves if data == content(n, self._large)), "unknown bytes")

    def view(self, store):
        try:
            # An alias whose target is gone is none.
            found = {name: readable(store, name) for name in names(store)}
            return {name: self.number_of(data) for name, data in found.items() if data is not None}
        except AssertionError as error:
            raise Mixed(str(error)) from error

    def moment(self, store, node):
        """After all operations that were reported as done, or a step into the next one."""
        count = len([outcome for outcome in node.queue.outcomes() if outcome.state == "committed"])
        seen, now, then = self.view(store), MOMENTS[count][0], MOMENTS[min(count + 1, len(MOMENTS) - 1)][0]
        for name in sorted({*seen, *now, *then}):
            if seen.get(name) not in (now.get(name), then.get(name)):
                text = f"{name} shows {seen.get(name)} behind {count} operations: {now}, then {then}"
                raise (Mixed if seen.get(name) == "unknown bytes" else Lost)(text)
        return "old" if seen == now else "new"

    def finished(self, store, node):
        swept(store)
        if (self.view(store), objects(store)) != MOMENTS[-1]:
            raise Lost(f"at the end {self.view(store)}, {objects(store)} are there")
        if node.states() != {story.op_id(n): "committed" for n in range(1, len(MOMENTS))}:
            raise Lost(f"{node.states()}")


class ShardedDrain(FullDrain):
    """Two ranks of one node: a save, another over it, an alias, a third save, and a delete."""

    title = "drain of sharded checkpoints killed"
    later = ((None, None, None), (1, None, None), (2, None, None), (2, 2, None), (2, 2, 4), (None, None, 4))

    def fill(self, node):
        for number, name in ((1, "a"), (2, "a"), (4, "b")):
            for rank in (1, 0):
                size = LARGE if self._large and (number, rank) == (2, 1) else 1000
                node.part(name, number, rank, suffix=f"-{number}", size=size)
            if number == 2:
                node.alias("last", "a")
        node.delete("a")

    def moment(self, store, node):
        try:
            seen = tuple(sharded.readable(store, name) for name in ("a", "last", "b"))
        except AssertionError as error:
            raise Mixed(str(error)) from error
        count = sum(node.states().get(story.op_id(number)) == "committed" for number in range(1, 6))
        if seen not in self.later[count : count + 2]:
            raise Lost(f"{count} operations have ended, but a reader sees {seen}")
        return "old" if seen == self.later[count] else "new"

    def finished(self, store, node):
        kept = {"b/.metadata", *(f"b/__{file}-4.distcp" for file in ("0_0", "0_1", "1_0", "1_1"))}
        swept(store)
        left = sharded.incomplete(store)
        if (set(names(store)) - {"last"}, set(objects(store)), left) != ({"b"}, kept, []):
            raise Lost(f"at the end {objects(store)}, {left} are there")
        seen = sharded.readable(store, "last"), sharded.readable(store, "b")
        if set(node.states().values()) != {"committed"} or seen != (None, 4):
            raise Lost(f"{node.states()}")
