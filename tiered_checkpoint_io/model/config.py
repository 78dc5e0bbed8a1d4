"""The only module that validates raw configuration, and the settings for support cases and tests."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NoReturn, TypedDict
from urllib.parse import urlsplit

from tiered_checkpoint_io.clock import DURABLE_TIMEOUT_S, PENDING_TIMEOUT_S, SWEEP_AGE_S, WAIT_TIMEOUT_S
from tiered_checkpoint_io.errors import ConfigError, did_you_mean, shown, without_secrets
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.retention import Policies, policies_from

#: Holds settings such as ``wait_timeout_s=60,drain=thread``.
VARIABLE = "TIERED_CHECKPOINT_SUPPORT"
_DAY_S = 24 * 3600
_SUPPORT_RANGES = {
    "max_pending": (1, 1_000),
    "durable_timeout_s": (1, _DAY_S),
    "pending_timeout_s": (1, _DAY_S),
    "wait_timeout_s": (1, 7 * _DAY_S),
    "sweep_age_s": (1, 7 * _DAY_S),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Settings that a job needs only if a maintainer asks for them.

    Attributes:
        drain: Upload from a ``process`` of its own, or from a ``thread`` of the trainer, as always for ``memory://``.
        max_pending: Checkpoints that may wait for the durable tier at once; a further one stays in memory.
        durable_timeout_s: Bound of a restart's wait for a durable tier that does not answer, seconds.
        pending_timeout_s: Bound of a save's wait for a durable tier that does not answer, seconds. Then the checkpoint
            stays in memory, and training continues.
        wait_timeout_s: Bound of every wait for the durable tier, seconds.
        sweep_age_s: Age at which objects that no manifest names are removed, seconds.

    Raises:
        ConfigError: A value is not allowed.
    """

    drain: Literal["process", "thread"] = "process"
    max_pending: int = 2
    durable_timeout_s: int = DURABLE_TIMEOUT_S
    pending_timeout_s: int = PENDING_TIMEOUT_S
    wait_timeout_s: int = WAIT_TIMEOUT_S
    sweep_age_s: int = SWEEP_AGE_S

    def __post_init__(self) -> None:
        if self.drain not in ("process", "thread"):
            _refuse(f"{VARIABLE}: drain", self.drain, "process, thread")
        for name, (low, high) in _SUPPORT_RANGES.items():
            _check_int(f"{VARIABLE}: {name}", getattr(self, name), low, high)

    @classmethod
    def from_environment(cls) -> Support:
        """Returns the settings that the environment variable has, or the defaults; raises ConfigError for others."""
        known = [each.name for each in fields(cls)]
        given: dict[str, int | str] = {}
        for entry in filter(None, os.environ.get(VARIABLE, "").split(",")):
            name, _, value = (part.strip() for part in entry.partition("="))
            if name not in known:
                raise ConfigError(f"{VARIABLE}: unknown name {name!r}", hint=did_you_mean(name, known))
            given[name] = int(value) if value.isdecimal() else value
        return cls(**given)  # type: ignore[arg-type] # checked there


#: Options that S3 gets with requests, as boto3 takes them, and the values of each; none for any text.
_S3_OPTIONS: dict[str, tuple[str, ...]] = {
    "ServerSideEncryption": ("AES256", "aws:kms", "aws:kms:dsse"),
    "SSEKMSKeyId": (),
    "ExpectedBucketOwner": (),
    "RequestPayer": ("requester",),
    "ACL": (
        "private",
        "public-read",
        "public-read-write",
        "authenticated-read",
        "aws-exec-read",
        "bucket-owner-read",
        "bucket-owner-full-control",
    ),
    "StorageClass": (),
    "ChecksumAlgorithm": ("CRC32", "CRC32C", "SHA1", "SHA256", "CRC64NVME"),
}
#: Every request takes these; the others go out with each request that makes an object.
OF_ALL_REQUESTS = ("ExpectedBucketOwner", "RequestPayer")
#: Objects of these classes have to be restored before they can be read, which takes hours.
_ARCHIVES = ("GLACIER", "DEEP_ARCHIVE")


