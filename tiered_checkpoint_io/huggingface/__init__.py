"""Hugging Face: a callback for transformers.Trainer, and checkpoints of a loop with Accelerate.

``pip install tiered-checkpoint-io[huggingface]``; see docs/huggingface.md.
"""

try:
    from tiered_checkpoint_io.huggingface.accelerate import AcceleratorCheckpoints
    from tiered_checkpoint_io.huggingface.trainer import TieredCheckpointCallback
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"tiered_checkpoint_io.huggingface needs transformers and accelerate ({missing}):"
        " pip install 'tiered-checkpoint-io[huggingface]'",
        name=missing.name,
    ) from missing

__all__ = ["AcceleratorCheckpoints", "TieredCheckpointCallback"]
