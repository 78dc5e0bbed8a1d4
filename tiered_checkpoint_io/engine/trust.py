"""Trust in a loaded checkpoint: its objects other than tensors and plain data, whose code may run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tiered_checkpoint_io.errors import ConfigError, RestoreError
from tiered_checkpoint_io.formats import safe_pickle, safe_values, torch_file
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_TRUST_ALL = (
    "if you trust all who can write there, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
)
_YES = ("1", "y", "yes", "true")


@dataclass(frozen=True, slots=True)
class Trust:
    """Extent to which a checkpoint is trusted: ``weights_only`` as ``torch.load`` takes it (None: torch refuses).

    Classes and functions with the ``names``, as ``module.name``, are allowed all the same.
    """

    weights_only: bool | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TieredCheckpointConfig, weights_only: bool | None = None) -> Trust:
        """Returns the trust of a load: ``weights_only`` of its caller, and the names that a configuration allows."""
        return cls(weights_only, config.safe_globals)

    @property
    def is_full(self) -> bool:
        """True if everything is allowed, by the caller or by torch's own environment variable."""
        forced = self.weights_only is None and _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        return (self.weights_only is False or forced) and not _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")

    def load(self, file: Any, *, mapped: torch.UntypedStorage | None = None, **options: Any) -> Any:
        """Loads a file with ``torch.load``; raises its errors, and ConfigError if a name can't be imported.

        ``mapped`` has the bytes of a path's file if they are mapped already: ``torch.load`` would map them once more.
        """
        if self.is_full:
            return torch.load(file, weights_only=self.weights_only, **options)
        reader = None if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD") else torch_file.reader_of(file)
        if reader is None:
            # In the old format, or of TorchScript: only torch reads it.
            with torch.serialization.safe_globals(list(safe_values.named(self.names).values())):
                return torch.load(file, weights_only=True, **options)
        if options.pop("mmap", False) and mapped is None:
            mapped = torch.UntypedStorage.from_file(os.fspath(file), False, os.path.getsize(file))  # type: ignore[assignment]
        return torch_file.load(reader, safe_values.allowed(self.names), mapped, options.get("map_location"))

    def read(self, file: Any, what: str, where: Mapping[str, Any], *, verified: bool = True, **options: Any) -> Any:
        """Loads as :meth:`load` does; if torch refuses, raises RestoreError, which says what to do.

        The error calls the file ``what``, and has the fields of ``where``. Unless ``verified``, its bytes may not be
        those that were saved.
        """
        try:
            return self.load(file, **options)
        except ConfigError:
            raise
        except Exception as error:
            reason = self.reason(error) or type(error).__name__
            raise RestoreError(
                f"torch.load refused {what}, whose bytes are intact: {reason}"
                if verified
                else f"torch.load refused {what}, which has no manifest to verify it by: {reason}",
                operation="load",
                hint=self.hint(error, verified=verified),
                **where,
            ) from error

    @staticmethod
    def reason(error: Exception) -> str:
        """Returns the reason for which torch refused a file, on one line, without torch's own advice."""
        _, found, said = str(error).partition("WeightsUnpickler error: ")
        return " ".join((said.partition(" Please use ")[0] if found else str(error)).split())

    def hint(self, error: Exception, *, verified: bool = True) -> str:
        """Returns the advice about a file that could not be loaded."""
        advice = self.advice(getattr(error, "names", ()))
        is_read = verified or isinstance(error, safe_pickle.RefusedError)
        return advice if is_read else f"it may be cut off, or no file of torch.save; {advice}"

    def lacking_in(self, content: Any) -> list[str]:
        """Returns the names, sorted, that are not allowed: of an :class:`Image`, or of bytes that ``torch.save`` wrote.

        Raises ConfigError if one of :attr:`names` is of nothing that can be imported, and others for bytes of no such
        file.
        """
        # The pickle comes first in the file, and all of it lies before the first tensor.
        heads = [min(content.segments, key=lambda each: each.offset).data] if isinstance(content, Image) else content
        return safe_values.allowed(self.names).lacks(
            {name for head in heads for name in torch_file.names_in(memoryview(head))}
        )

    def advice(self, lacking: Iterable[str]) -> str:
        """Returns the advice about names in a checkpoint that are not allowed."""
        names = list(lacking)
        if not names:
            return f"if it holds objects of yours: {_TRUST_ALL}"
        blocked = [name for name in names if safe_values.is_blocked(name)]
        if blocked:
            return f"it holds {', '.join(blocked)}, which no list can allow: {_TRUST_ALL}"
        line = ", ".join(dict.fromkeys((*self.names, *names)))
        return f"it holds {', '.join(names)}; to allow that, set safe_globals: [{line}]; or, {_TRUST_ALL}"


def _is_set(variable: str) -> bool:
    return os.getenv(variable, "0").lower() in _YES
