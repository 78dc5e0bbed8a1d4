"""Damages checkpoints, one byte or one cut at a time, and restores: found out, and the next source taken?

    make test-corruption
    python tests/crash/corruption.py --count 500 --seed 7

Each world holds the steps 1 and 2 of one kind of checkpoint, in node memory and on a durable tier. A file of
step 2 is damaged, in memory, or on the durable tier while the node's memory is lost. A restore has to give
step 2 from an intact copy, or step 1, bit for bit, and to say what it found. ``harmless`` counts damage
that went unnoticed, and with which step 2 was restored all the same, equal in state, step and name.
"""

import argparse
import collections
import contextlib
import functools
import logging
import os
import random
import re
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import boto3
import torch
from rich.console import Console
from rich.table import Table
from support.rclone_server import RcloneServer
from support.supporting import build

from tiered_checkpoint_io import TieredStorageReader, TieredStorageWriter, dcp
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

STEPS = (1, 2)
_EXTRA = "meta.pt"


def state(step):
    return {"w": torch.arange(64.0) * step, "global_step": torch.tensor(step), "n": torch.arange(5) + step}


def blank():
    return {key: torch.zeros_like(value) for key, value in state(1).items()}


def equals(loaded, step):
    return step in STEPS and all(torch.equal(loaded[key], value) for key, value in state(step).items())


