"""The blocks of docs/python-api.md, word for word and one after the other, over a real S3 server."""

from pathlib import Path

from support.first_hour import blocks_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "python-api.md"
#: Names that a reader has already, and hours that pass at once.
PRELUDE = """
import os
import torch
from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.clock import Clock

os.environ["TIERED_CHECKPOINT_SUPPORT"] = "drain=thread"
io = TieredCheckpointIO(dirpath="s3://bucket/run")
for step in (100, 110):
    io.save_checkpoint({"global_step": step, "weights": torch.ones(10)}, f"step={step}.ckpt")
io.save_checkpoint({"global_step": 120}, "step=120.ckpt", storage_options={"tiers": ["memory"]})
io.teardown()

wait, monotonic, passed = Clock.wait, Clock.monotonic, []
def wait_hurried(clock, event, seconds):
    passed.extend([300] if seconds >= 10 else [])
    return wait(clock, event, seconds if seconds < 10 else 0)
Clock.wait, Clock.monotonic = wait_hurried, lambda clock: monotonic(clock) + sum(passed)
"""


def test_the_blocks_run(story):
    blocks = [text for _, language, text in blocks_of(DOCUMENT.read_text()) if language == "python"][1:]
    assert len(blocks) == 2
    (story.folder / "block.py").write_text(
        "".join(blocks).replace('memory_dir="/dev/shm"', f"memory_dir={story.memory_dir!r}")
    )
    output, status = story.python("block.py", prelude=PRELUDE)
    assert status == 0, output[-3000:]
    lines = [line for line in output.splitlines() if line.startswith(("s3://", "step=", "evaluate"))]
    size = lines[2].split()[2]
    assert lines == [
        "s3://bucket/run/step=110.ckpt 110 None",
        lines[1],
        f"step=110.ckpt 110 {size} durable memory durable",
        lines[3],
        "evaluate s3://bucket/run/step=100.ckpt 100",
        "evaluate s3://bucket/run/step=110.ckpt 110",
    ]
    assert lines[1].startswith("step=120.ckpt 120 ")
    assert lines[1].endswith(" memory_only memory")
    assert lines[3].startswith("step=100.ckpt 100 ")
    assert len((story.folder / "evaluated.txt").read_text()) == len("20260101T000000.000000-00000000-00000001")
