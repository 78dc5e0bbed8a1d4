"""Work of processes until they are killed: ``killing.py`` counts and kills, and ``sweeping.py`` judges."""

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
import threading
import types
import warnings
from pathlib import Path

from support import story
from support.supporting import build

from tiered_checkpoint_io.clock import Clock, Timing
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

PATIENCE_S = 40
NOWHERE = "http://127.0.0.1:9"
#: Hundreds of lives would wait for the next look of a drain that has nothing to do.
SOON = Clock(Timing(drain_rest_s=0.01, respawn_s=0.02, full_look_s=0.1))
#: Operations of a job: action, name, and target of an alias or tiers of a save.
LIVES = {
    # Memory keeps two: the fourth save prunes. One overwrites, one goes whose alias stays, one is the newest and goes.
    "full": [
        ("save", "a.ckpt", "both"),
        ("save", "b.ckpt", "memory"),
        ("alias", "last.ckpt", "a.ckpt"),
        ("save", "c.ckpt", "both, waited for"),
        ("alias", "last.ckpt", "c.ckpt"),
        ("save", "a.ckpt", "both"),
        ("save", "d.ckpt", "memory"),
        ("delete", "c.ckpt", ""),
        ("delete", "d.ckpt", ""),
    ],
    "sharded": [
        ("save", "step_1", "both"),
        ("save", "step_2", "memory"),
        ("save", "step_3", "both, waited for"),
        ("save", "step_3", "both"),
        ("save", "step_5", "memory"),
    ],
}
LIVES["local"] = LIVES["sharded"]
GOES_ON = 99


def import_all():
    """Imports modules that a process would otherwise import while it is watched, or each time again."""
    import torch.distributed.checkpoint as torch_dcp

    from tiered_checkpoint_io.engine import checkpointer  # noqa: F401
    from tiered_checkpoint_io.engine.drain import client  # noqa: F401
    from tiered_checkpoint_io.formats.torch_file import plan
    from tiered_checkpoint_io.stores import directory, open_store  # noqa: F401

    # The first client reads botocore's models; it asks nothing of S3.
    open_store(TieredCheckpointConfig.from_any({"dirpath": "s3://nowhere/at-all", "endpoint_url": NOWHERE})).close()
    # The first plan, and the first save and load, of a process import by themselves.
    plan(story.state(0))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.save(sharded_state(0), storage_writer=torch_dcp.FileSystemWriter(folder), no_dist=True)
        torch_dcp.load(sharded_state(0), storage_reader=torch_dcp.FileSystemReader(folder), no_dist=True)
    logging.disable(logging.CRITICAL)


# ----------------------------------------------------------------------------------------- drains
def name_operations(counter):
    """Labels effects of drains with their operation."""
    from tiered_checkpoint_io.engine.drain.worker import Drain

    execute, seen = Drain._execute, set()

    def named(drain, operation, *args):
        what = {"save": "commit", "part": "parts"}.get(operation.action, operation.action)
        if what == "commit" and operation.name in seen:
            what = "overwrite"
        seen.add(operation.name)
        with counter.during(f"drain: {what}", own_thread=threading.current_thread() is not threading.main_thread()):
            return execute(drain, operation, *args)

    Drain._execute = named


def run_drain(order, counter):
    """Carries out what is queued."""
    from tiered_checkpoint_io.engine.drain.worker import Drain

    name_operations(counter)
    assert Drain(Path(order["root"]), clock=SOON).run(once=True)


class ForkedDrain:
    """Replaces ``subprocess.Popen`` in the trainer: a drain in its own session, without a start of Python."""

    order, counter, started = None, None, 0

    def __init__(self, command, **_):
        cls = ForkedDrain
        root, kill_at = Path(command[-1]), 0 if cls.started else cls.order.get("drain_kill_at", 0)
        cls.started += 1
        self.pid = os.fork()
        if self.pid == 0:
            self._work(root, kill_at)
        self._status = None

    def _work(self, root, kill_at):
        from tiered_checkpoint_io.engine.drain.worker import Drain

        os.setsid()
        signal.alarm(PATIENCE_S)
        counter = self.counter
        counter.role, counter.phase, counter.kill_at, counter.effects = "drain", "drain", kill_at, []
        counter._lock = threading.Lock()
        counter._own_phase = threading.local()
        try:
            Drain(root, clock=SOON, for_trainer=True).run()
        except BaseException as error:
            counter.tell(error=repr(error))
        counter.tell_all()
        os._exit(0)

    def poll(self):
        if self._status is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self._status = status if pid else None
        return self._status

    def wait(self, timeout):
        raise subprocess.TimeoutExpired("drain", timeout)


def fork_drains(order, counter):
    from tiered_checkpoint_io.engine.drain import process

    ForkedDrain.order, ForkedDrain.counter = order, counter
    process.subprocess = types.SimpleNamespace(
        Popen=ForkedDrain, DEVNULL=None, TimeoutExpired=subprocess.TimeoutExpired
    )


