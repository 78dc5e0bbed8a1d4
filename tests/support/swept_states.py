"""Stories of a durable tier in a directory, and what a reader must see in each state that a crash may leave."""

import logging
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

from support import crash_states, sharded
from support.draining import Node, names, objects
from support.sweeping import Lost, Mixed
from support.swept_drains import FullDrain, ShardedDrain

from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.stores.directory import DirectoryStore

LOG = logging.getLogger("crash-states")


class Local(ShardedDrain):
    """The same story without a file that changes over: two ranks, each its own state."""

    title = "local checkpoints"
    later = ((None, None, None), (1, None, None), (2, None, None), (2, None, 4), (None, None, 4))

    def fill(self, node):
        for number, name in ((1, "a"), (2, "a"), (4, "b")):
            for rank in (1, 0):
                node.part(name, number, rank, suffix=f"-{number}", kind="local")
        node.delete("a")

    def finished(self, store, node):
        kept = [f"b/__{file}-4.distcp" for file in ("0_0", "0_1", "1_0", "1_1")]
        if (names(store), objects(store), sharded.readable(store, "b")) != (["b"], kept, 4):
            raise Lost(f"at the end {names(store)}, {objects(store)} are there")


class Full(FullDrain):
    title = "full checkpoints"


class Sharded(ShardedDrain):
    title = "sharded checkpoints"


def drain(node):
    assert Drain(node.root, logger=LOG).run(once=True), "something was left undone"


class Told:
    """A node of which only the number of committed operations is asked: it is gone."""

    def __init__(self, committed):
        self._committed = committed
        self.queue = self

    def states(self):
        return dict.fromkeys(self._committed, "committed")

    def outcomes(self):
        return [SimpleNamespace(state="committed") for _ in self._committed]


def try_story(story, folder, *, seed=0, sample=1.0):
    """Returns the number of states tried, and the verdicts that are no good."""
    chooser, bad, seen = random.Random(seed), [], set()
    memory, durable = f"{folder}/memory", f"{folder}/durable"
    Path(memory).mkdir(mode=0o700)
    node = Node(memory, durable, max_write_concurrency=1)
    story.fill(node)
    pending = []

    def after(recorder):
        if chooser.random() >= sample:
            return
        done = frozenset(op for op, state in node.states().items() if state == "committed")
        for tree in crash_states.states(recorder, chooser):
            key = hash((done, tuple(sorted(tree.items(), key=lambda item: item[0]))))
            if key not in seen:
                seen.add(key)
                pending.append((done, tree))

    with crash_states.recording(durable, after) as recorder:
        drain(node)
    assert crash_states.present(recorder.top) == crash_states.read(durable), "the model does not follow what is there"
    story.finished(DirectoryStore(durable), node)
    node.tier.close()
    for number, (done, tree) in enumerate(pending):
        why = _try_state(story, Told(done), tree, f"{folder}/state", anew=number % 4 == 0)
        if why:
            bad.append(why)
    return len(pending), bad


def _try_state(story, node, tree, folder, *, anew):
    crash_states.write(tree, f"{folder}/durable")
    store = DirectoryStore(f"{folder}/durable")
    try:
        story.moment(store, node)
        if anew:
            _save_anew(story, node, store, folder)
    except Mixed as error:
        return f"mixture: {error}"
    except AssertionError as error:
        return f"loss: {type(error).__name__}: {error}"
    except Exception as error:
        return f"loss: {type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder)
    return None


def _save_anew(story, before, store, folder):
    """Saves a further checkpoint on a node with empty memory; readable checkpoints must stay readable."""
    Path(f"{folder}/memory").mkdir(mode=0o700)
    node = Node(f"{folder}/memory", store.url)
    node.number = 50
    node.save("anew.ckpt", b"anew")
    drain(node)
    node.tier.close()
    if store.get("anew.ckpt") != b"anew":
        raise Lost("the new save is not there")
    store.delete("anew.ckpt")
    store.delete(".tiered/manifests/anew.ckpt.json")
    story.moment(store, before)


STORIES = (Full, Sharded, Local)
