"""Every error that this package raises on purpose, and values of callers: checked, and without secrets in its text.

An error says what failed (operation, tier, key, rank, step) and what to do (hint). Errors travel
between ranks by pickle, so every one of them can be pickled.
"""

from __future__ import annotations

import difflib
import math
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeGuard

HIDDEN = "***"
#: ``scheme://user:password@``; a password may hold slashes, as AWS's keys do. A number is a port.
_PASSWORD = re.compile(r"(?P<head>[A-Za-z][A-Za-z0-9+.-]*:/{1,2}[^/@:\s]*):(?!\d+(?:/|\Z))\S*@")
_WORDS = r"(?:key|secret|token|passw|credential|creds|auth|signature|\bsig)"
#: A field of a query, as presigned URLs have them.
_FIELD = re.compile(rf"(?P<head>[?&;][^=&;#\s]*{_WORDS}[^=&;#\s]*=)[^&;#\s]+", re.IGNORECASE)
_NAME = re.compile(rf"{_WORDS}|options", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Returns the text, with passwords of URLs and secret fields of queries replaced by ``***``."""
    return _FIELD.sub(rf"\g<head>{HIDDEN}", _PASSWORD.sub(rf"\g<head>:{HIDDEN}@", text))


def holds_secrets(text: str) -> bool:
    """Returns True if :func:`without_secrets` hides something of the text."""
    return without_secrets(text) != text


def shown(value: object, *, name: str = "") -> str:
    """Returns the value for an error's text; hidden altogether if ``name`` says that it is a secret.

    So are containers: their content is not known.
    """
    if isinstance(value, int | float | None):
        return repr(value)
    if _NAME.search(name) or isinstance(value, dict):
        return HIDDEN
    return without_secrets(repr(value))


_PLATFORM = sys.platform
if _PLATFORM != "linux":
    # Its locks and mapped files on tmpfs are Linux's. Here, as all that does something imports this; not in __init__,
    # because a trainer without our classes loads the entry points of this package on any system.
    raise ImportError(f"tiered_checkpoint_io runs on Linux only; this is {_PLATFORM}")

_CONTEXT_FIELDS = ("operation", "tier", "key", "rank", "step")
#: Kinds of failure that code distinguishes within one class.
Reason = Literal[
    "access",  # StoreError: rights are missing
    "archived",  # StoreError: the object has to be restored from an archive before it can be read
    "changed",  # StoreError: the object has changed since it was read; no object was written or removed
    "config",  # StoreError: no such bucket, region or endpoint
    "credentials",  # StoreError: credentials are missing, wrong or expired
    "full",  # StoreError, MemoryTierError: no space, or a quota is used up
    "missing",  # StoreNotFoundError
    "unavailable",  # StoreError: throttling, failing or unreachable
    "unsafe",  # MemoryTierError: a folder belongs to another user, is open to others, or is a symbolic link
    "format",  # CorruptCheckpointError: another format version than the one that this release reads
    "held",  # ConfigError: another program uses the checkpoint
    "other_kind",  # RestoreError: a full checkpoint instead of a sharded one, or the reverse
    "lost_rank",  # RestoreError: a rank died or can't be reached
]


class TieredCheckpointError(Exception):
    """Base of all errors of this package.

    Args:
        message: The failure, in one sentence.
        operation: The operation that failed, for example ``"upload"``.
        tier: ``"memory"`` or ``"durable"``.
        key: The key, path or URL that it was about.
        rank: The global rank on which it failed.
        step: The training step of the checkpoint.
        hint: Advice for the user.
        reason: The kind of failure, if code distinguishes several of one class; see :data:`Reason`.
        rejected: Of a restore, ids of saves that were tried before, and the reasons why they were not taken.
    """

    #: The tier that errors of this class are about, if none is named.
    _tier: str | None = None
    #: The reason of errors of this class, if none is named.
    _reason: Reason | None = None

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
        reason: Reason | None = None,
        rejected: Mapping[str, str] | None = None,
    ) -> None:
        # Errors are logged, written down and sent to other ranks; URLs in them may hold secrets.
        self.message = without_secrets(message)
        self.operation = operation
        self.tier = tier or self._tier
        self.key = without_secrets(key) if key is not None else None
        self.rank = rank
        self.step = step
        self.hint = without_secrets(hint) if hint is not None else None
        self.reason = reason or self._reason
        self.rejected = dict(rejected or {})
        super().__init__(self.message)

    @property
    def retryable(self) -> bool:
        """True if the same call may succeed later without any change."""
        return self.reason in ("unavailable", "changed")

    def reworded(self, message: str, **changes: Any) -> TieredCheckpointError:
        """Returns the same error with another text."""
        _, (kind, _, state) = self.__reduce__()
        return _rebuild(kind, message, {**state, **changes})

    def __str__(self) -> str:
        context = ", ".join(
            f"{field}={getattr(self, field)}" for field in _CONTEXT_FIELDS if getattr(self, field) is not None
        )
        text = f"{self.message} [{context}]" if context else self.message
        return f"{text} — {self.hint}" if self.hint else text

    def __reduce__(self) -> tuple[Any, ...]:
        state = {field: getattr(self, field) for field in (*_CONTEXT_FIELDS, "hint", "reason", "rejected")}
        return (_rebuild, (type(self), self.message, state))


def _rebuild(cls: type[TieredCheckpointError], message: str, state: dict[str, Any]) -> TieredCheckpointError:
    return cls(message, **state)


class ConfigError(TieredCheckpointError, ValueError):
    """A setting, a name or a call is not allowed. No state was changed."""


class CheckpointNotFoundError(TieredCheckpointError, FileNotFoundError):
    """No tier holds the checkpoint."""


class CorruptCheckpointError(TieredCheckpointError):
    """Bytes differ from their manifest, a manifest can't be understood, or it has another format version."""


class MemoryTierError(TieredCheckpointError, OSError):
    """The memory tier of this node is full, can't be used, or is not safe to use."""


class StoreError(TieredCheckpointError, OSError):
    """An operation on the durable tier failed; ``reason`` says why."""

    _tier = "durable"

    @property
    def is_denied(self) -> bool:
        """True if rights or credentials are missing."""
        return self.reason in ("access", "credentials")


class StoreNotFoundError(StoreError, FileNotFoundError):
    """The durable tier has no object under this key."""

    _reason = "missing"


class SaveError(TieredCheckpointError, RuntimeError):
    """A checkpoint or an export was not written to its tiers or its target."""


class DrainError(TieredCheckpointError, RuntimeError):
    """The upload in the background failed, died, or did not finish in time."""


class RestoreError(TieredCheckpointError, RuntimeError):
    """No candidate could be restored, or the ranks could not agree on one."""


def is_other_format(error: object) -> TypeGuard[CorruptCheckpointError]:
    """Returns True if a document has another format version than the one that this release reads."""
    return isinstance(error, CorruptCheckpointError) and error.reason == "format"


def did_you_mean(name: object, known: Collection[str]) -> str:
    """Returns the hint for an unknown name: the nearest known one, or all of them."""
    plain = {each.replace("_", "").lower(): each for each in known}
    near = difflib.get_close_matches(str(name).replace("_", "").lower(), plain, n=1)
    return f"did you mean {plain[near[0]]!r}?" if near else f"known names: {', '.join(known)}"


def seconds(key: str, value: Any, *, above: float | None = None) -> float:
    """Returns a given time in seconds: from 0 on, maybe infinite, or finite and ``above`` a number.

    Raises:
        ConfigError: The value is no such number. A wait of nan seconds would never end.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    good = is_number and (value >= 0 if above is None else above < value < math.inf)
    if not good:
        allowed = "a number of seconds, from 0 on" if above is None else f"a number of seconds above {above:g}"
        raise ConfigError(f"{key} is {value!r}", hint=f"allowed: {allowed}")
    return float(value)