# --------------------------------------------------------------------------------------- trainers
def options_of(order):
    return {
        "dirpath": order["dirpath"],
        "memory_dir": order["memory_dir"],
        "namespace": order.get("namespace", "default"),
        "wait_timeout_s": PATIENCE_S,
        "on_save_error": "raise",
        "max_read_concurrency": 1,
        "max_write_concurrency": 1,
        "max_pending": 20,
    }


def run_trainer(order, counter):
    """Runs a life of :data:`LIVES`; reports each operation that is done."""
    from tiered_checkpoint_io.engine.save import saver

    name_operations(counter)
    if order["drain"] == "process":
        fork_drains(order, counter)
    retain = saver.retain

    def retaining(*args, **options):
        with counter.during("prune"):
            retain(*args, **options)

    saver.retain = retaining
    life = (FullLife if order["kind"] == "full" else ShardedLife)(order)
    seen = set()
    for number, (action, name, what) in enumerate(LIVES[order["kind"]], start=1):
        doing = "overwrite" if name in seen and action == "save" else action
        seen.add(name)
        with counter.during(f"{doing} {order['kind']}"):
            getattr(life, action)(number, name, what)
        counter.tell(done=number)
    with counter.during(f"close {order['kind']}"):
        life.close()
    counter.tell(done=number + 1)


class FullLife:
    def __init__(self, order):
        from tiered_checkpoint_io.engine.checkpointer import Checkpointer

        self.made = Checkpointer(build(TieredCheckpointConfig.from_any, **options_of(order), drain=order["drain"]))
        self.made.session.clock = SOON

    def save(self, number, name, what):
        tiers = {"memory"} if what == "memory" else {"memory", "durable"}
        self.made.save(story.state(number), name, tiers=tiers, wait="waited" in what)

    def alias(self, _, name, target):
        self.made.alias(name, target)

    def delete(self, _, name, __):
        self.made.remove(name)

    def close(self):
        self.made.close()


class ShardedLife:
    """Sharded and local checkpoints of one rank; several ranks meet in the drains' stories."""

    def __init__(self, order):
        self.kind = order["kind"]
        self.options = {**options_of(order), "drain": order["drain"]}
        self.writer = None

    def save(self, number, name, what):
        from tiered_checkpoint_io import TieredStorageWriter, dcp

        self.writer = build(TieredStorageWriter, **self.options, save_to_s3=what != "memory", wait="waited" in what)
        self.writer.session.clock = SOON
        dcp.save(sharded_state(number), checkpoint_id=name, storage_writer=self.writer, no_dist=True, kind=self.kind)

    def close(self):
        self.writer.close()


def sharded_state(number):
    import torch

    return {**story.state(number), "global_step": torch.tensor(number)}


# ---------------------------------------------------------------------------------------- readers
def run_reader(order, counter):
    """Loads what ``order`` names, by default the newest, and compares it bit for bit; can save and load one more."""
    with counter.during(f"restore {order['kind']}"):
        try:
            found = (load_full if order["kind"] == "full" else load_sharded)(order)
        except Exception as error:
            return {"step": None, "error": f"{type(error).__name__}: {error}"}
    return found


def load_full(order):
    import torch

    from tiered_checkpoint_io.engine.checkpointer import Checkpointer

    made = Checkpointer(build(TieredCheckpointConfig.from_any, **options_of(order), drain="thread"))
    state = made.load(order.get("name", "tiered:latest"))
    found = {"step": None, "equal": True}
    if state:
        step = state["global_step"]
        found = {"step": step, "equal": torch.equal(state["w"], story.state(step)["w"]), "tier": made.restored.tier}
    if order.get("go_on"):
        made.save(story.state(GOES_ON), "on.ckpt", tiers={"memory"})
        found["went_on"] = made.load("tiered:latest")["global_step"]
    made.session.release()
    return found


def load_sharded(order):
    import torch

    from tiered_checkpoint_io import TieredStorageWriter, dcp
    from tiered_checkpoint_io.errors import CheckpointNotFoundError

    def load():
        blank = {"w": torch.zeros(20_000), "global_step": torch.tensor(-1)}
        reader = build(
            dcp.load, blank, checkpoint_id=order.get("name"), no_dist=True, kind=order["kind"], **options_of(order)
        )
        reader.close()
        return blank

    try:
        state = load()
    except CheckpointNotFoundError:
        found = {"step": None, "equal": True}
    else:
        step = int(state["global_step"])
        found = {"step": step, "equal": torch.equal(state["w"], story.state(step)["w"])}
    if order.get("go_on"):
        writer = build(TieredStorageWriter, **options_of(order), save_to_s3=False)
        dcp.save(
            sharded_state(GOES_ON), checkpoint_id="step_99", storage_writer=writer, no_dist=True, kind=order["kind"]
        )
        found["went_on"] = int(load()["global_step"])
    return found


ROLES = {"drain": run_drain, "trainer": run_trainer, "reader": run_reader}
