"""Hydra configurations of the group ``s3_checkpointing``, at ``pkg://tiered_checkpoint_io.configs``."""
