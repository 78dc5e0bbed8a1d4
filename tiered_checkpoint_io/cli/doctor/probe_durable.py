"""Asks the durable tier: what an S3 bucket allows, whether another tier can be written to, and how fast either is."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from tiered_checkpoint_io.cli.answers import answer, ask
from tiered_checkpoint_io.cli.doctor.facts import RateFacts
from tiered_checkpoint_io.errors import StoreError, TieredCheckpointError
from tiered_checkpoint_io.formats.parallel import in_parallel
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.s3_facts import BucketFacts
from tiered_checkpoint_io.stores.tries import try_requests

_MIB = 1 << 20
#: The sizes that are sent one after the other, until one takes long enough to tell.
_SIZES = (1 * _MIB, 8 * _MIB, 64 * _MIB, 256 * _MIB)
_LONG_ENOUGH_S = 0.5
#: A part of such an upload, MiB, and a piece of such a read.
_PART_MIB = 8


def bucket_facts(config: TieredCheckpointConfig) -> BucketFacts:
    """Probes the bucket of a configuration.

    Raises:
        StoreUnavailableError: It was silent for ``durable_timeout_s``.
        StoreConfigError: There can be no client.
    """
    from tiered_checkpoint_io.stores.s3_probe import probe_bucket

    return answer(config, config.dirpath, lambda: probe_bucket(config))


def tried(config: TieredCheckpointConfig) -> Sequence[TieredCheckpointError]:
    """Why writing to a durable tier that is no bucket, and reading and deleting there, failed.

    Raises:
        TieredCheckpointError: It could not be asked.
    """
    key = ids.doctor_prefix(os.urandom(8).hex()) + "object"
    return ask(config, lambda store: try_requests(store, key, multipart=False))


def rates(config: TieredCheckpointConfig) -> RateFacts:
    """Sends and reads for a few seconds, by several requests at once; nothing is left there.

    Raises:
        TieredCheckpointError: It could not be done, or took longer than ``durable_timeout_s`` without an answer.
    """
    return ask(replace(config, chunk_size_MB=_PART_MIB), _measure)


def _measure(store: Store) -> RateFacts:
    key = ids.doctor_prefix(os.urandom(8).hex()) + "object"
    up = down = 0.0
    piece = os.urandom(_MIB)
    size = _SIZES[0]
    try:
        for size in _SIZES:
            with memoryview(piece * (size // _MIB)) as data:
                seconds = _timed(functools.partial(store.upload, key, data))
            up = size / seconds
            if seconds >= _LONG_ENOUGH_S:
                break
        buffer = bytearray(size)
        starts = range(0, size, _PART_MIB * _MIB)
        with memoryview(buffer) as view:

            def read(start: int) -> None:
                with view[start : start + _PART_MIB * _MIB] as part:
                    store.read_into(key, start, part)

            down = size / _timed(lambda: in_parallel(read, starts))
    finally:
        # That it may not be removed has been told already.
        with contextlib.suppress(StoreError):
            store.delete(key)
    return RateFacts(up, down, size)


def _timed(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return max(1e-6, time.monotonic() - began)
