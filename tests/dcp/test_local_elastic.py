"""Local checkpoints under real agents of torchrun, which count the restarts of their own ranks alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import free_port

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Manifest

WORKER = Path(__file__).with_name("elastic_worker.py")
DEADLINE_S = 180
PAUSE_AT = 2


class Agents:
    """Two agents of one job, each a node."""

    def __init__(self, folder, memory_dir):
        self.folder, self.memory_dir = folder, memory_dir
        self.port = free_port()
        self.running = {}
        # Else torchrun keeps a store in which gloo reads the addresses of dead ranks, and other nodes find no store.
        self.env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def start(self, number, node):
        """Starts an agent, on a node of that name."""
        os.makedirs(f"{self.memory_dir}/{node}", exist_ok=True)
        host = "true" if number == 0 else "false"
        conf = f"is_host={host},keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout={DEADLINE_S}"
        line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
        line += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.port}", f"--rdzv-conf={conf}"]
        line += ["--local-addr=127.0.0.1", "--monitor-interval=0.1", str(WORKER)]
        line += [f"{self.memory_dir}/{node}", str(self.folder / "durable"), str(self.log(node)), str(PAUSE_AT)]
        with open(self.folder / f"{node}.txt", "a") as out:
            self.running[node] = subprocess.Popen(line, stdout=out, stderr=out, env={**os.environ, **self.env})

    def log(self, node):
        return self.folder / f"{node}.jsonl"

    def said(self, node):
        log = self.log(node)
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def attempts(self, node):
        return sum("loaded" in each for each in self.said(node))

    def pause(self, node):
        Path(f"{self.log(node)}.pause").touch()

    def go_on(self, node):
        Path(f"{self.log(node)}.pause").unlink(missing_ok=True)

    def kill_ranks(self, node):
        pid = self.running[node].pid
        for rank in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(rank), signal.SIGKILL)

    def until(self, holds):
        end = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < end, self.output()
            time.sleep(0.05)

    def output(self):
        return "\n".join(path.read_text()[-5000:] for path in sorted(self.folder.glob("*.txt")))

    def close(self):
        for node, agent in self.running.items():
            if agent.poll() is None:
                # Its ranks end with it.
                agent.terminate()
                agent.wait()


@pytest.fixture
def agents(tmp_path, memory_dir):
    with contextlib.closing(Agents(tmp_path, memory_dir)) as made:
        yield made


@pytest.mark.matrix
def test_all_ranks_of_an_attempt_save_and_load_the_same(agents, tmp_path):
    for number, node in enumerate("ab"):
        agents.pause(node)
        agents.start(number, node)
    agents.until(lambda: all(any(each.get("saved") == PAUSE_AT for each in agents.said(node)) for node in "ab"))
    # Its agent starts it again, which counts. The other agent then starts its own again, which does not.
    agents.kill_ranks("b")
    agents.until(lambda: agents.attempts("b") > 1)
    for node in "ab":
        agents.go_on(node)
    agents.until(lambda: all(agents.running[node].poll() is not None for node in "ab"))
    assert [agents.running[node].returncode for node in "ab"] == [0, 0], agents.output()
    before = next(each["save_id"] for each in agents.said("a") if "saved" in each)
    last = [[each for each in agents.said(node) if "loaded" in each][-1] for node in "ab"]
    assert [(each["loaded"], each["x"]) for each in last] == [(PAUSE_AT, PAUSE_AT)] * 2
    assert {each["restarts"] for each in last} == {"0", "1"}, "each agent counts by itself"
    for step in range(PAUSE_AT + 1, 6):
        saved = [each["save_id"] for node in "ab" for each in agents.said(node) if each.get("saved") == step]
        manifest = tmp_path / "durable" / ids.manifest_key(f"step_{step}")
        content = Manifest.from_json(manifest.read_bytes(), where=str(manifest)).content
        assert saved == [content.save_id] * 2
        assert ids.line_of(content.save_id) != ids.line_of(before)
