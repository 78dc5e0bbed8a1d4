"""One rank of a job that saves step 5 by the SageMaker library itself; what it sends to S3 lies below a folder.

``python sagemaker_writer.py FOLDER RANK RANKS PORT``, with amzn-sagemaker-checkpointing and s3torchconnector installed.
So ``tests/data/sagemaker`` was written, by release 1.1.3 and three ranks.
"""

import contextlib
import os
import sys
from pathlib import Path

import torch


def model():
    """What the job saved, whole."""
    return {
        "rows": torch.arange(70.0).reshape(10, 7),
        "columns": torch.arange(24.0).reshape(4, 6).bfloat16(),
        "replicated": torch.tensor([1.5, -0.0, float("inf")]),
    }


def main(folder, rank, ranks, port):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.checkpoint_helpers import CheckpointHelpers
    from amzn_sagemaker_checkpointing.checkpointing.filesystem.writer import SageMakerTieredStorageWriter
    from amzn_sagemaker_checkpointing.config.sagemaker_checkpoint_config import SageMakerCheckpointConfig
    from amzn_sagemaker_checkpointing.storage.clients.inmemory.inmemory_client import InMemoryCheckpointClient
    from amzn_sagemaker_checkpointing.storage.clients.s3.s3_client import SageMakerS3Client
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    @contextlib.contextmanager
    def stream(_, s3_uri):
        path = Path(folder) / s3_uri.removeprefix("s3://bucket/base/ns/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            yield file

    # What the library needs of AWS: a bucket, and the service that keeps checkpoints in memory.
    SageMakerS3Client.create_write_stream = stream
    CheckpointHelpers.get_bucket_location = staticmethod(lambda s3_base_path: "us-east-1")
    for name in ("get_or_create_namespace", "put_checkpoint"):
        setattr(InMemoryCheckpointClient, name, lambda *_, **__: None)

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=ranks)
    dist.init_process_group("gloo")
    mesh, whole = init_device_mesh("cpu", (int(ranks),)), model()
    state = {
        "model": {
            "rows": distribute_tensor(whole["rows"], mesh, [Shard(0)]),
            "columns": distribute_tensor(whole["columns"], mesh, [Shard(1)]),
            "replicated": whole["replicated"],
        },
        "step": 5,
    }
    config = SageMakerCheckpointConfig(
        namespace="ns", world_size=int(ranks), s3_tier_base_path="s3://bucket/base", save_to_s3=True
    )
    dcp.save(state, storage_writer=SageMakerTieredStorageWriter(config, step=5))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
