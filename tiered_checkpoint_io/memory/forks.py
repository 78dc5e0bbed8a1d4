"""Forked processes: a child leaves slots, locks and queues to its parent.

A worker of a DataLoader, or a rank of ``ddp_fork``, begins with a copy of its parent's memory and descriptors, and with
none of its threads.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Owner(Protocol):
    """Resources that belong to one process."""

    def forked(self) -> None:
        """Gives up the parent's resources in a forked child, on its only thread, without changing them."""


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def register(owner: Owner) -> None:
    """Has ``owner.forked`` called in each child that is forked from now on."""
    _owners.add(owner)


def _in_child() -> None:
    for owner in list(_owners):
        owner.forked()


os.register_at_fork(after_in_child=_in_child)
