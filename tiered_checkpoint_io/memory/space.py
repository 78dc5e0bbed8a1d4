"""Errors of a node that is full: how they are recognized, and the one error that is raised."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tiered_checkpoint_io.errors import MemoryTierError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG)
_SCARCE = (errno.EMFILE, errno.ENFILE, *NO_SPACE)
FULL_HINT = "memory_dir is full: give it more space (docker: --shm-size), or lower memory_keep_last"


class MemoryFullError(MemoryTierError):
    """No room in the memory tier: its budget is used up, or its file system is full."""

    _reason = "full"


@contextlib.contextmanager
def needs_space(what: str, *, operation: str, key: str, hint: str = FULL_HINT) -> Iterator[None]:
    """Translates errors of a block that takes space of the memory tier.

    Args:
        what: The thing that has no space, as a sentence.
        operation: The operation in progress.
        key: The path.
        hint: Advice for the user.

    Raises:
        MemoryFullError: There is no space; other errors are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise MemoryFullError(what, operation=operation, tier="memory", key=key, hint=hint) from error


def is_scarcity(error: BaseException) -> bool:
    """Returns True if space or descriptors are lacking, which other processes may free."""
    return any(isinstance(each, OSError) and each.errno in _SCARCE for each in (error, error.__cause__))


def used(folder: Path) -> int:
    """Returns the number of bytes that all files below a folder take."""
    total = 0
    for base, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
    return total