class Notes(logging.Handler):
    """Handler that collects the warnings of a restore."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.said = []

    def emit(self, record):
        self.said.append(record.getMessage())


class World:
    """One kind of checkpoint on one durable tier."""

    def __init__(self, kind, tier, dirpath, memory_dir):
        self.kind = kind
        self.tier = tier
        self.memory_dir = memory_dir
        self.dirpath = dirpath
        os.makedirs(memory_dir)
        self.notes = Notes()
        self.log = logging.getLogger(f"corruption.{kind}.{tier}")
        self.log.propagate = False
        self.log.addHandler(self.notes)
        self.options = {"dirpath": dirpath, "memory_dir": memory_dir, "drain": "thread", "max_read_concurrency": 1}
        self.options["namespace"] = "default"
        self._save()
        root = namespace_root(memory_dir, "default") / "saves"
        self.memory = {path: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
        self.store = open_store(TieredCheckpointConfig.from_any(dirpath=dirpath))
        self.durable = {entry.key: self.store.get(entry.key) for entry in sorted(self.store.list(""), key=str)}
        newest = max(path.parts[-3] for path in self.memory)
        #: Files and objects that may be damaged: (where, key).
        self.targets = [("memory", path) for path, data in self.memory.items() if newest in path.parts and data]
        self.targets += [(tier, key) for key in self.durable if re.search("step[_=]2|last", key)]

    def _save(self):
        if self.kind == "full":
            made = Checkpointer(build(TieredCheckpointConfig.from_any, **self.options), logger=self.log)
            for step in STEPS:
                made.save({**state(step), "global_step": step}, f"step={step}.ckpt")
            made.alias("last.ckpt", "step=2.ckpt")
            made.close()
            return
        writer = build(TieredStorageWriter, **self.options, logger=self.log, wait=True, save_to_s3=True)
        if self.kind == "sharded":
            writer.extra = (_EXTRA, bytes(range(200)))
        for step in STEPS:
            dcp.save(state(step), checkpoint_id=f"step_{step}", storage_writer=writer, no_dist=True, kind=self.kind)
        writer.close()

    def load(self, namespace):
        """Returns the step of a restart, and True if the loaded state was saved under that step."""
        if self.kind == "full":
            made = Checkpointer(
                build(TieredCheckpointConfig.from_any, **{**self.options, "namespace": namespace}), logger=self.log
            )
            loaded = made.load("tiered:latest")
            if not loaded:
                return None, False
            loaded["global_step"] = torch.tensor(loaded["global_step"])
            step = made.restored.step
            named = made.restored.name in (f"step={step}.ckpt", "last.ckpt")
            made.close()
            return step, named and equals(loaded, step)
        reader = build(TieredStorageReader, **{**self.options, "namespace": namespace}, logger=self.log)
        loaded = blank()
        dcp.load(loaded, storage_reader=reader, no_dist=True, kind=self.kind)
        step = int(loaded["global_step"])
        intact = equals(loaded, step)
        if self.kind == "sharded":
            found = reader.opened
            small = [data for name, data in found.small.items() if name.startswith("meta")]
            intact = intact and (found.name, found.step) == (f"step_{step}", step) and small == [bytes(range(200))]
        reader.close()
        return step, intact

    def trial(self, target, damaged):
        """Damages one file, restores, and mends it; gives a word for the table, and why."""
        where, key = target
        shutil.rmtree(namespace_root(self.memory_dir, "default").parent, ignore_errors=True)
        self.notes.said.clear()
        if where == "memory":
            self._fill_memory({key: damaged})
        else:
            self.store.put(key, damaged)
        try:
            step, intact = self.load("default")
        except Exception as error:
            return "unrestored", f"{type(error).__name__}: {error}"
        finally:
            if where != "memory":
                self.store.put(key, self.durable[key])
        if not intact or step is None:
            return "undetected", f"step {step}, differing from what was saved; said: {self.notes.said}"
        if self.notes.said:
            return "detected", ""
        return ("harmless", "") if step == STEPS[-1] else ("undetected", f"step {step}, and nothing was said")

    def _fill_memory(self, instead):
        for folder in ("saves", "slots", "trash", "quarantine", "status"):
            os.makedirs(namespace_root(self.memory_dir, "default") / folder, mode=0o700)
        for path, data in self.memory.items():
            os.makedirs(path.parent, mode=0o700, exist_ok=True)
            path.write_bytes(instead.get(path, data))
        for folder in (namespace_root(self.memory_dir, "default"), namespace_root(self.memory_dir, "default").parent):
            os.chmod(folder, 0o700)

    def original(self, target):
        where, key = target
        return self.memory[key] if where == "memory" else self.durable[key]

    def close(self):
        self.store.close()
        shutil.rmtree(self.memory_dir, ignore_errors=True)


def role_of(key):
    """Returns the kind of a file."""
    name = str(key)
    if ids.MANIFEST_PREFIX in name:
        return "manifest of an alias" if "last" in name else "manifest"
    base = name.rpartition("/")[2]
    kinds = {"part.json": "part.json", ".metadata": ".metadata", ".distcp": ".distcp", ".pt": "rank's .pt"}
    if base.startswith("meta"):
        return "meta.pt"
    return next((what for end, what in kinds.items() if base.endswith(end)), "torch file")


def damage(data, chooser):
    """One byte changed, or what is behind one byte cut off."""
    at = chooser.randrange(len(data))
    if chooser.random() < 0.25:
        return data[:at], f"cut at {at}"
    changed = bytearray(data)
    changed[at] ^= chooser.choice([1 << chooser.randrange(8), chooser.randrange(1, 256)])
    return bytes(changed), f"byte {at}: {data[at]:#04x} to {changed[at]:#04x}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=5_000)
    parser.add_argument("--one-of", type=int, default=1, metavar="N", help="the count is divided by it")
    parser.add_argument("--seed", type=int, default=None, help="by default a new one, which is printed")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    chooser, started = random.Random(seed), time.monotonic()
    # What DCP says of a process that is alone, and our memory_dir of folders that are not on tmpfs.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # Each restore stands for a process of its own; that each would read boto3's tables is not what is looked at.
    boto3.session.Session = functools.cache(boto3.session.Session)
    counts, bad = collections.defaultdict(collections.Counter), []
    with contextlib.ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="tiered-corruption-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        (folder / "s3").mkdir()
        server = stack.enter_context(RcloneServer(folder / "s3"))
        os.environ.update(server.env())
        bucket = server.make_bucket("corruption")
        worlds = []
        for kind in ("full", "sharded", "local"):
            for tier, dirpath in (("directory", f"{folder}/{kind}"), ("S3", f"{bucket}/{kind}")):
                worlds.append(World(kind, tier, dirpath, f"{folder}/memory-{kind}-{tier}"))
                stack.callback(worlds[-1].close)
        # Each file as often as any other, but those on S3, where each trial takes longer.
        targets = [(world, target) for world in worlds for target in world.targets]
        weights = [0.3 if target[0] == "S3" else 1.0 for _, target in targets]
        for world, target in targets[:] + chooser.choices(
            targets, weights, k=max(0, options.count // options.one_of - len(targets))
        ):
            damaged, how = damage(world.original(target), chooser)
            found, why = world.trial(target, damaged)
            counts[world.kind, role_of(target[1]), target[0]][found] += 1
            if found in ("undetected", "unrestored"):
                bad.append(f"{found}: {world.kind}, {target[0]}, {target[1]}, {how}: {why}")
    words = ("detected", "harmless", "unrestored", "undetected")
    console = Console(width=120)
    table = Table("checkpoint", "file", "tier", title="One byte, or one cut, at a time")
    for word in ("damaged", *words):
        table.add_column(word, justify="right")
    for row in sorted(counts):
        table.add_row(*row, str(counts[row].total()), *(str(counts[row][word]) for word in words))
    console.print(table)
    for each in bad[:20]:
        console.print(each, markup=False, highlight=False)
    sums = collections.Counter()
    for row in counts.values():
        sums.update(row)
    print(f"{time.monotonic() - started:.0f} s, seed={seed}")
    print(f"damaged={sums.total()} " + " ".join(f"{word}={sums[word]}" for word in words[:3]))
    print(f"undetected={sums['undetected']}")
    return 1 if sums["undetected"] or sums["unrestored"] else 0


if __name__ == "__main__":
    sys.exit(main())
