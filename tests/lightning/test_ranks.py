"""Several ranks: real processes, as Lightning launches them."""

import ast
import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.running import Run, runner
from support.training import Model, Runs, durable, wipe

from tiered_checkpoint_io.callbacks import TieredModelCheckpoint
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import open_store

LAUNCH_TIMEOUT_S = 300
pytestmark = pytest.mark.timeout(LAUNCH_TIMEOUT_S + 60)

SCRIPT = """
import json, os, sys
from lightning.pytorch import Trainer
sys.path.insert(0, sys.argv[1])
from support.training import Model
from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.callbacks import TieredModelCheckpoint

TieredModelCheckpoint.CHECKPOINT_NAME_LAST = os.environ.get("NAME_LAST", "last")

class Ranked(Model):
    def training_step(self, batch, index):
        # Not synchronised between the ranks; on one of them always the same.
        changes = self.global_rank != int(os.environ.get("SAME_ON", "0"))
        self.log("own", float(changes * self.global_step))
        return super().training_step(batch, index)

if __name__ == "__main__":
    _, _, dirpath, memory_dir, steps, ranks, strategy, asynchronous = sys.argv
    os.environ["TIERED_CHECKPOINT_SUPPORT"] = "wait_timeout_s=60"
    block = {"dirpath": dirpath, "memory_dir": memory_dir,
             "enable_async_checkpointing": asynchronous == "1", "on_save_error": "raise",
             "s3_every_n_train_steps": 2, "memory_every_n_train_steps": 1,
             "preflight": os.environ.get("PREFLIGHT", "error")}
    io, filename = TieredCheckpointIO.from_config(block), os.environ.get("FILENAME", "{step}")
    trainer = Trainer(
        plugins=[io],
        callbacks=[TieredModelCheckpoint.from_config(block, filename=filename,
                                                     save_last="NAME_LAST" in os.environ,
                                                     **json.loads(os.environ.get("BEST", "{}")))],
        max_steps=int(steps), accelerator="cpu", devices=int(ranks), strategy=strategy, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Ranked(ballast=1_000_000), ckpt_path="tiered:latest")
    restored = io.checkpointer.restored
    told = restored and (restored.step, restored.tier), io.checkpointer.session.asked
    # One write, so that ranks do not write into each other's lines.
    os.write(1, f"RANK {trainer.global_rank} {told}\\n".encode())
"""


@pytest.fixture
def launch(tmp_path, memory_dir):
    script = tmp_path / "ranks.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def launch(dirpath, steps, ranks, strategy="ddp", *, asynchronous=True, timeout_s=LAUNCH_TIMEOUT_S):
        tests = str(Path(__file__).parents[1])
        arguments = [tests, dirpath, memory_dir, str(steps), str(ranks), strategy, str(int(asynchronous))]
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )

    return launch


def told(done):
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line.partition("RANK ")[2] for line in done.stdout.splitlines() if line.startswith("RANK "))
    return [ast.literal_eval(line.partition(" ")[2]) for line in lines]


@pytest.mark.matrix
def test_ddp_ranks_resume_from_s3_and_rank_0_alone_asks_it(launch, s3_url, memory_dir, tmp_path):
    Runs(s3_url, memory_dir, tmp_path).fit(
        TieredModelCheckpoint(s3_every_n_train_steps=2, filename="{step}"), model=Model(ballast=1_000_000), max_steps=4
    )
    wipe(memory_dir)
    first, *others = told(launch(s3_url, 6, 4))
    store = open_store(TieredCheckpointConfig(dirpath=s3_url))
    size = store.size("step=6.ckpt")
    store.close()
    restored, asked = first
    assert restored == (4, "durable")
    # What there is to resume from, who else writes here, and which names are taken by what has no manifest.
    assert asked["requests.list"] == 3
    # The manifest, and the object in one range of 16 MiB.
    assert asked["requests.get"] == 2
    assert size < asked["bytes.down"] < 1.02 * size
    assert others == [((4, "durable"), {})] * 3


@pytest.mark.matrix
def test_spawned_ranks_take_the_io_and_the_callback_by_pickle(launch, tmp_path):
    dirpath = str(tmp_path / "durable")
    told(launch(dirpath, 5, 2, "ddp_spawn"))
    assert durable(dirpath) == ["end_of_training.ckpt", "step=4.ckpt"]


@pytest.mark.matrix
@pytest.mark.parametrize(("preflight", "error"), [("error", "StoreError: preflight: "), ("off", "SaveError: ")])
def test_an_error_of_rank_0_ends_all_ranks(preflight, error, launch, tmp_path, monkeypatch):
    monkeypatch.setenv("PREFLIGHT", preflight)
    (tmp_path / "file").write_text("not a folder")
    done = launch(str(tmp_path / "file" / "run"), 4, 2, asynchronous=False)
    assert done.returncode != 0
    for rank in (0, 1):
        assert f"[rank{rank}]" in done.stderr
    assert done.stderr.count(error) >= 2


def test_a_name_that_rank_0_refuses_ends_all_ranks(launch, tmp_path, monkeypatch):
    """It alone looks whether a name is taken; the others wait for its answer."""
    monkeypatch.setenv("FILENAME", "../{step}")
    done = launch(str(tmp_path / "durable"), 4, 2, timeout_s=100)
    assert done.returncode != 0
    assert done.stderr.count("ConfigError: ") >= 2
    for rank in (0, 1):
        assert f"[rank{rank}]" in done.stderr


@pytest.mark.parametrize(
    ("names", "saved"),
    [
        ({"NAME_LAST": "last-{own:.1f}"}, ["last-own=0.0.ckpt", "step=6.ckpt"]),
        ({"FILENAME": "{own:.1f}"}, ["own=0.0.ckpt"]),
        (
            {"FILENAME": "{own:.1f}", "SAME_ON": "1", "BEST": '{"monitor": "step", "mode": "max", "save_top_k": 2}'},
            ["own=3.0.ckpt", "own=5.0.ckpt"],
        ),
        (
            {"SAME_ON": "1", "BEST": '{"monitor": "own", "mode": "max", "save_top_k": 2}'},
            ["step=4.ckpt", "step=6.ckpt"],
        ),
    ],
)
def test_ranks_whose_names_differ_go_on_together(names, saved, launch, tmp_path, monkeypatch):
    """A value that is not synchronised is in a name, or rates: on one rank it stays the same, on the other it changes."""
    for name, pattern in names.items():
        monkeypatch.setenv(name, pattern)
    told(launch(str(tmp_path / "durable"), 6, 2, timeout_s=100))
    assert durable(str(tmp_path / "durable")) == saved


@pytest.mark.matrix
def test_a_second_run_is_refused_on_all_ranks_before_it_trains(launch, s3_url, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with runner() as path, contextlib.closing(Run(path, s3_url, str(tmp_path / "elsewhere"))) as first:
        assert first.do("save a.ckpt") == "ok"
        done = launch(s3_url, 4, 2)
        assert done.returncode != 0
        assert "RANK" not in done.stdout
        refusal = "ConfigError: another run writes to the same dirpath"
        assert done.stderr.count(f"{refusal}: process {first.pid} on") == 2
        assert first.do("save b.ckpt") == "ok"
        assert durable(s3_url) == ["a.ckpt", "b.ckpt"]
