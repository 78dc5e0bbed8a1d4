"""What a checkpoint that is loaded may hold beside tensors and plain data: whose code may run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tiered_checkpoint_io.errors import ConfigError, RestoreError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.formats.unpickling import Allowed, is_blocked, names_in, pickle_module
from tiered_checkpoint_io.logs import Logger
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

_TRUST_ALL = (
    "if you trust all who can write there, load with weights_only=False, or set TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1"
)
_YES = ("1", "y", "yes", "true")
#: What torch.load maps, it hands on to a function of its own by this argument; without it, torch maps the file itself.
_load: Any = torch.serialization._load
_TAKES_MAPPED = "overall_storage" in inspect.signature(_load).parameters
_ZIP = b"PK\x03\x04"
#: Within a record's header in a zip file: where the lengths of its name and of the next field stand.
_LENGTHS_AT, _HEADER_LENGTH = 26, 30


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
        """Returns the trust of a load: ``weights_only`` of its caller, and the names that a configuration allows."""
        return cls(weights_only, config.safe_globals)

    @property
    def is_full(self) -> bool:
        """Whether everything is allowed, by the caller or torch's own variable in the environment."""
        forced = self.weights_only is None and _is_set("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
        return (self.weights_only is False or forced) and not _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD")

    def load(self, file: Any, *, mapped: torch.UntypedStorage | None = None, **options: Any) -> Any:
        """As ``torch.load``.

        Args:
            file: A path, or an open file.
            mapped: The bytes of a path's file, where they are mapped already: ``torch.load`` would map them once more.
            options: As ``torch.load`` takes them.

        Raises:
            ConfigError: A name is of nothing that can be imported.
            Exception: Whatever ``torch.load`` raises.
        """
        if self.is_full:
            return torch.load(file, weights_only=self.weights_only, **options)
        if _is_set("TORCH_FORCE_WEIGHTS_ONLY_LOAD") or not _is_plain(file):
            # An unpickler of ours can't be had, or torch would do more with the file than unpickle it.
            with self.allowing():
                return torch.load(file, weights_only=True, **options)
        module = pickle_module(self.allowed())
        if mapped is not None and _TAKES_MAPPED:
            reader, place = torch._C.PyTorchFileReader(os.fspath(file)), options.get("map_location")
            return _load(reader, place, module, overall_storage=mapped, encoding="utf-8")
        return torch.load(file, weights_only=False, pickle_module=module, **options)

    def read(self, file: Any, what: str, where: Mapping[str, Any], *, verified: bool = True, **options: Any) -> Any:
        """As :meth:`load`, with an error that says what to do.

        Args:
            file: A path, or an open file.
            what: What it is, for the error.
            where: Further fields of the error.
            verified: Whether its bytes are known to be those that were saved.
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
            reason = self.reason(error) or type(error).__name__
            raise RestoreError(
                f"torch.load refused {what}, whose bytes are intact: {reason}"
                if verified
                else f"torch.load refused {what}, which has no manifest to verify it by: {reason}",
                operation="load",
                hint=self.hint(file, verified=verified),
                **where,
            ) from error

    def allowed(self) -> Allowed:
        """What :attr:`names` allow, beside what is always allowed.

        Raises:
            ConfigError: A name is of nothing that can be imported.
        """
        named: dict[str, Any] = {}
        owners: dict[str, Any] = {}
        for name in self.names:
            *around, (_, named[name]) = _imported(name)
            owners.update(around)
        return Allowed(named, owners)

    @contextlib.contextmanager
    def allowing(self) -> Iterator[None]:
        """While the block runs, torch's own unpickler allows what :attr:`names` say."""
        with torch.serialization.safe_globals([_imported(name)[-1][1] for name in self.names]):
            yield

    @staticmethod
    def reason(error: Exception) -> str:
        """What torch says of why it refused a file, on one line, without advice of its own."""
        _, found, said = str(error).partition("WeightsUnpickler error: ")
        return " ".join((said.partition(" Please use ")[0] if found else str(error)).split())

    def hint(self, file: Any, *, verified: bool = True) -> str:
        """What to do about a file that could not be loaded."""
        lacking: list[str] = []
        try:
            lacking = self.allowed().lacks(names_in(io.BytesIO(_pickled(file))))
        except Exception:
            # In torch's old format there is no such record, either.
            if not verified:
                return f"it may be cut off, or no file of torch.save; {self.advice(lacking)}"
        return self.advice(lacking)

    def lacking_in(self, content: Any) -> list[str]:
        """The names, sorted, that are not allowed: of an :class:`Image`, or of bytes that ``torch.save`` wrote.

        Raises:
            ConfigError: A name of :attr:`names` is of nothing that can be imported.
            Exception: The bytes are no such file.
        """
        allowed = self.allowed()
        heads = [_head(content)] if isinstance(content, Image) else [memoryview(each) for each in content]
        return sorted({name for head in heads for name in _names_in_file(head, allowed)})

    def advice(self, lacking: Iterable[str]) -> str:
        """What to do where names are not allowed that a checkpoint holds."""
        names = list(lacking)
        if not names:
            return f"if it holds objects of yours: {_TRUST_ALL}"
        blocked = [name for name in names if is_blocked(name)]
        if blocked:
            return f"it holds {', '.join(blocked)}, which no list can allow: {_TRUST_ALL}"
        line = ", ".join(dict.fromkeys((*self.names, *names)))
        return f"it holds {', '.join(names)}; to allow that, set safe_globals: [{line}]; or, {_TRUST_ALL}"


# ---------------------------------------------------------------------------------------- at the save
#: Whose first save was looked at.
_looked_at: weakref.WeakSet[Any] = weakref.WeakSet()


def warn_at_first_save(owner: Any, config: TieredCheckpointConfig, log: Logger, what: str, content: Any) -> None:
    """Warns, once for each ``owner``, where the configuration does not allow what is saved.

    Args:
        owner: What saves; its first save is looked at.
        config: How it would be loaded.
        log: Where to warn.
        what: What is saved, for the warning.
        content: An :class:`Image`, or the bytes of files that ``torch.save`` wrote.
    """
    trust = Trust.of(config)
    if trust.is_full or owner in _looked_at:
        return
    _looked_at.add(owner)
    try:
        lacking = trust.lacking_in(content)
    except ConfigError as error:
        log.warning("%s: the configuration would refuse to load it: %s", what, error)
    except Exception as error:
        # What torch.save writes can be read; what others wrote in its place says nothing of the checkpoint's fate.
        log.debug("%s: could not look at what it holds: %s", what, error)
    else:
        if lacking:
            log.warning("%s: the configuration would refuse to load it: %s", what, trust.advice(lacking))


def _head(image: Image) -> memoryview:
    # The pickle comes first in the file, and all of it lies before the first tensor.
    return min(image.segments, key=lambda segment: segment.offset).data


def _names_in_file(head: memoryview, allowed: Allowed) -> list[str]:
    """What a file that begins so holds and is not allowed."""
    if bytes(head[: len(_ZIP)]) != _ZIP:
        return []
    lengths = (head[at : at + 2] for at in (_LENGTHS_AT, _LENGTHS_AT + 2))
    begin = _HEADER_LENGTH + sum(int.from_bytes(length, "little") for length in lengths)
    return allowed.lacks(names_in(io.BytesIO(head[begin:])))


# ------------------------------------------------------------------------------------------- inside
def _is_set(variable: str) -> bool:
    return os.getenv(variable, "0").lower() in _YES


def _is_plain(file: Any) -> bool:
    """Whether a file is one that torch does nothing with but to unpickle its ``data.pkl``."""
    with _opened(file) as opened:
        begin = opened.tell()
        if opened.read(len(_ZIP)) != _ZIP:
            return False
        opened.seek(begin)
        try:
            return "constants.pkl" not in torch._C.PyTorchFileReader(opened).get_all_records()
        finally:
            opened.seek(begin)


def _pickled(file: Any) -> bytes:
    with _opened(file) as opened:
        opened.seek(0)
        data: bytes = torch._C.PyTorchFileReader(opened).get_record("data.pkl")
        return data


def _opened(file: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext(file) if hasattr(file, "seek") else open(file, "rb")


def _imported(name: str) -> list[tuple[str, Any]]:
    """What a dotted name names, after the classes around it; each with its own name."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        around: list[tuple[str, Any]] = []
        try:
            for end in range(count, len(parts)):
                found = getattr(found, parts[end])
                around.append((".".join(parts[: end + 1]), found))
        except AttributeError:
            break
        return around
    raise ConfigError(f"safe_globals names {name!r}, which can't be imported", hint="as in 'package.module.Class'")
