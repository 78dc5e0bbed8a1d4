"""Copies on peers, and restores from them, killed at each of their effects; see ``sweeping.py``."""

import shutil
from pathlib import Path

from support.sweeping import Lost, Mixed, restored, verdict

NUMBERS = [1, 2, 3, 4]
GOES_ON = 90


class Replication:
    """A node saves while another keeps copies; one of the two is killed, and either is then all that is left."""

    def __init__(self, victim, limit=0):
        self.victim = victim
        self.limit = limit
        self.title = f"replication, {victim} killed"

    def rehearse(self, place):
        place.clear()
        run = place.run("pair", "full", numbers=NUMBERS)
        assert run.done[-1] == ["safe", NUMBERS[-1]], run.done
        return run.effects[self.victim]

    def at(self, place, point):
        place.clear()
        run = place.run("pair", "full", numbers=NUMBERS, **{f"{self.victim}_kill_at": point})
        killed = run.killed.get(self.victim)
        return verdict(killed, lambda: self._judge(place, run.done)) if killed else None

    def _judge(self, place, done):
        saved, safe = (max((n for what, n in done if what == which), default=0) for which in ("saved", "safe"))
        begun = min(saved + 1, NUMBERS[-1])
        own = self._restored(place, "a", range(saved, begun + 1))
        # Saves reported as safe are there without the node that saved them; no others except that node's.
        self._restored(place, "b", range(safe, begun + 1))
        self._goes_on(place)
        return "new" if own > saved else "old"

    def _restored(self, place, node, allowed):
        steps = [step or None for step in allowed]
        Path(place.memory, node).mkdir(exist_ok=True)
        return restored(place, "full", steps, memory_dir=f"{place.memory}/{node}") or 0

    def _goes_on(self, place):
        run = place.run("pair", "full", numbers=[GOES_ON])
        if ["safe", GOES_ON] not in run.done:
            raise Lost(f"what is saved after the restart does not get to the peer: {run.done}")
        self._restored(place, "b", [GOES_ON])


class Training:
    """Two nodes train together, and keep copies of each other's shards; one is killed, and perhaps lost as well."""

    def __init__(self, victim, limit=0):
        self.victim = victim
        self.limit = limit
        self.title = f"replication of shards, {victim} killed"

    def rehearse(self, place):
        place.clear()
        run = place.run("pair-train", "sharded", numbers=NUMBERS)
        assert run.done.count(["safe", NUMBERS[-1]]) == 2, run.done
        return run.effects[self.victim]

    def at(self, place, point):
        place.clear()
        run = place.run("pair-train", "sharded", numbers=NUMBERS, **{f"{self.victim}_kill_at": point})
        killed = run.killed.get(self.victim)
        return verdict(killed, lambda: self._judge(place, run.done)) if killed else None

    def _judge(self, place, done):
        # A step that one of the two has reported is whole on both.
        saved, safe = (max((n for what, n in done if what == which), default=0) for which in ("saved", "safe"))
        allowed = range(saved, min(saved + 1, NUMBERS[-1]) + 1)
        kept = f"{place.memory}-kept"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(place.memory, kept)
        found = loaded(place, "sharded", allowed)
        for lost in "ab":
            shutil.rmtree(place.memory)
            shutil.copytree(kept, place.memory)
            shutil.rmtree(f"{place.memory}/{lost}", ignore_errors=True)
            loaded(place, "sharded", range(safe, allowed[-1] + 1))
        run = place.run("pair-train", "sharded", numbers=[GOES_ON])
        if run.done.count(["safe", GOES_ON]) != 2:
            raise Lost(f"what is saved after the restart is not safe: {run.done}")
        shutil.rmtree(f"{place.memory}/a")
        loaded(place, "sharded", [GOES_ON])
        return "new" if found > saved else "old"


def loaded(place, kind, allowed):
    """Returns the step that both nodes load, which must be one of the allowed steps; 0 for nothing, if allowed."""
    done = place.run("pair-load", kind).done
    steps = set()
    for rank in (0, 1):
        came = [[step, equal] for who, step, equal in done if who == rank]
        nothing = 0 in allowed and came and "NotFound" in str(came[0][1])
        if not came or not (nothing or came[0][0] in allowed):
            raise Lost(f"rank {rank} has loaded {came} instead of one of {[*allowed]}")
        if not nothing and came[0][1] is not True:
            raise Mixed(f"step {came[0][0]} differs from what was saved")
        steps.add(0 if nothing else came[0][0])
    if len(steps) > 1:
        raise Mixed(f"the ranks have loaded different steps: {steps}")
    return steps.pop()


class RestoreFromPeers:
    """Two nodes load together, of which one has lost its memory; one of them is killed, and both begin again."""

    def __init__(self, kind, victim, limit=0):
        self.kind = kind
        self.victim = victim
        self.limit = limit
        self.title = f"restore of {kind} from peers, {victim} killed"

    def rehearse(self, place):
        place.clear()
        made = place.run("pair" if self.kind == "full" else "pair-train", self.kind, numbers=NUMBERS)
        assert ["safe", NUMBERS[-1]] in made.done
        shutil.rmtree(f"{place.memory}/a")
        self._kept = f"{place.memory}-kept"
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(place.memory, self._kept)
        run = place.run("pair-load", self.kind)
        assert [step for _, step, equal in run.done if equal is True] == [NUMBERS[-1]] * 2, run.done
        return run.effects[self.victim]

    def at(self, place, point):
        shutil.rmtree(place.memory)
        shutil.copytree(self._kept, place.memory)
        run = place.run("pair-load", self.kind, **{f"{self.victim}_kill_at": point})
        killed = run.killed.get(self.victim)
        return verdict(killed, lambda: self._judge(place)) if killed else None

    def _judge(self, place):
        for _ in range(2):
            loaded(place, self.kind, NUMBERS[-1:])
        # And what came home is whole there: the other one may be lost now.
        shutil.rmtree(f"{place.memory}/b")
        if self.kind == "full":
            loaded(place, self.kind, NUMBERS[-1:])
        return "old"
