"""NeMo's advice on concurrency: how many requests each writer and reader may have in flight (pure)."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model.config import GETS_PER_SECOND, HEADROOM, PUTS_PER_SECOND, TieredCheckpointConfig


class Topology(NamedTuple):
    """How many ranks there are, and how they split the model: its tensor and its pipeline parallel size."""

    world_size: int = 1
    tensor: int = 1
    pipeline: int = 1


class Advice(NamedTuple):
    """A configuration with figures in place of ``auto``, and a warning for each other figure that is too high."""

    config: TieredCheckpointConfig
    warnings: tuple[str, ...]


def advise(config: TieredCheckpointConfig, topology: Topology) -> Advice:
    """Figures for ``auto``, and warnings about others.

    ``concurrency x tensor x pipeline x 1.15`` stays within what S3 serves a second and prefix: 3,500
    writes, 5,500 reads. A connection finishes about one request a second.

    Args:
        config: Whose ``max_write_concurrency`` and ``max_read_concurrency`` are looked at.
        topology: The job's ranks.

    Raises:
        ConfigError: A size is below 1, or the model's parts are more than there are ranks.
    """
    if min(topology) < 1:
        raise ConfigError(f"{topology} has a size below 1", hint="all three are whole numbers from 1")
    # One rank of each model-parallel position writes, or reads, at once.
    sharers = topology.tensor * topology.pipeline
    if sharers > topology.world_size:
        raise ConfigError(
            f"tensor x pipeline parallel size is {sharers}, of {topology.world_size} ranks",
            hint="check model.tensor_model_parallel_size and model.pipeline_model_parallel_size",
        )
    warnings = []
    for key, per_second in (("max_write_concurrency", PUTS_PER_SECOND), ("max_read_concurrency", GETS_PER_SECOND)):
        value = getattr(config, key)
        if value != "auto" and value * sharers * HEADROOM > per_second:
            warnings.append(
                f"{key} is {value}: with tensor parallel size {topology.tensor} and pipeline parallel size"
                f" {topology.pipeline} that is up to {value * sharers * HEADROOM:,.0f} requests a second, of"
                f" {per_second:,} that S3 serves for one prefix; use at most"
                f" {max(1, int(per_second / HEADROOM / sharers))}, or 'auto'"
            )
    write, read = config.write_concurrency(sharers), config.read_concurrency(sharers)
    return Advice(replace(config, max_write_concurrency=write, max_read_concurrency=read), tuple(warnings))