def _s3_options(given: object) -> dict[str, str]:
    """Returns the options that are not None; raises ConfigError for a name or value that is not allowed."""
    if not isinstance(given, Mapping):
        _refuse("s3_options", given, "a mapping of boto3's names, such as {ServerSideEncryption: AES256}")
    options = {str(name): value for name, value in given.items() if value is not None}
    for name, value in options.items():
        allowed = _S3_OPTIONS.get(name)
        if allowed is None:
            raise ConfigError(f"unknown name {name!r} in s3_options", hint=did_you_mean(name, _S3_OPTIONS))
        if allowed and value not in allowed:
            _refuse(f"s3_options.{name}", value, "one of " + ", ".join(allowed))
        if not isinstance(value, str) or not value:
            _refuse(f"s3_options.{name}", value, "text, in quotes if it is a number")
    if options.get("StorageClass") in _ARCHIVES:
        _refuse("s3_options.StorageClass", options["StorageClass"], "a class whose objects can be read at once")
    if "SSEKMSKeyId" in options and not options.get("ServerSideEncryption", "").startswith("aws:kms"):
        allowed_with = "only with ServerSideEncryption aws:kms or aws:kms:dsse"
        _refuse("s3_options.SSEKMSKeyId", options["SSEKMSKeyId"], allowed_with)
    return options


#: Requests in flight with ``auto``: more connections only cost memory on the node.
_AUTO = 16
#: The name of the block in a configuration.
BLOCK = "s3_checkpointing"
_GLOBAL = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")

Concurrency = int | Literal["auto"]
_PATHS = ("dirpath", "memory_dir", "spill_dir", "log_dir")
_RANGES: dict[str, tuple[int, int]] = {
    "memory_every_n_train_steps": (1, 1 << 40),
    "s3_every_n_train_steps": (1, 1 << 40),
    "memory_keep_last": (1, 1_000),
    "memory_allocation_percentage": (20, 100),
    "chunk_size_MB": (8, 5_120),
    "replication_factor": (1, 64),
}
_CHOICES = {
    "staging": ("eager", "overlapped"),
    "on_save_error": ("warn", "raise"),
    "preflight": ("error", "warn", "off"),
}
#: Keys that a checkpoint IO does not read, and what to do with each.
NOT_OF_IO = {
    "memory_every_n_train_steps": "TieredModelCheckpoint takes it",
    "s3_every_n_train_steps": "TieredModelCheckpoint takes it",
    "enable_async_checkpointing": "wrap the IO in an AsyncCheckpointIO",
}
_OPTIONAL = {"memory_every_n_train_steps", "s3_every_n_train_steps"}
_S3_ONLY = ("endpoint_url", "region", "profile", "s3_options")


