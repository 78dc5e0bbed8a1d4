"""A pin while a command of the user's reads a checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tiered_checkpoint_io.cli.answers import ask
from tiered_checkpoint_io.cli.output import printable, say
from tiered_checkpoint_io.engine.durable.pins import pin, unpin
from tiered_checkpoint_io.errors import StoreError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: When the pin of a command ends that did not live to remove it, seconds.
EXPIRES_S = 24 * 3600


@contextlib.contextmanager
def pinned(config: TieredCheckpointConfig, name: str) -> Iterator[None]:
    """A block in which retention does not delete a checkpoint; where it can't be pinned, that is said.

    Raises:
        CheckpointNotFoundError: It is deleted already.
    """
    token = None
    try:
        made = ask(config, lambda store: pin(store, name, reason="tiered-ckpt watch", expires_s=EXPIRES_S))
        token = made.token
    except StoreError as error:
        say(printable(f"warning: {name} is not pinned, and may be deleted while the command runs: {error}"), err=True)
    try:
        yield
    finally:
        if token is not None:
            try:
                ask(config, lambda store: unpin(store, name, token))
            except StoreError as error:
                say(printable(f"warning: the pin of {name} stays, for a day at most: {error}"), err=True)
