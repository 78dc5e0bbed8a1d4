"""Reads the file ``.metadata`` of torch.distributed.checkpoint.

The file is a pickle. Upstream unpickles any content. Here the parser of :mod:`.safe_pickle` reads it, with the classes
that DCP itself writes named as a user names others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint import filesystem, metadata

from tiered_checkpoint_io.errors import ConfigError, CorruptCheckpointError
from tiered_checkpoint_io.formats import safe_pickle, safe_values
from tiered_checkpoint_io.formats.safe_pickle import Allowed, Call, Converter, RefusedError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA


@dataclass
class _SageMakerInfo:
    """The place of an item in a checkpoint of the SageMaker library."""

    rank: int
    offset: int
    length: int


_INDEX = f"{metadata.__name__}.MetadataIndex"
_CLASSES = {
    f"{cls.__module__}.{cls.__name__}": cls
    for cls in (
        *(metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata, metadata.Metadata, metadata.MetadataIndex),
        *(metadata.StorageMeta, metadata.TensorProperties, metadata.TensorStorageMetadata),
        *(metadata._MEM_FORMAT_ENCODING, filesystem._StorageInfo),
    )
}
_OF_SAGEMAKER = "amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info._SageMakerStorageInfo"


def _index(call: Call, convert: Converter) -> metadata.MetadataIndex:
    """Makes a key of ``storage_data``: its hash must not lead further."""
    made: metadata.MetadataIndex = convert.by_user(call)
    kinds = (type(made.fqn), type(made.offset), type(made.index))
    if kinds[0] is not str or kinds[1] not in (torch.Size, type(None)) or kinds[2] not in (int, type(None)):
        raise RefusedError("a MetadataIndex is not as it is saved")
    return made


def parse_metadata(
    data: bytes | memoryview, *, tier: str, where: str, shard_name: Callable[[int], str] | None = None
) -> metadata.Metadata:
    """Parses a ``.metadata`` file that was found in ``tier``, at the key or path ``where``.

    Args:
        data: The file's content.
        tier: The file's tier, for errors.
        where: The file's key or path, for errors.
        shard_name: Returns the file of a rank, for metadata of the SageMaker library, which names ranks and no files.

    Raises:
        CorruptCheckpointError: The file is not of DCP's format, or names files outside of its folder.
    """
    try:
        others = {} if shard_name is None else {_OF_SAGEMAKER: _SageMakerInfo}
        rules = {**safe_values.RULES, _INDEX: _index}
        allowed = Allowed(rules, safe_values.value, lambda _: False, {**_CLASSES, **others})
        found = safe_pickle.load(bytes(data), allowed)
        if not isinstance(found, metadata.Metadata):
            raise TypeError(f"it holds a {type(found).__name__}")
        if shard_name is not None:
            found.storage_data = {
                index: filesystem._StorageInfo(shard_name(info.rank), info.offset, info.length)
                if isinstance(info, _SageMakerInfo)
                else info
                for index, info in (found.storage_data or {}).items()
            }
        _check(found)
    except (RefusedError, TypeError, ValueError, AttributeError) as error:
        names = ", ".join(getattr(error, "names", ()))
        said = f"it names {names}, which torch.distributed.checkpoint does not write" if names else str(error)
        raise CorruptCheckpointError(
            f"{METADATA} can't be read: {said}", operation="load", tier=tier, key=where
        ) from error
    return found


def _check(found: metadata.Metadata) -> None:
    for fqn, entry in found.state_dict_metadata.items():
        known = isinstance(entry, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata)
        if not isinstance(fqn, str) or not known:
            raise TypeError(f"{fqn!r} is neither a tensor nor bytes")
    known_names: set[str] = set()
    for index, info in (found.storage_data or {}).items():
        if not isinstance(index, metadata.MetadataIndex) or not isinstance(info, filesystem._StorageInfo):
            raise TypeError(f"{index!r} has no place in a file")
        if info.relative_path not in known_names:
            try:
                known_names.add(ids.validate_name(info.relative_path))
            except ConfigError:
                raise ValueError(f"{info.relative_path!r} is not a file of its folder") from None
        for value in (info.offset, info.length):
            if type(value) is not int or value < 0:
                raise ValueError(f"{index!r} lies at {info.offset!r}, length {info.length!r}")
