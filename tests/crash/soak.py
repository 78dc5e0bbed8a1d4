"""Two hundred saves in a row, full and sharded, to memory and on to the durable tier: does anything grow?

    make test-soak
    python tests/crash/soak.py --saves 200

Prints, of each kind of checkpoint, by how much resident memory, the memory tier, descriptors and threads grow
with each save, as the slope of a line through the second half of the saves, of the trainer and of its drain.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tiered_checkpoint_io import TieredCheckpointIO, TieredStorageWriter, dcp
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.memory.tier import namespace_root

STATE_MIB = 4
#: Bounds of growth by one save: the measure's name, its unit, and the bound. A leaked state is STATE_MIB.
BOUNDS = {
    "trainer, resident": ("KiB", 64.0),
    "trainer, descriptors": ("", 0.02),
    "trainer, threads": ("", 0.02),
    "drain, resident": ("KiB", 64.0),
    "drain, descriptors": ("", 0.02),
    "drain, threads": ("", 0.02),
    "tmpfs": ("KiB", 64.0),
}


def state(step):
    return {"w": torch.full((STATE_MIB << 18,), float(step)), "global_step": step}


def of_process(pid):
    """Resident KiB, descriptors and threads of a process."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    # Mapped slots are counted with the tmpfs that they lie on.
    own = int(fields["RssAnon"].split()[0])
    return own, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"])


def used(folder):
    return sum(
        os.lstat(os.path.join(base, name)).st_blocks // 2 for base, _, files in os.walk(folder) for name in files
    )


def measure(memory_dir):
    row = dict(zip(list(BOUNDS)[:3], of_process(os.getpid()), strict=True))
    pid = Queue(next(namespace_root(memory_dir, "x").parent.iterdir())).progress().pid
    row |= dict(zip(list(BOUNDS)[3:6], of_process(pid), strict=True))
    return row | {"tmpfs": used(memory_dir)}


def slope(values):
    """Returns the slope of the least-squares line through equally spaced values."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    squares = sum((at - middle) ** 2 for at in range(len(values)))
    return sum((at - middle) * (value - mean) for at, value in enumerate(values)) / squares


def full(options, saves):
    io = TieredCheckpointIO(**options)
    for step in range(saves):
        tiers = ["memory", "durable"] if step % 2 == 0 else ["memory"]
        io.save_checkpoint(state(step), f"step={step}.ckpt", storage_options={"tiers": tiers})
        if step >= 6 and step % 2 == 0:
            io.remove_checkpoint(f"step={step - 6}.ckpt")
        # What the drain has open while it works is no growth.
        io.checkpointer.session.wait()
        yield
    io.teardown()


def sharded(options, saves):
    writer = TieredStorageWriter(**options, wait=True)
    for step in range(saves):
        dcp.save(
            {**state(step), "global_step": torch.tensor(step)},
            checkpoint_id=f"step_{step % 6}",
            storage_writer=writer,
            no_dist=True,
        )
        yield
    writer.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--saves", type=int, default=200)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console, steep = Console(width=120), []
    table = Table("checkpoint", "measure", "at half", "at the end", "slope a save", "bound")
    for kind, life in (("full", full), ("sharded", sharded)):
        folder = tempfile.mkdtemp(prefix="tiered-soak-", dir="/dev/shm")
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            memory_dir = f"{folder}/memory"
            os.mkdir(memory_dir)
            started = time.monotonic()
            places = {"dirpath": f"{folder}/durable", "memory_dir": memory_dir}
            rows = [measure(memory_dir) for _ in life(places, options.saves)]
            seconds = time.monotonic() - started
        console.print(f"{kind}: {options.saves} saves in {seconds:.0f} s", highlight=False)
        later = rows[len(rows) // 2 :]
        for name, (unit, bound) in BOUNDS.items():
            values = [row[name] for row in later]
            grows = slope(values)
            steep += [f"{kind}, {name}"] if grows > bound else []
            table.add_row(
                kind, name, f"{values[0]} {unit}", f"{values[-1]} {unit}", f"{grows:+.3f} {unit}", f"{bound} {unit}"
            )
    console.print(table)
    print("steep: " + (", ".join(steep) or "none"))
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main())
