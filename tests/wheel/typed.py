"""A user's script, only for the type checker: each public function, with the types that it takes and returns."""

from concurrent.futures import Future
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from typing_extensions import assert_type

import tiered_checkpoint_io
from tiered_checkpoint_io import (
    AsyncCheckpointIO,
    TieredCheckpointIO,
    TieredStorageReader,
    TieredStorageWriter,
    dcp,
)
from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.engine.checkpointer import tiers_for_step
from tiered_checkpoint_io.errors import StoreError, TieredCheckpointError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.strategies import TieredFSDPStrategy, TieredModelParallelStrategy

assert_type(tiered_checkpoint_io.__version__, str)

io = TieredCheckpointIO("s3://bucket/run", namespace="run", memory_keep_last=3)
plugins: list[CheckpointIO] = [io, AsyncCheckpointIO(io)]
assert_type(TieredCheckpointIO.from_config({"dirpath": "/runs"}), TieredCheckpointIO | AsyncCheckpointIO)
made, resume = tiered_checkpoint_io.from_config({"dirpath": "/runs"})
assert_type(made, TieredCheckpointIO | AsyncCheckpointIO)
assert_type(resume, TieredModelCheckpoint)
TieredCheckpointIO("s3://bucket/run", memory_every_n_train_steps=5)  # type: ignore[call-arg]
assert_type(io.config, TieredCheckpointConfig)
assert_type(io.load_checkpoint("tiered:latest"), dict[str, Any])
io.save_checkpoint({"step": 1}, "step=1.ckpt", storage_options={"tiers": ["memory"]})
TieredCheckpointIO("s3://bucket/run", on_save_error="never")  # type: ignore[arg-type]
TieredCheckpointIO("s3://bucket/run", memry_dir="/dev/shm")  # type: ignore[call-arg]
TieredCheckpointConfig(dirpath="s3://bucket/run", memry_dir="/dev/shm")  # type: ignore[call-arg]
tiered_checkpoint_io.TieredChekpointIO  # type: ignore[attr-defined]

callback: ModelCheckpoint = TieredModelCheckpoint(monitor="loss", memory_every_n_train_steps=10)
TieredModelCheckpoint(save_topk=3)  # type: ignore[call-arg]
PreemptionCheckpoint(grace_seconds=30, signals=["SIGTERM"])
assert_type(tiers_for_step(10, 10, None), frozenset[str])

fsdp: FSDPStrategy = TieredFSDPStrategy()
fsdp2: ModelParallelStrategy = TieredModelParallelStrategy()

saved: Future[Any] = dcp.async_save({"a": 1}, checkpoint_id="step_1", dirpath="/runs")
assert_type(dcp.load({"a": 1}, storage_reader=TieredStorageReader({"dirpath": "/runs"})), TieredStorageReader)
dcp.save({"a": 1}, storage_writer=TieredStorageWriter(dirpath="/runs", step=1), kind="local")


def hint(error: TieredCheckpointError) -> str | None:
    return error.hint if isinstance(error, StoreError) and error.retryable else error.key
