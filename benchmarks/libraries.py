"""Ways to save a state by libraries that have environments of their own: see ``peers.py``.

Each imports its library when it is made: one that is absent is an ImportError then.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from installed import Contender, DCPThread, TorchSave, alone
from s3_state import BUCKET
from states import all_tensors


class ThroughIO(Contender):
    """Saves to S3 through a checkpoint IO of Lightning's kind."""

    where = "S3"
    io: Any

    def save(self, state: Any, number: int) -> None:
        self.io.save_checkpoint(state, self.path(number))

    def load(self, number: int, state: Any) -> None:
        found = self.io.load_checkpoint(self.path(number))
        for target, source in zip(all_tensors(state), all_tensors(found), strict=True):
            target.copy_(source)

    def clean(self, number: int) -> None: ...


class S3Connector(ThroughIO):
    """AWS's connector, as Lightning's checkpoint IO."""

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from s3torchconnector import S3ClientConfig

        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        self.config = S3ClientConfig(force_path_style=True)
        self.open()

    def open(self) -> None:
        from s3torchconnector.lightning import S3LightningCheckpoint

        self.io = S3LightningCheckpoint("us-east-1", s3client_config=self.config, endpoint=self.url)

    def path(self, number: int) -> str:
        return f"s3://{BUCKET}/connector/{number}"


class S3ConnectorDCP(DCPThread):
    """AWS's connector, as DCP's storage writer and reader."""

    where = "S3"

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from s3torchconnector import S3ClientConfig
        from s3torchconnector._s3client import S3Client
        from s3torchconnector.dcp import s3_file_system

        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        # Its writer and reader take no endpoint.
        config, client = S3ClientConfig(force_path_style=True), s3_file_system.S3Client
        assert client is S3Client
        s3_file_system.S3Client = functools.partial(S3Client, endpoint=url)
        self.config, self.module = config, s3_file_system

    def path(self, number: int) -> str:
        return f"s3://{BUCKET}/connector-dcp/{number}"

    def options(self, number: int) -> dict[str, Any]:
        return {"storage_writer": self.module.S3StorageWriter("us-east-1", self.path(number), self.config)}

    def load(self, number: int, state: Any) -> None:
        reader = self.module.S3StorageReader("us-east-1", self.path(number), self.config)
        self.dcp.load(state, storage_reader=reader)

    def clean(self, number: int) -> None: ...


class NvidiaResiliency(TorchSave):
    reason = "it copies from GPUs only; of tensors on the CPU it saves what they are when its process reads them"

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        self.io = TorchAsyncCheckpoint()

    def save(self, state: Any, number: int) -> None:
        self.io.async_save(state, self.path(number))

    def finish(self) -> None:
        self.io.finalize_async_save(blocking=True)


class DLRover(Contender):
    """Flash Checkpoint for DDP, into the memory that it shares with its agent, which it starts itself."""

    where = "node memory"

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        import torch.distributed as dist
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer, StorageType

        alone()
        # Of any other name of a backend it takes that it needs a GPU.
        dist.init_process_group("gloo")
        self.io, self.kind = DdpCheckpointer(f"{folder}/flash"), StorageType.MEMORY

    def save(self, state: Any, number: int) -> None:
        self.io.save_checkpoint(number, dict(state), self.path(number), storage_type=self.kind)

    def load(self, number: int, state: Any) -> None:  # noqa: ARG002 - it has one
        found = self.io.load_checkpoint()
        for target, source in zip(all_tensors(state), all_tensors(found), strict=True):
            target.copy_(source)

    def clean(self, number: int) -> None: ...

    def close(self) -> None:
        # It outlives its processes, as it is meant to.
        self.io._engine._shm_handler.unlink()


class SageMaker(DCPThread):
    """AWS's tiered checkpointing for HyperPod: its S3 tier, for the memory tier is a service of HyperPod's nodes."""

    where = "S3"

    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        from amzn_sagemaker_checkpointing.checkpointing.filesystem.filesystem import SageMakerTieredStorageWriter
        from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
        from amzn_sagemaker_checkpointing.storage.clients.s3 import s3_client
        from s3torchconnector import S3Checkpoint, S3ClientConfig

        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_ENDPOINT_URL": url}
        os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
        # It takes no endpoint.
        config = S3ClientConfig(force_path_style=True)
        s3_client.S3Checkpoint = functools.partial(S3Checkpoint, endpoint=url, s3client_config=config)
        place = {"s3_tier_base_path": f"s3://{BUCKET}/sagemaker", "save_to_s3": True}
        self.config, self.writer = SageMakerCheckpointConfig("bench", 1, **place), SageMakerTieredStorageWriter

    def options(self, number: int) -> dict[str, Any]:
        writer = self.writer(self.config, step=number)
        writer.client = NoMemory()
        return {"storage_writer": writer}

    def load(self, number: int, state: Any) -> None:
        # Its reader asks the memory tier first, again and again.
        raise NotImplementedError

    def clean(self, number: int) -> None: ...


class NoMemory:
    """In place of the client of HyperPod's memory service, which would be asked three times, in vain."""

    def get_or_create_namespace(self) -> None: ...

    def put_checkpoint(self, **_: Any) -> None: ...


class NeMo(ThroughIO):
    def __init__(self, folder: str, url: str) -> None:
        super().__init__(folder, url)
        import torch.distributed as dist
        from nemo.utils.callbacks.s3_checkpoint_io import S3CheckpointIO

        os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_ENDPOINT_URL": url}
        alone()
        dist.init_process_group("gloo")
        self.io = S3CheckpointIO(f"s3://{BUCKET}/nemo")

    def path(self, number: int) -> str:
        return f"s3://{BUCKET}/nemo/model--step={number}-last.ckpt"
