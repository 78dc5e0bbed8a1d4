"""Each kind of checkpoint behind one interface: save, alias, delete and load by its public API.

A :class:`Job` is one process of a job on one node. Its state is a tensor that holds a number, so that the number
identifies the loaded checkpoint. Jobs drain in a thread; all that is opened is closed by the test's fixture.
"""

import contextlib
import fcntl
import logging
import os
import shutil
from pathlib import Path

import torch
from support.supporting import build

from tiered_checkpoint_io import AsyncCheckpointIO, TieredCheckpointIO, TieredStorageReader, TieredStorageWriter, dcp
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

SIZE = 16


class SelectingReader(TieredStorageReader):
    """A reader that is asked for a sentinel, as Lightning's strategies ask: DCP's own functions have no words for it."""

    def __init__(self, path, **options):
        self._path_wanted = path
        super().__init__(**options)

    def reset(self, checkpoint_id=None):
        super().reset(checkpoint_id)
        _, self.selector = Checkpointer(self.settings.config, session=self.session).select(self._path_wanted)


class Messages(logging.Handler):
    """Keeps what a job logs."""

    def __init__(self):
        super().__init__()
        self.logger = logging.getLogger(f"conformance-{id(self)}")
        self.logger.setLevel(logging.INFO)
        self.logger.propagate = False
        self.logger.handlers = [self]
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class Job:
    """One process of a job; see the module."""

    def __init__(self, **options):
        self.messages = Messages()
        self.options = {"drain": "thread", "on_save_error": "raise", "wait_timeout_s": 60, **options}
        self.logged = {**self.options, "logger": self.messages.logger}
        self.memory_dir = Path(options["memory_dir"])

    def save(self, number, name="", *, durable=True, wait=True, size=SIZE):
        """Saves the state ``number``; by default to both tiers, and waits until it is there."""
        raise NotImplementedError

    def load(self, which, size=SIZE):
        """Loads by a sentinel or name; returns the state's number, 0 for a start from scratch."""
        raise NotImplementedError

    @property
    def engine(self):
        """Engine for aliases, deletes and waits."""
        raise NotImplementedError

    def close(self):
        raise NotImplementedError

    @staticmethod
    def name_of(number):
        return f"step_{number}.ckpt"

    def alias(self, name, target, *, copy=False):
        self.engine.alias(name, target, copy=copy)

    def delete(self, name):
        self.engine.remove(name)

    def wait(self):
        self.engine.session.wait()

    def has_to_end(self):
        """Ends all waits now: queued operations stay queued."""
        session = self.engine.session
        session.leave_by(session.clock.monotonic())

    @property
    def root(self):
        (root,) = self.memory_dir.glob("tiered-*/*")
        return root

    def files(self):
        """Returns the data files in node memory, in the order of their saves."""
        paths = sorted(self.root.glob("saves/*/rank-*/*"))
        return [path for path in paths if path.suffix in (".ckpt", ".distcp", ".pt")]

    def documents(self):
        """Returns the descriptions of the parts in node memory, in the order of their saves."""
        return sorted(self.root.glob("saves/*/rank-*/part.json"))

    @contextlib.contextmanager
    def without_drain(self):
        """Keeps the drain of this node from its queue during the block."""
        user = self.memory_dir / f"tiered-{os.getuid()}"
        root = user / TieredCheckpointConfig(dirpath=self.options["dirpath"]).namespace
        for folder in (user, root):
            folder.mkdir(0o700, exist_ok=True)
        with open(root / "drain.lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


class Full(Job):
    """A full checkpoint: one file, as ``torch.save`` writes it."""

    def __init__(self, **options):
        super().__init__(**options)
        self.io = build(TieredCheckpointIO, **self.logged)

    def save(self, number, name="", *, durable=True, wait=True, size=SIZE):
        state = {"w": torch.full((size,), float(number)), "global_step": number, "epoch": 0}
        options = {"tiers": ["memory", "durable"] if durable else ["memory"]}
        io = self.io if wait else AsyncCheckpointIO(self.io)
        io.save_checkpoint(state, name or self.name_of(number), storage_options=options)

    def load(self, which, size=SIZE):
        state = self.io.load_checkpoint(which)
        return only(state["w"]) if self.io.found_nothing is False else 0

    @property
    def engine(self):
        return self.io.checkpointer

    def last_save(self):
        return self.io.checkpointer.session.last_save

    def close(self):
        self.io.teardown()


class Shards(Job):
    """Kinds that go through ``dcp.save`` and ``dcp.load``."""

    kind = ""

    def __init__(self, **options):
        super().__init__(**options)
        self.base = build(TieredStorageWriter, **self.logged)

    def save(self, number, name="", *, durable=True, wait=True, size=SIZE):
        state = {"w": torch.full((size,), float(number))}
        writer = build(TieredStorageWriter, **self.logged, save_to_s3=durable, wait=wait, require_step=False)
        save = dcp.save if wait else dcp.async_save
        save(state, checkpoint_id=name or self.name_of(number), storage_writer=writer, kind=self.kind)

    def load(self, which, size=SIZE):
        state = {"w": torch.zeros(size)}
        if which == "tiered:latest":
            build(dcp.load, state, kind=self.kind, **self.logged)
        elif which.startswith("tiered:"):
            dcp.load(state, kind=self.kind, storage_reader=build(SelectingReader, which, **self.logged))
        else:
            build(dcp.load, state, checkpoint_id=which, kind=self.kind, **self.logged)
        return only(state["w"])

    @property
    def engine(self):
        return Checkpointer(self.base.settings.config, session=self.base.session)

    def last_save(self):
        return self.base.session.last_save

    def wait(self):
        super().wait()
        dcp.maybe_finalize_async_calls(blocking=True)

    def close(self):
        dcp.maybe_finalize_async_calls(blocking=True)
        self.base.close()


class Sharded(Shards):
    """A sharded checkpoint, of one rank: shards, and ``.metadata``."""

    kind = "sharded"


class Local(Shards):
    """A local checkpoint, of one shard: each rank's own state, and no collective."""

    kind = "local"


def only(tensor):
    """Returns the one number that a tensor holds."""
    (value,) = set(tensor.tolist())
    return int(value)


def lose_memory(memory_dir):
    """Loses the node: nothing is left in its memory."""
    for each in Path(memory_dir).iterdir():
        shutil.rmtree(each)


KINDS = {"full": Full, "sharded": Sharded, "local": Local}
