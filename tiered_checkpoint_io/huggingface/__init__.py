"""Hugging Face: a callback for transformers.Trainer, and checkpoints of a loop with Accelerate.

``pip install tiered-checkpoint-io[huggingface]``; see docs/huggingface.md.
"""

from tiered_checkpoint_io.errors import ConfigError

try:
    from tiered_checkpoint_io.huggingface.accelerate import AcceleratorCheckpoints
    from tiered_checkpoint_io.huggingface.trainer import TieredCheckpointCallback
except ImportError as missing:
    raise ConfigError(
        f"tiered_checkpoint_io.huggingface needs transformers and accelerate: {missing}",
        operation="import",
        hint="pip install 'tiered-checkpoint-io[huggingface]'",
    ) from missing

__all__ = ["AcceleratorCheckpoints", "TieredCheckpointCallback"]
