"""Files of ``torch.save`` from any writer, read without running their code."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import torch

from tiered_checkpoint_io.formats import safe_pickle, safe_tensors

_ZIP = b"PK\x03\x04"
#: In the header of a record in a zip file: the place of the lengths of its name and of the next field.
_LENGTHS_AT, _HEADER_LENGTH = 26, 30
#: ``torch.load`` calls it with an open reader.
_load: Any = torch.serialization._load


def reader_of(file: Any) -> Any:
    """Returns a reader of a file of torch.save; None if torch would do more with it than unpickle ``data.pkl``."""
    with contextlib.nullcontext(file) if hasattr(file, "seek") else open(file, "rb") as opened:
        begin = opened.tell()
        is_zip = opened.read(len(_ZIP)) == _ZIP
        opened.seek(begin)
    if not is_zip:
        return None
    reader = torch._C.PyTorchFileReader(file if hasattr(file, "seek") else os.fspath(file))
    return None if "constants.pkl" in reader.get_all_records() else reader


def load(reader: Any, allowed: safe_pickle.Allowed, mapped: torch.UntypedStorage | None, map_location: Any) -> Any:
    """Returns the state in a file.

    Args:
        reader: See :func:`reader_of`.
        allowed: Objects that it may hold besides data.
        mapped: The bytes of the file, if they are mapped already.
        map_location: As ``torch.load`` takes it.

    Raises:
        RefusedError: The pickle is damaged, or holds something that is not allowed.
        Exception: The file is damaged.
    """
    record_size = getattr(reader, "get_record_size", None)
    if record_size is None and mapped is None:
        # An older torch, which takes a storage for as large as the pickle says.
        record_size = lambda name: len(reader.get_record(name))  # noqa: E731
    # torch passes these options to the unpickler.
    options = {"allowed": allowed, "record_size": record_size}
    return _load(reader, map_location, _BY_RULES, overall_storage=mapped, **options)


def names_in(head: memoryview) -> list[str]:
    """Returns the names in a file that begins so."""
    if bytes(head[: len(_ZIP)]) != _ZIP:
        return []
    lengths = (head[at : at + 2] for at in (_LENGTHS_AT, _LENGTHS_AT + 2))
    begin = _HEADER_LENGTH + sum(int.from_bytes(length, "little") for length in lengths)
    return safe_pickle.parse(bytes(head[begin:]))[1]


class _Unpickler:
    """An unpickler for torch, which adds ``persistent_load``: that loads storages."""

    persistent_load: Any

    def __init__(self, file: Any, *, allowed: safe_pickle.Allowed, record_size: Any) -> None:
        self._data, self._allowed, self._record_size = file.read(), allowed, record_size

    def load(self) -> Any:
        storages = safe_tensors.storages(self.persistent_load, self._record_size)
        return safe_pickle.load(self._data, self._allowed, storages)


_BY_RULES: Any = SimpleNamespace(Unpickler=_Unpickler, __name__=__name__)
