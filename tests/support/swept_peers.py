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
        # What was told to be safe is there without the node that saved it; nothing else but what that has saved.
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


class RestoreFromPeers:
    """Two nodes load together, of which one has lost its memory; one of them is killed, and both begin again."""

    def __init__(self, victim, limit=0):
        self.victim = victim
        self.limit = limit
        self.title = f"restore from peers, {victim} killed"

    def rehearse(self, place):
        place.clear()
        assert ["safe", NUMBERS[-1]] in place.run("pair", "full", numbers=NUMBERS).done
        shutil.rmtree(f"{place.memory}/a")
        self._kept = f"{place.memory}-kept"
        shutil.rmtree(self._kept, ignore_errors=True)
        shutil.copytree(place.memory, self._kept)
        run = place.run("pair-load", "full")
        self._check(run.done)
        return run.effects[self.victim]

    def at(self, place, point):
        shutil.rmtree(place.memory)
        shutil.copytree(self._kept, place.memory)
        run = place.run("pair-load", "full", **{f"{self.victim}_kill_at": point})
        killed = run.killed.get(self.victim)
        return verdict(killed, lambda: self._judge(place)) if killed else None

    def _judge(self, place):
        self._check(place.run("pair-load", "full").done)
        for node in "ab":
            restored(place, "full", [NUMBERS[-1]], memory_dir=f"{place.memory}/{node}", go_on=True)
        return "old"

    def _check(self, done):
        for rank in (0, 1):
            told = [[step, equal] for who, step, equal in done if who == rank]
            if not told or told[0][0] != NUMBERS[-1]:
                raise Lost(f"rank {rank} has loaded {told}")
            if told[0][1] is not True:
                raise Mixed(f"step {told[0][0]} differs from what was saved")
