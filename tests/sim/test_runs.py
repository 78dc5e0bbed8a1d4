"""Simulated lives of runs: a sample of ``make test-sim``, and stories that they have found."""

import contextlib

import pytest
import torch
from sim import runs
from sim.machines import Machine, Odds, Store, operating_system
from sim.world import Fates, World
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

KINDS = {"calm": runs.CALM, "fatal": runs.FATAL, "rough": runs.ROUGH}


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.matrix) for name in ("calm", "rough")] + ["fatal"]
)
def test_no_run_loses_mixes_or_passes_over_a_checkpoint(kind):
    steps, found = 0, []
    for seed, world in runs.lives(range(20), KINDS[kind]):
        steps += world.steps
        found += [f"seed {seed}: {world.violation}"] if world.violation else []
    assert found == []
    assert steps > 400


def test_a_seed_gives_the_same_runs_again():
    (_, first), (_, again), (_, other) = (next(runs.lives([seed], runs.ROUGH)) for seed in (7, 7, 8))
    assert first.history == again.history
    assert first.digest == again.digest != other.digest


class Stage:
    """Machines on which a test's own processes run, without any fate."""

    def __init__(self, folder, count):
        self.world = World(0, Fates(0, 0, 0, 0))
        self.world.odds, self.world.current = Odds(), None
        self.machines = [Machine(self.world, f"node {n}", f"{folder}/{n}") for n in range(count)]

    def play(self, *parts, limit_s=10_000.0):
        """Carries out a story on each machine, at once; each gets its clock and a Checkpointer."""

        def process(machine, part):
            config = build(TieredCheckpointConfig.from_any, dirpath=Store.url, memory_dir=machine.folder, **runs.CONFIG)
            part(machine.clock, Checkpointer(config, session=Session(config, logger=runs.LOG, clock=machine.clock)))

        with contextlib.ExitStack() as stack:
            stack.enter_context(operating_system(self.world, runs.LOG))
            stack.callback(self.world.close)
            started = [
                machine.start(f"run {n}", lambda machine=machine, part=part: process(machine, part))
                for n, (machine, part) in enumerate(zip(self.machines, parts, strict=True))
            ]
            idle = self.machines[0].start("idle", self._idle, immortal=True)
            assert self.world.run(lambda: not any(each.is_alive for each in started), limit_s)
            idle.end()
        assert self.world.violation == ""

    def _idle(self):
        while True:
            self.machines[0].clock.sleep(1000.0)


def state(step):
    return {"w": torch.full((4,), step), "global_step": step}


@pytest.mark.parametrize("stays_s", [2.0, 40.0], ids=["a short visit", "until it is refused"])
def test_what_a_run_saves_after_another_has_come_by_is_newer(stays_s, memory_dir):
    """The other began later; its one checkpoint must not count as newer than all that the first goes on to save."""
    loaded = []

    def first(clock, checkpointer):
        checkpointer.save(state(1), "a-1.ckpt")
        clock.sleep(100.0)
        checkpointer.save(state(3), "a-3.ckpt")
        clock.sleep(60.0)
        checkpointer.close()

    def other(clock, checkpointer):
        clock.sleep(20.0)
        checkpointer.save(state(2), "b-2.ckpt")
        clock.sleep(stays_s)
        with contextlib.suppress(Exception):
            checkpointer.close()
        clock.sleep(200.0)
        checkpointer = Checkpointer(
            checkpointer.config, session=Session(checkpointer.config, logger=runs.LOG, clock=clock)
        )
        loaded.append(checkpointer.load("tiered:latest")["global_step"])

    Stage(memory_dir, 2).play(first, other)
    assert loaded == [3]
