"""What a checkpoint that is loaded may hold beside tensors and plain data: whose code may run."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tiered_checkpoint_io.errors import ConfigError, RestoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_TRUST_ALL = "if you trust whoever can write there wholly, set weights_only to false"


@dataclass(frozen=True, slots=True)
class Trust:
    """How far a checkpoint is trusted.

    Attributes:
        weights_only: As ``torch.load`` takes it; None leaves it to torch, which refuses.
        names: Classes and functions that are allowed all the same, as ``module.name``.
    """

    weights_only: bool | None = None
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: TieredCheckpointConfig, weights_only: bool | None = None) -> Trust:
        """What a configuration says; ``weights_only`` of a caller wins."""
        return cls(config.weights_only if weights_only is None else weights_only, config.safe_globals)

    def load(self, file: Any, **options: Any) -> Any:
        """As ``torch.load``.

        Raises:
            ConfigError: A name is of nothing that can be imported.
            Exception: Whatever ``torch.load`` raises.
        """
        with self.allowing():
            return torch.load(file, weights_only=self.weights_only, **options)

    def read(self, file: Any, what: str, where: Mapping[str, Any], **options: Any) -> Any:
        """As :meth:`load`, for bytes that are intact.

        Args:
            file: A path, or an open file.
            what: What it is, for the error.
            where: Further fields of the error.
            options: As ``torch.load`` takes them.

        Raises:
            ConfigError: A name is of nothing that can be imported.
            RestoreError: torch refuses it; says what to do.
        """
        try:
            return self.load(file, **options)
        except ConfigError:
            raise
        except Exception as error:
            raise RestoreError(
                f"torch.load refused {what}, whose bytes are intact: {self.reason(error)}",
                operation="load",
                hint=self.hint(file),
                **where,
            ) from error

    @contextlib.contextmanager
    def allowing(self) -> Iterator[None]:
        """While the block runs, torch allows what :attr:`names` says."""
        with torch.serialization.safe_globals([_imported(name) for name in self.names]):
            yield

    @staticmethod
    def reason(error: Exception) -> str:
        """What torch says of why it refused a file, without its advice, which names functions of its own."""
        _, found, said = str(error).partition("WeightsUnpickler error: ")
        return said.partition("\n")[0].partition(" Please use ")[0] if found else str(error)

    def hint(self, file: Any) -> str:
        """What to do about a file that torch refused to load."""
        names: list[str] = []
        with contextlib.suppress(Exception), self.allowing():
            if hasattr(file, "seek"):
                file.seek(0)
            names = sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file))
        if not names:
            return f"if it holds objects of yours: {_TRUST_ALL}"
        return f"it holds {', '.join(names)}: list them under safe_globals; or, {_TRUST_ALL}"


def _imported(name: str) -> Any:
    """What a dotted name names."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
        except AttributeError:
            break
        return found
    raise ConfigError(f"safe_globals names {name!r}, which can't be imported", hint="as in 'package.module.Class'")
