"""A checkpoint that is in both tiers, and must load from each, after any other input."""

import torch
from support.supporting import build
from support.training import wipe

from tiered_checkpoint_io import TieredCheckpointIO

KEPT = "epoch=0-step=1.ckpt"


def state(step, size=1000):
    return {"w": torch.arange(float(size)) + step, "global_step": step, "epoch": 0}


class Kept:
    """One job with one saved checkpoint."""

    # A process of its own, if a test says so: its start takes longer than most tests here.
    support = {"wait_timeout_s": 60, "drain": "thread"}

    def __init__(self, dirpath, memory_dir):
        self.options = {"dirpath": str(dirpath), "memory_dir": str(memory_dir)}
        self.made = []
        io = self.io()
        io.save_checkpoint(state(1), KEPT)
        io.teardown()

    def mended(self, step):
        """Checks that refused saves exist once all is well again, and become durable."""
        io = self.io()
        assert io.load_checkpoint("tiered:latest")["global_step"] == step
        assert io.checkpointer.restored.tier == "memory"
        io.checkpointer.session.wait()
        io.teardown()
        other_node = self.io(namespace="another-node")
        assert torch.equal(other_node.load_checkpoint("tiered:latest")["w"], state(step)["w"])
        assert other_node.checkpointer.restored.tier == "durable"
        other_node.teardown()

    def io(self, **options):
        """Returns an IO of this job, closed at the test's end if the test does not."""
        io = build(TieredCheckpointIO, **{**self.support, **self.options, "on_save_error": "raise", **options})
        self.made.append(io)
        return io

    def close(self):
        for io in self.made:
            io.teardown()

    def still_loads(self):
        """Checks that it loads from memory, and then from the durable tier."""
        for tier in ("memory", "durable"):
            io = self.io()
            loaded = io.load_checkpoint(KEPT)
            assert torch.equal(loaded["w"], state(1)["w"])
            assert io.checkpointer.restored.tier == tier
            io.teardown()
            wipe(self.options["memory_dir"])
