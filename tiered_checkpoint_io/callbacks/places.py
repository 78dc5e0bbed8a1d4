"""The places of a trainer's callbacks: below the IO's dirpath, no two with the same names; and Lightning's "last"."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from itertools import combinations
from typing import Any

import fsspec
from fsspec import AbstractFileSystem
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from tiered_checkpoint_io.callbacks.trainer import is_below
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.retention import Best, Policies, policies_from

_HINT = "give one of them a filename of its own, such as 'best-{epoch}-{step}', or a dirpath below the IO's"
_LAST_HINT = "set save_last for one of them alone, or give one a dirpath below the IO's"


def folder_of(dirpath: Any, root: str) -> str | None:
    """Returns the folder that a callback's dirpath means: the IO's if it has none, None if it is not below that."""
    if not dirpath:
        return root
    text = str(dirpath)
    return ids.normalize_dirpath(text) if is_below(f"{text.rstrip('/')}/x", root) else None


def check_dirpath(trainer: Trainer, dirpath: str, root: str) -> None:
    """Raises ConfigError for a dirpath that is not below the IO's, or differs between ranks; all ranks call this."""
    if not trainer.strategy.reduce_boolean_decision(dirpath == trainer.strategy.broadcast(dirpath)):
        raise ConfigError(
            f"dirpath differs between ranks; here it is {dirpath!r}",
            hint="it must not depend on the rank or the time of day",
        )
    if not is_below(f"{dirpath}/x", root):
        raise ConfigError(
            f"the callback's dirpath {dirpath!r} is not below the IO's {root!r}",
            hint="leave the callback's dirpath out",
        )


def check_places(callbacks: Iterable[ModelCheckpoint], root: str) -> None:
    """Raises ConfigError for two callbacks that would save to the same names.

    Two with different monitors may have one pattern, if names that are taken get a version.
    """
    for one, other in combinations(callbacks, 2):
        folder = folder_of(one.dirpath, root)
        if folder is None or folder != folder_of(other.dirpath, root):
            continue
        versions = one._enable_version_counter and other._enable_version_counter and one.monitor != other.monitor
        if one.save_top_k and other.save_top_k and _pattern(one) == _pattern(other) and not versions:
            _refuse(one, other, folder, _pattern(one), _HINT)
        if one.save_last and other.save_last and one.CHECKPOINT_NAME_LAST == other.CHECKPOINT_NAME_LAST:
            _refuse(one, other, folder, one.CHECKPOINT_NAME_LAST, _LAST_HINT)


def check_retention(callbacks: Iterable[ModelCheckpoint], policies: Policies | None) -> None:
    """Raises ConfigError for a callback that keeps its best, which the policies would remove."""
    known = [each for each in policies_from(policies) if isinstance(each, Best)]
    for callback in callbacks:
        if not policies or callback.monitor is None or callback.save_top_k == 0:
            continue
        count = max(1, callback.save_top_k)
        same = [each for each in known if (each.metric, each.mode) == (callback.monitor, callback.mode)]
        if not any(each.best >= count for each in same):
            policy = f"{{best: {count}, metric: {callback.monitor}, mode: {callback.mode}}}"
            raise ConfigError(
                f"{_described(callback)} keeps its best {count}, which no policy of retention keeps",
                operation="setup",
                hint=f"add {policy} to retention, or leave monitor out",
            )


def _pattern(callback: ModelCheckpoint) -> str:
    return callback.filename or f"{{epoch}}{callback.CHECKPOINT_JOIN_CHAR}{{step}}"


def _refuse(one: ModelCheckpoint, other: ModelCheckpoint, folder: str, name: str, hint: str) -> None:
    path = ids.join_url(folder, name) + one.FILE_EXTENSION
    raise ConfigError(f"{_described(one)} and {_described(other)} both save to {path}", operation="setup", hint=hint)


def _described(callback: ModelCheckpoint) -> str:
    triggers = {
        "every_n_train_steps": callback._every_n_train_steps or None,
        "every_n_epochs": callback._every_n_epochs or None,
        "train_time_interval": callback._train_time_interval,
    }
    said = {"monitor": callback.monitor, "filename": callback.filename, **triggers}
    text = ", ".join(f"{key}={value!r}" for key, value in said.items() if value is not None)
    return f"{type(callback).__name__}({text})"


class SentinelFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Holds one file, with a present time: the sentinel for the newest "last" checkpoint.

    Lightning resolves ``ckpt_path="last"`` on every rank, by asking the file system of each candidate whether it exists
    and when it was written. This file system answers without a request; at the load, rank 0 finds the checkpoint.
    """

    LAST = ids.LAST_URL
    protocol = "tiered"

    def exists(self, path: str, **_: Any) -> bool:
        return bool(self._strip_protocol(path) == self._strip_protocol(self.LAST))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if not self.exists(path):
            raise FileNotFoundError(path)
        return {"name": self._strip_protocol(path), "size": 0, "type": "file"}

    def modified(self, path: str) -> datetime:  # noqa: ARG002
        return datetime.now(timezone.utc)


fsspec.register_implementation("tiered", SentinelFileSystem, clobber=True)
