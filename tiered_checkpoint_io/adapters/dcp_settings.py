"""The settings of a writer or reader of sharded checkpoints, in our words or in the SageMaker library's."""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from tiered_checkpoint_io.engine.save.coordinated import CoordinatedSaver
from tiered_checkpoint_io.engine.session import Session
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.logs import Logger, get_logger
from tiered_checkpoint_io.memory.tier import namespace_root
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import (
    Support,
    TieredCheckpointConfig,
    as_mapping,
    check_positive,
    refuse_keys_of_others,
)

_EXTRA = ("world_size", "save_to_s3", "s3_every_n_steps", "logger")
_BASE_PATHS = ("s3_tier_base_path", "s3_base_path")
#: The attributes of ``SageMakerCheckpointConfig``.
_SAGEMAKER = ("namespace", "world_size", "s3_tier_base_path", "save_to_s3", "logger")
_ALIASES = {"in_memory_namespace": "namespace"}
#: Single keys that it does not read; a whole block may hold them.
_NOT_OURS = {
    "memory_every_n_train_steps": "TieredModelCheckpoint takes it; here, save whenever you want a checkpoint",
    "enable_async_checkpointing": "call async_save instead of save",
    "save_on_train_end": "TieredModelCheckpoint takes it",
}
#: The keys that may be None.
_NULLABLE = {each.name for each in fields(TieredCheckpointConfig) if "None" in str(each.type)}
#: Defaults of values that are not given.
_EVERY = {each.name: each.default for each in fields(TieredCheckpointConfig)}["s3_every_n_train_steps"]


@dataclass(frozen=True, slots=True)
class Settings:
    """A validated configuration, and further settings of sharded checkpoints: see :class:`TieredStorageWriter`."""

    config: TieredCheckpointConfig
    #: True if a durable tier was named.
    has_durable: bool
    world_size: int | None
    save_to_s3: bool | None
    s3_every_n_steps: int | None
    logger: Logger | None
    #: True if a namespace was named.
    is_named: bool

    @property
    def durable_dirpath(self) -> str:
        """The durable tier that was named; empty if none was."""
        return self.config.dirpath if self.has_durable else ""

    def is_durable(self, step: int, save_to_s3: bool | None) -> bool:
        """Returns whether the save of this step goes to the durable tier."""
        durable = self.save_to_s3 if save_to_s3 is None else save_to_s3
        if durable is None:
            every = self.s3_every_n_steps
            durable = self.has_durable and (every is None or (step >= 0 and step % every == 0))
        if durable and not self.has_durable:
            raise ConfigError(
                "save_to_s3 is set, but no durable tier is named", hint="give s3_tier_base_path, or dirpath"
            )
        return durable

    def check_world_size(self, count: int, checkpoint_id: str | None) -> None:
        """Refuses a save of another number of ranks than ``world_size``."""
        if self.world_size not in (None, count):
            raise ConfigError(
                f"world_size is {self.world_size}, but {count} ranks save together",
                operation="save",
                key=checkpoint_id,
                hint="give the number of ranks of the group that saves (of a local checkpoint: of its shards), or leave"
                " world_size out",
            )

    def with_support(self, support: Support) -> Settings:
        """Returns the same with these settings for support cases: those of when a writer was made."""
        if support == self.config.support:
            return self
        return replace(self, config=replace(self.config, support=support))

    def at(self, dirpath: str) -> Settings:
        """Returns the same for another durable tier."""
        if dirpath == self.config.dirpath:
            return self
        # Without a durable tier, it was made from the working folder instead of a dirpath.
        namespace = self.config.namespace if self.has_durable or self.is_named else ids.AUTO_NAMESPACE
        config = replace(self.config, dirpath=dirpath, namespace=namespace)
        return replace(self, config=config, has_durable=True)


def settings_of(config: object, options: Mapping[str, Any]) -> Settings:
    """Validates a writer's ``config``, in any of its forms, and the single keys that replace keys of it.

    None counts as a value if it is one; of a key for which it is none, as if it were not given.
    """
    refuse_keys_of_others(options, "tiered_checkpoint_io.dcp", _NOT_OURS)
    given = {key: value for key, value in options.items() if value is not None or key in _NULLABLE}
    if isinstance(config, TieredCheckpointConfig) and not given:
        return _settings_of_validated(config)
    return _settings_of(config, given)


#: Returns the same at each save of a strategy's, for which training waits.
_settings_of_validated = functools.lru_cache(maxsize=8)(lambda config: _settings_of(config, {}))


