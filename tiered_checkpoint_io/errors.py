"""Every error that this package raises on purpose.

An error says what failed (operation, tier, key, rank, step) and what to do (hint). Errors travel
between ranks by pickle, so every one of them can be pickled.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from tiered_checkpoint_io.redaction import without_secrets

_PLATFORM = sys.platform
if _PLATFORM != "linux":
    # Its locks and mapped files on tmpfs are Linux's. Here, as all that does something imports this; not in __init__,
    # because a trainer that has nothing of ours loads the entry points of this package on any system.
    raise ImportError(f"tiered_checkpoint_io runs on Linux only; this is {_PLATFORM}")

_CONTEXT_FIELDS = ("operation", "tier", "key", "rank", "step")


class TieredCheckpointError(Exception):
    """Base of all errors of this package.

    Args:
        message: What failed, in one sentence.
        operation: The operation that failed, for example ``"upload"``.
        tier: ``"memory"`` or ``"durable"``.
        key: The key, path or URL that it was about.
        rank: The global rank on which it failed.
        step: The training step of the checkpoint.
        hint: What the user can do about it.
    """

    #: Whether the same call may succeed later without any change.
    retryable: bool = False
    #: The tier that errors of this class are about, where none is named.
    _tier: str | None = None

    def __init__(
        self,
        message: str,
        *,
        operation: str | None = None,
        tier: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        step: int | None = None,
        hint: str | None = None,
    ) -> None:
        # Errors are logged, written down and sent to other ranks; URLs in them may hold what none of those should.
        self.message = without_secrets(message)
        self.operation = operation
        self.tier = tier or self._tier
        self.key = without_secrets(key) if key is not None else None
        self.rank = rank
        self.step = step
        self.hint = without_secrets(hint) if hint is not None else None
        super().__init__(self.message)

    def __str__(self) -> str:
        context = ", ".join(
            f"{field}={getattr(self, field)}" for field in _CONTEXT_FIELDS if getattr(self, field) is not None
        )
        text = f"{self.message} [{context}]" if context else self.message
        return f"{text} — {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        state = {field: getattr(self, field) for field in (*_CONTEXT_FIELDS, "hint")}
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[TieredCheckpointError], message: str, state: dict[str, Any]) -> TieredCheckpointError:
    return cls(message, **state)


class ConfigError(TieredCheckpointError, ValueError):
    """A configuration key or value is not allowed. Nothing was done."""


class InvalidNameError(TieredCheckpointError, ValueError):
    """A checkpoint name, key or URL is malformed, or would leave its folder. Nothing was done."""


class UsageError(TieredCheckpointError, RuntimeError):
    """The API was called where, or in a way that, it cannot work."""


class CheckpointNotFoundError(TieredCheckpointError, FileNotFoundError):
    """No tier holds the checkpoint that was asked for by name."""


class HeldError(TieredCheckpointError):
    """A checkpoint is in use by another program, so it was not deleted."""


class CorruptCheckpointError(TieredCheckpointError):
    """Bytes in a tier differ from what their manifest says, or are missing."""


class ManifestError(TieredCheckpointError):
    """A manifest or part manifest that cannot be understood."""


class FormatVersionError(ManifestError):
    """A document of another format version than the one that this version of the package reads."""


class MemoryTierError(TieredCheckpointError, OSError):
    """The memory tier of this node cannot be used."""


class MemoryFullError(MemoryTierError):
    """No room in the memory tier: by its budget, or by the file system that it lies on."""


class MemoryUnsafeError(MemoryTierError, PermissionError):
    """The memory tier's folder is not ours, is open to others, or is a symbolic link."""


class StoreError(TieredCheckpointError, OSError):
    """An operation on the durable tier failed."""

    _tier = "durable"


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The durable tier has no object under this key."""


class StoreArchivedError(StoreError):
    """An object is there, and can't be read before the durable tier has been told to restore it."""


class StoreAccessError(StoreError, PermissionError):
    """The durable tier refuses, as rights are missing. Retrying does not help."""


class StoreCredentialsError(StoreAccessError):
    """Credentials for the durable tier are missing, wrong or expired. With others, the same call may succeed."""


class StoreConfigError(StoreError):
    """The durable tier does not exist as configured: bucket, region or endpoint."""


class StoreFullError(StoreError):
    """The durable tier is full: its disks, or a quota. What was there before is intact."""


class StoreUnavailableError(StoreError):
    """The durable tier is throttling, failing or unreachable. The same call may succeed later."""

    retryable = True


class StoreChangedError(StoreError):
    """An object is not as it was read, so it was neither replaced nor removed. Look at it anew, and decide again."""

    retryable = True


class WaitTimeoutError(TieredCheckpointError, TimeoutError):
    """What was waited for did not come in time."""


class DrainError(TieredCheckpointError, RuntimeError):
    """The background drain failed, died, or did not finish in time."""


class SaveError(TieredCheckpointError, RuntimeError):
    """A checkpoint did not reach the tiers that it was meant for."""


class RestoreError(TieredCheckpointError, RuntimeError):
    """No candidate could be restored, or the ranks could not agree on one."""


class OtherKindError(RestoreError):
    """The checkpoint to restore is a full one where a sharded one was asked for, or the reverse.

    Args:
        message: As :class:`TieredCheckpointError` takes it.
        rejected: Ids of saves that were tried before it, and why they were not taken.
        context: As :class:`TieredCheckpointError` takes it.
    """

    def __init__(self, message: str, *, rejected: Mapping[str, str] | None = None, **context: Any) -> None:
        super().__init__(message, **context)
        self.rejected = dict(rejected or {})

    def __reduce__(self) -> tuple[Any, ...]:
        build, (kind, message, state) = super().__reduce__()
        return build, (kind, message, {**state, "rejected": self.rejected})


class LostRankError(RestoreError):
    """A rank died, or can't be reached any more, while all were restoring together."""


class PeerError(TieredCheckpointError, RuntimeError):
    """A part did not get to another node's memory, or did not come from there."""


class ExportError(TieredCheckpointError, RuntimeError):
    """An export can't be written as asked. What was there before is as it was."""
