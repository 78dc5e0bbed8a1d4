"""The ways to save a state that the benchmarks compare, by their names."""

from __future__ import annotations

from installed import (
    DCP,
    Contender,
    DCPProcess,
    DCPThread,
    Lightning,
    LightningAsync,
    Ours,
    OursOverlapped,
    OursToS3,
    TorchSave,
)
from libraries import DLRover, NeMo, NvidiaResiliency, S3Connector, S3ConnectorDCP, SageMaker

#: Ours first; then by how much of them is installed with torch and Lightning.
CONTENDERS: dict[str, type[Contender]] = {
    "ours, memory step": Ours,
    "ours, memory step, overlapped": OursOverlapped,
    "ours, durable step": OursToS3,
    "torch.save": TorchSave,
    "Lightning TorchCheckpointIO": Lightning,
    "Lightning AsyncCheckpointIO": LightningAsync,
    "DCP, sync": DCP,
    "DCP, async, thread": DCPThread,
    "DCP, async, process, shared memory": DCPProcess,
    "s3torchconnector, Lightning": S3Connector,
    "s3torchconnector, DCP, async": S3ConnectorDCP,
    "nvidia-resiliency-ext": NvidiaResiliency,
    "DLRover Flash Checkpoint": DLRover,
    "amzn-sagemaker-checkpointing, S3 tier, async": SageMaker,
    "NeMo S3CheckpointIO": NeMo,
}
