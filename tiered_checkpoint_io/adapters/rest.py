"""What Lightning saves beside model and optimizers: pickled before the save returns, and made a file later."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from tiered_checkpoint_io.adapters.state import part_off

#: As torch.save has it.
_PROTOCOL = 2
#: What torch.save writes apart from its pickle.
_APART = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)


class _ApartError(Exception):
    """It holds tensors."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _APART):
            raise _ApartError
        return NotImplemented


class _Written:
    """Stands for a pickler, and is given what one has written."""

    def __init__(self, file: BinaryIO, **_: Any) -> None:
        self._file = file

    def dump(self, pickled: bytes) -> None:
        self._file.write(pickled)


class Rest:
    """What is saved as it is now, whatever changes later.

    Attributes:
        sharded: The sharded tensors in it, which are saved beside the model's.
    """

    def __init__(self, rest: dict[str, Any], model: Mapping[str, Any]) -> None:
        """Pickles it.

        Args:
            rest: Anything.
            model: The model's own tensors, by their names.

        Raises:
            ConfigError: A sharded tensor can't be described.
            Exception: Whatever ``torch.save`` raises for it.
        """
        self.sharded: dict[str, DTensor] = {}
        self._pickled: bytes | None = None
        self._file = io.BytesIO()
        data = io.BytesIO()
        # Training waits for this, and mostly there are no tensors: then nothing else has to look through it.
        try:
            _Pickler(data, _PROTOCOL).dump(rest)
            self._pickled = data.getvalue()
        except _ApartError:
            parted, self.sharded = part_off(rest, model)
            torch.save(parted, self._file)

    def file(self) -> bytes:
        """The file that ``torch.save`` writes."""
        if self._pickled is not None:
            module: Any = SimpleNamespace(Pickler=_Written, __name__="pickle")
            torch.save(self._pickled, self._file, pickle_module=module)
            self._pickled = None
        return self._file.getvalue()
