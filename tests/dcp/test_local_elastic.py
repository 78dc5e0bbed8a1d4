"""Local checkpoints under a real agent of torchrun, which starts all ranks again once one has failed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest

WORKER = Path(__file__).with_name("elastic_worker.py")
DIES_AT, LAST = 2, 5


@pytest.mark.matrix
def test_all_ranks_of_an_attempt_save_and_load_the_same(tmp_path, memory_dir):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    line += ["--monitor-interval=0.1", str(WORKER), str(tmp_path), memory_dir, str(DIES_AT), str(LAST)]
    # Else torchrun keeps a store in which gloo reads the addresses of dead ranks.
    env = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    said = [[*map(json.loads, (tmp_path / f"rank-{rank}.jsonl").read_text().splitlines())] for rank in (0, 1)]
    before = next(each["save_id"] for each in said[0] if "saved" in each)
    last = [[each for each in of_rank if "loaded" in each] for of_rank in said]
    assert [of_rank[1:] for of_rank in last] == [[{"loaded": DIES_AT, "x": DIES_AT}]] * 2
    for step in range(DIES_AT + 1, LAST + 1):
        saved = [each["save_id"] for of_rank in said for each in of_rank if each.get("saved") == step]
        manifest = tmp_path / "durable" / ids.manifest_key(f"step_{step}")
        content = Manifest.from_json(manifest.read_bytes(), where=str(manifest)).content
        assert saved == [content.save_id] * 2
        assert ids.line_of(content.save_id) != ids.line_of(before)