@dataclass(frozen=True, kw_only=True, slots=True)
class TieredCheckpointConfig:
    """Everything that can be configured; the keys of the YAML block ``s3_checkpointing``.

    The defaults are those of ``configs/s3_checkpointing/default.yaml``.

    Attributes:
        dirpath: Durable tier: an S3 URL, another fsspec URL, or a directory.
        namespace: Keeps jobs on one node apart: letters, digits, ``_`` and ``-``; ``auto``: made from dirpath.
        memory_every_n_train_steps: Steps between checkpoints to memory; null for none. Read by
            ``TieredModelCheckpoint``.
        s3_every_n_train_steps: Steps between checkpoints to S3; null leaves it to ModelCheckpoint's triggers. Read by
            ``TieredModelCheckpoint``.
        memory_keep_last: Checkpoints that memory keeps; of DCP and local ones, of each series of names.
        retention: Checkpoints that S3 keeps: ``{latest: 3, every_steps: 1000}``; null deletes none. See
            docs/operations.md.
        enable_async_checkpointing: Saves return once the checkpoint is in node memory. Read by ``from_config``, which
            then gives an ``AsyncCheckpointIO``.
        staging: When a save copies the state: ``eager`` or ``overlapped``. ``eager`` copies it before the save
            returns; ``overlapped`` copies tensors that only the optimizers change while the next forward and backward
            run. See docs/lightning.md.
        on_save_error: After a failed save, ``warn`` and train on, or ``raise``.
        replication_factor: Nodes that keep each part in memory, its own included; 1 for no copies.
        safe_globals: Classes and functions that checkpoints may hold, as ``module.name``. The first save names those
            that are missing.
        memory_dir: Folder of the memory tier, on tmpfs or on node-local disk.
        spill_dir: Folder on node-local disk for parts that memory can't hold; ``auto``; null for none. ``auto``
            takes the system's temporary directory, else ``/var/tmp``, if that is on local disk.
        memory_allocation_percentage: Per cent of the node's memory that checkpoints take; 20 to 100. If the node's
            cgroup has a limit (``memory.max`` or ``memory.high``), per cent of that.
        endpoint_url: URL of an S3 server other than AWS.
        region: AWS region.
        profile: Profile in the AWS configuration files.
        s3_options: Options of S3 by boto3's names, such as ``{ServerSideEncryption: aws:kms}``. Allowed:
            ``ServerSideEncryption``, ``SSEKMSKeyId``, ``ExpectedBucketOwner``, ``RequestPayer``, ``ACL``,
            ``StorageClass``, ``ChecksumAlgorithm``. They are passed on as they are.
        chunk_size_MB: Size of one part of an upload, MiB; 8 to 5,120.
        max_write_concurrency: Parts in flight at once per node, or ``auto``.
        max_read_concurrency: Ranges in flight at once per node, or ``auto``.
        preflight: Check S3 before the first batch: ``error``, ``warn`` or ``off``. ``error`` stops a run for which S3
            can't be used and no retry helps, ``warn`` logs it. Missing credentials, or rights to write, are only
            logged if node memory holds a checkpoint to resume from.
        save_on_train_end: Save the last state to S3 when ``fit`` ends, if it is only in memory. Its name is
            ``end_of_training.ckpt``.
        log_dir: Folder of ``{namespace}_checkpointing.log``; null for no file.

    Raises:
        ConfigError: A value is not allowed; says the key, the value and what is allowed.
    """

    dirpath: str
    namespace: str = "auto"
    memory_every_n_train_steps: int | None = 10
    s3_every_n_train_steps: int | None = 50
    memory_keep_last: int = 2
    retention: Policies | None = None
    enable_async_checkpointing: bool = True
    staging: Literal["eager", "overlapped"] = "eager"
    on_save_error: Literal["warn", "raise"] = "warn"
    replication_factor: int = 1
    safe_globals: tuple[str, ...] = ()
    memory_dir: str = "/dev/shm"  # noqa: S108 - tmpfs by design; its folder is checked before use
    spill_dir: str | None = "auto"
    memory_allocation_percentage: int = 50
    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    s3_options: Mapping[str, str] | None = field(default=None, hash=False)
    chunk_size_MB: int = 64  # noqa: N815 - the name that NeMo's users know
    max_write_concurrency: Concurrency = "auto"
    max_read_concurrency: Concurrency = "auto"
    # YAML reads off as False.
    preflight: Literal["error", "warn", "off", False] = "error"
    save_on_train_end: bool = True
    log_dir: str | None = None
    #: No key: see :class:`Support`.
    support: Support = field(default_factory=Support.from_environment, metadata={"is_key": False})

    def __post_init__(self) -> None:
        try:
            normal = ids.normalize_dirpath(self.dirpath)
            ids.refuse_misspelt(self.dirpath)
            object.__setattr__(self, "dirpath", normal)
        except ConfigError as error:
            raise ConfigError(f"dirpath is {self.dirpath!r}: {error.message}", hint=error.hint) from error
        try:
            ids.validate_namespace(self.namespace)
            if self.namespace == ids.AUTO_NAMESPACE:
                object.__setattr__(self, "namespace", ids.namespace_of(self.dirpath))
        except ConfigError as error:
            raise ConfigError(f"namespace is {self.namespace!r}", hint=error.hint) from error
        if not isinstance(self.memory_dir, str) or not self.memory_dir.startswith("/"):
            _refuse("memory_dir", self.memory_dir, "an absolute path, such as /dev/shm")
        if self.spill_dir not in ("auto", None) and (
            not isinstance(self.spill_dir, str) or not self.spill_dir.startswith("/")
        ):
            _refuse("spill_dir", self.spill_dir, "auto, an absolute path on node-local disk, or null")
        for key, (low, high) in _RANGES.items():
            value = getattr(self, key)
            if not (value is None and key in _OPTIONAL):
                _check_int(key, value, low, high, optional=key in _OPTIONAL)
        for key in ("max_write_concurrency", "max_read_concurrency"):
            if getattr(self, key) != "auto":
                _check_int(key, getattr(self, key), 1, 256, extra="'auto' or ")
        if self.preflight is False:
            object.__setattr__(self, "preflight", "off")
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            if value not in allowed:
                _refuse(key, value, "one of " + ", ".join(allowed))
        if ids.url_scheme(self.dirpath) == "memory":
            # No other process sees its content.
            object.__setattr__(self, "support", replace(self.support, drain="thread"))
        for key in ("enable_async_checkpointing", "save_on_train_end"):
            if not isinstance(getattr(self, key), bool):
                _refuse(key, getattr(self, key), "true or false")
        names = self.safe_globals
        # OmegaConf's lists are sequences, too.
        listed = isinstance(names, Sequence) and not isinstance(names, str)
        if not listed or not all(isinstance(n, str) and _GLOBAL.fullmatch(n) for n in names):
            _refuse("safe_globals", names, "a list of names such as 'package.module.Class'")
        object.__setattr__(self, "safe_globals", tuple(names))
        object.__setattr__(self, "retention", policies_from(self.retention))
        self._check_s3()

    def _check_s3(self) -> None:
        if self.s3_options is not None:
            object.__setattr__(self, "s3_options", _s3_options(self.s3_options))
        for key in ("endpoint_url", "region", "profile", "log_dir"):
            value = getattr(self, key)
            if value is not None and (not isinstance(value, str) or not value):
                _refuse(key, value, "text, or null")
        for key in _S3_ONLY:
            if getattr(self, key) is not None and ids.url_scheme(self.dirpath) != "s3":
                _refuse(key, getattr(self, key), f"null: dirpath is {self.dirpath}; a bucket is s3://bucket/run")
        if self.endpoint_url is not None:
            parts = urlsplit(self.endpoint_url)
            if "@" in self.endpoint_url or "?" in self.endpoint_url:
                # The value itself is a secret here, so the message leaves it out.
                raise ConfigError(
                    "endpoint_url holds a user name, a password or a query",
                    hint="give credentials by boto3's ordinary chain (environment, profile, role)",
                )
            if parts.scheme not in ("http", "https") or not parts.netloc:
                _refuse("endpoint_url", self.endpoint_url, "a URL that begins with https:// or http://")

    @property
    def is_named(self) -> bool:
        """True if the namespace is not the one made from dirpath."""
        return self.namespace != ids.namespace_of(self.dirpath)

    @classmethod
    def from_any(cls, block: object = None, **overrides: Any) -> TieredCheckpointConfig:
        """Returns a configuration from a mapping, an OmegaConf block, or another configuration.

        Args:
            block: The block ``s3_checkpointing``.
            overrides: Single keys that replace the block's.

        Raises:
            ConfigError: An unknown key (with the nearest known one) or a value not allowed; or ``block`` is the whole
                configuration that has the block.
        """
        known = keys()
        # Before its interpolations are resolved: other variables do not matter here.
        if isinstance(block, Mapping) and BLOCK in block:
            raise ConfigError(f"this is the whole configuration; {BLOCK} is one block of it", hint=f"pass cfg.{BLOCK}")
        raw = {**as_mapping(block), **overrides}
        for key, value in raw.items():
            if key not in known:
                text = f"unknown key {key!r} (value {shown(value, name=str(key))}) in s3_checkpointing"
                raise ConfigError(text, hint=did_you_mean(key, known))
        # OmegaConf's mark of a value that has to be given, as dirpath in our own YAML.
        absent = [key for key, value in raw.items() if value == "???"]
        if absent or raw.get("dirpath") in (None, ""):
            key = absent[0] if absent else "dirpath"
            example = ": an S3 URL, another fsspec URL, or a directory" if key == "dirpath" else ""
            raise ConfigError(f"s3_checkpointing.{key} is missing", hint=f"give it a value{example}")
        for key in _PATHS:
            if hasattr(raw.get(key), "__fspath__"):
                raw[key] = str(raw[key])
        made = cls(**raw)
        return replace(made, support=block.support) if isinstance(block, TieredCheckpointConfig) else made

    def with_support(self, **settings: Any) -> TieredCheckpointConfig:
        """Returns the same configuration with other settings for support cases."""
        return replace(self, support=replace(self.support, **settings))

    def to_json(self) -> str:
        """Returns the configuration as JSON; it holds no secret."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> TieredCheckpointConfig:
        """Reverses :meth:`to_json`; raises ConfigError if the text is not valid."""
        try:
            block = dict(json.loads(text))
            support = Support(**block.pop("support", {}))
        except (ValueError, TypeError) as error:
            hint = "start a trainer, which writes it again"
            raise ConfigError(f"the stored configuration is damaged: {error}", hint=hint) from error
        return replace(cls.from_any(block), support=support)

    def write_concurrency(self) -> int:
        """Returns the number of parts in flight at once."""
        return _AUTO if self.max_write_concurrency == "auto" else self.max_write_concurrency

    def read_concurrency(self) -> int:
        """Returns the number of ranges in flight at once."""
        return _AUTO if self.max_read_concurrency == "auto" else self.max_read_concurrency


class IOKeys(TypedDict, total=False):
    """The keys that a checkpoint IO takes besides dirpath, for type checkers: see TieredCheckpointConfig."""

    namespace: str
    memory_keep_last: int
    retention: Policies | None
    staging: Literal["eager", "overlapped"]
    on_save_error: Literal["warn", "raise"]
    replication_factor: int
    safe_globals: Sequence[str]
    memory_dir: str | os.PathLike[str]
    spill_dir: str | os.PathLike[str] | None
    memory_allocation_percentage: int
    endpoint_url: str | None
    region: str | None
    profile: str | None
    s3_options: Mapping[str, str] | None
    chunk_size_MB: int
    max_write_concurrency: Concurrency
    max_read_concurrency: Concurrency
    preflight: Literal["error", "warn", "off", False]
    save_on_train_end: bool
    log_dir: str | os.PathLike[str] | None


@functools.cache
def keys() -> tuple[str, ...]:
    """Returns all keys, in their order."""
    return tuple(each.name for each in fields(TieredCheckpointConfig) if each.metadata.get("is_key", True))


def refuse_keys_of_others(
    given: Iterable[str], who: str, others: Mapping[str, str], known: Collection[str] = ()
) -> None:
    """Raises ConfigError for keys that a class does not read; ``others`` says what to do with each.

    If ``known`` keys are given, any other one is refused, too.
    """
    for key in given:
        if key in others:
            raise ConfigError(f"{who} does not take {key}", hint=f"{others[key]}; from_config takes a whole block")
        if known and key not in known:
            raise ConfigError(f"{who} has no argument {key!r}", hint=did_you_mean(key, known))


def as_mapping(block: object, what: str = "s3_checkpointing") -> dict[str, Any]:
    """Returns the keys and values of a block: a mapping, OmegaConf's, a configuration, None; or raises ConfigError."""
    if block is None:
        return {}
    if isinstance(block, TieredCheckpointConfig):
        # One that was made from dirpath follows if that is replaced.
        values = {key: value for key, value in asdict(block).items() if key in keys()}
        return {**values, **({} if block.is_named else {"namespace": ids.AUTO_NAMESPACE})}
    if type(block).__module__.partition(".")[0] == "omegaconf":
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        try:
            block = OmegaConf.to_container(block, resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{what} can't be resolved: {str(error).partition(chr(10))[0]}",
                hint="set what its interpolations refer to",
            ) from error
    if not isinstance(block, Mapping):
        raise ConfigError(
            f"{what} is a {type(block).__name__}",
            hint="allowed: a mapping, an OmegaConf block, or a TieredCheckpointConfig",
        )
    return {str(key): value for key, value in block.items()}


def check_positive(key: str, value: object) -> None:
    """Refuses a value that is neither a whole number from 1 nor None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{key} is {value!r}", hint="allowed: a whole number from 1, or None")


def _check_int(key: str, value: object, low: int, high: int, *, optional: bool = False, extra: str = "") -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        _refuse(key, value, f"{extra}a whole number from {low} to {high}" + (", or null" if optional else ""))


def _refuse(key: str, value: object, allowed: str) -> NoReturn:
    raise ConfigError(f"{key} is {without_secrets(repr(value))}", hint=f"allowed: {allowed}")
