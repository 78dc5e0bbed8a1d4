"""Asks the durable tier: what an S3 bucket allows, whether another tier can be written to, and how fast either is."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
#: How long an interrupted command clears up, seconds.
_CLEAR_S = 3


def bucket_facts(config: TieredCheckpointConfig) -> BucketFacts:
    """Probes the bucket of a configuration.

    Raises:
        StoreUnavailableError: It was silent for ``durable_timeout_s``.
        StoreConfigError: There can be no client.
    """
    from tiered_checkpoint_io.stores.s3_probe import probe_bucket

    folder = _folder()
    with _cleared(config, folder):
        return answer(config, config.dirpath, lambda: probe_bucket(config, folder))


def tried(config: TieredCheckpointConfig) -> Sequence[TieredCheckpointError]:
    """Why writing to a durable tier that is no bucket, and reading and deleting there, failed.

    Raises:
        TieredCheckpointError: It could not be asked.
    """
    folder = _folder()
    with _cleared(config, folder):
        return ask(config, lambda store: try_requests(store, folder + "object", multipart=False))


def rates(config: TieredCheckpointConfig) -> RateFacts:
    """Sends and reads for a few seconds, by several requests at once; nothing is left there.

    Raises:
        TieredCheckpointError: It could not be done, or took longer than ``durable_timeout_s`` without an answer.
    """
    folder = _folder()
    with _cleared(config, folder):
        return ask(replace(config, chunk_size_MB=_PART_MIB), lambda store: _measure(store, folder + "object"))


def _folder() -> str:
    return ids.doctor_prefix(os.urandom(8).hex())


@contextlib.contextmanager
def _cleared(config: TieredCheckpointConfig, folder: str) -> Iterator[None]:
    """Removes what lies in a folder where the block is interrupted: the process ends before its thread does that."""
    try:
        yield
    except Exception:
        # Of a server that does not answer, the next doctor removes it.
        raise
    except BaseException:
        with contextlib.suppress(TieredCheckpointError):
            soon = config.with_support(durable_timeout_s=_CLEAR_S)
            ask(soon, lambda store: in_parallel(store.delete, [each.key for each in store.list(folder)]))
        raise


def _measure(store: Store, key: str) -> RateFacts:
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