def _settings_of(config: object, given: Mapping[str, Any]) -> Settings:
    if isinstance(config, str | os.PathLike):
        config = {"dirpath": os.fspath(config)}
    elif not isinstance(config, TieredCheckpointConfig | Mapping) and hasattr(config, "namespace"):
        config = {key: getattr(config, key) for key in _SAGEMAKER if getattr(config, key, None) is not None}
        config.setdefault("namespace", None)
    named = as_mapping(config, "the configuration")
    if isinstance(config, TieredCheckpointConfig) and config.s3_every_n_train_steps == _EVERY:
        # A configuration does not show whether a key was given or has its default.
        del named["s3_every_n_train_steps"]
    raw = {**named, **given}
    raw = {_ALIASES.get(key, key): value for key, value in raw.items()}
    extra = {key: raw.pop(key) for key in _EXTRA if key in raw}
    if raw.get("namespace", "default") in (None, ""):
        raise ConfigError("Namespace cannot be empty", hint="name the job: letters, digits, '_' and '-'")
    is_named = raw.get("namespace", ids.AUTO_NAMESPACE) != ids.AUTO_NAMESPACE
    for key in _BASE_PATHS:
        base = raw.pop(key, None)
        if base is not None:
            if not ids.is_s3_url(base):
                raise ConfigError(
                    f"{key} is {base!r}", hint="it must start with s3://, such as s3://bucket/checkpoints"
                )
            # Jobs share a base path, and are kept apart by their namespaces: that library's layout.
            try:
                # The SageMaker library's word for a job without a name.
                folder = raw["namespace"] if is_named else "default"
                raw["dirpath"] = ids.join_url(ids.normalize_dirpath(base), folder)
            except ConfigError as error:
                raise ConfigError(f"{key} is {base!r}: {error.message}", hint=error.hint) from error
    has_durable = raw.get("dirpath") is not None
    if not has_durable:
        # Jobs without a durable tier differ by their working directory.
        raw["dirpath"] = _here()
    validated = TieredCheckpointConfig.from_any(raw)
    if not has_durable:
        # Memory-only checkpoints need a dirpath as well; this one stays empty.
        nowhere = namespace_root(validated.memory_dir, validated.namespace) / "no-durable-tier"
        validated = replace(validated, dirpath=str(nowhere))
    # The caller decides which steps are saved; without a word on the durable tier, each save goes there. A block that
    # names null wants none of them there.
    every, save_to_s3 = extra.get("s3_every_n_steps"), extra.get("save_to_s3")
    if every is None:
        every = raw.get("s3_every_n_train_steps")
        if every is None and "s3_every_n_train_steps" in raw and save_to_s3 is None:
            save_to_s3 = False
    check_positive("world_size", extra.get("world_size"))
    check_positive("s3_every_n_steps", every)
    if save_to_s3 is not None and not isinstance(save_to_s3, bool):
        raise ConfigError(f"save_to_s3 is {save_to_s3!r}", hint="allowed: true, false or null")
    settings = Settings(
        validated, has_durable, extra.get("world_size"), save_to_s3, every, extra.get("logger"), is_named
    )
    if isinstance(config, TieredCheckpointConfig):
        settings = settings.with_support(config.support)
    if save_to_s3:
        settings.is_durable(0, save_to_s3)
    return settings


def _here() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


# ----------------------------------------------------------------------------------------- sessions
class OverTiers:
    """Base of writers and readers, which share the saver and session of their configuration in this process."""

    settings: Settings
    #: The saver, if it is not that of the configuration.
    _own_saver: CoordinatedSaver | None = None
    #: The newest save that another process had seen, if that one has made this object.
    _newest_seen: str | None = None

    @property
    def saver(self) -> CoordinatedSaver:
        """The saver of this process' parts of checkpoints."""
        saver = self._own_saver or shared_of(self.settings)
        saver.session.save_ids.follow(self._newest_seen)
        return saver

    @property
    def session(self) -> Session:
        """Both tiers, as this process uses them: ``progress``, ``wait``, ``poll``, counters."""
        return self.saver.session

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns whether this may be a checkpoint_id."""
        return isinstance(checkpoint_id, str | os.PathLike) and bool(os.fspath(checkpoint_id))


_shared: dict[tuple[int, TieredCheckpointConfig], CoordinatedSaver] = {}


def shared_of(settings: Settings) -> CoordinatedSaver:
    """Returns the saver of a configuration in this process: its slots and connections outlive a single writer."""
    # A forked child has its parent's dictionary, but must not touch its slots.
    key = (os.getpid(), settings.config)
    saver = _shared.get(key)
    if saver is None:
        saver = _shared[key] = CoordinatedSaver(Session(settings.config, logger=settings.logger))
        if len(_shared) == 1:
            atexit.register(_release)
    elif settings.logger is not None:
        config, session = settings.config, saver.session
        rank = (session.log.extra or {}).get("rank", 0)
        session.log = get_logger(config.namespace, rank=int(str(rank)), log_dir=config.log_dir, logger=settings.logger)
    return saver


def close_shared(settings: Settings) -> None:
    """Waits for queued work of a configuration, shows background errors once, and frees everything."""
    saver = _shared.pop((os.getpid(), settings.config), None)
    if saver is not None:
        try:
            saver.close()
        finally:
            saver.session.close()


def _release() -> None:
    for (pid, _), saver in list(_shared.items()):
        if pid == os.getpid():
            saver.session.release()
