"""The file ``.metadata`` of torch.distributed.checkpoint, read without running what is in it.

The file is a pickle. Upstream unpickles whatever it finds; here nothing but the classes that DCP
itself writes is looked up, so that a file from a bucket is data and never code.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata

from tiered_checkpoint_io.errors import CorruptCheckpointError, InvalidNameError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import METADATA

_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
        if hasattr(metadata, name)
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): OrderedDict,
    # The folder that it was first written to.
    **{(module, "PosixPath"): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local")},
    **{(module, "WindowsPath"): pathlib.PureWindowsPath for module in ("pathlib", "pathlib._local")},
}


#: Where an item lies in the SageMaker library's checkpoints.
_OF_SAGEMAKER = ("amzn_sagemaker_checkpointing.checkpointing.filesystem.storage_info", "_SageMakerStorageInfo")


@dataclass
class _SageMakerInfo:
    rank: int
    offset: int
    length: int


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        allowed = _ALLOWED.get((module, name))
        if allowed is None and module == "torch":
            found = getattr(torch, name, None)
            allowed = found if isinstance(found, torch.dtype) else None
        if allowed is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which torch.distributed.checkpoint does not write")
        return allowed


class _SageMakerUnpickler(_Unpickler):
    def find_class(self, module: str, name: str, /) -> Any:
        return _SageMakerInfo if (module, name) == _OF_SAGEMAKER else super().find_class(module, name)


def parse_metadata(
    data: bytes | memoryview, *, tier: str, where: str, shard_name: Callable[[int], str] | None = None
) -> metadata.Metadata:
    """What a ``.metadata`` file says that was found in ``tier``, at the key or path ``where``.

    Args:
        data: The file's content.
        tier: For errors.
        where: For errors.
        shard_name: Where it may be of the SageMaker library, which names ranks and no files: the file of a rank.

    Raises:
        CorruptCheckpointError: It is not such a file, holds other things than DCP writes, or names
            files outside of its folder.
    """
    try:
        found = (_Unpickler if shard_name is None else _SageMakerUnpickler)(io.BytesIO(data)).load()
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
    except Exception as error:
        # A damaged pickle may raise anything.
        raise CorruptCheckpointError(
            f"{METADATA} can't be read: {error}", operation="load", tier=tier, key=where
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
            except InvalidNameError:
                raise ValueError(f"{info.relative_path!r} is not a file of its folder") from None
        for value in (info.offset, info.length):
            if type(value) is not int or value < 0:
                raise ValueError(f"{index!r} lies at {info.offset!r}, length {info.length!r}")
