"""A storage for Meta's torch_checkpointing: its checkpoints through node memory and the durable tier.

``pip install tiered-checkpoint-io[torch-checkpointing]``; see docs/torch-checkpointing.md.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from tiered_checkpoint_io.adapters.given import check_positive
from tiered_checkpoint_io.engine.checkpointer import TIERS, Checkpointer, NoCheckpoint
from tiered_checkpoint_io.engine.durable.damage import Damage, damage_of
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import (
    CheckpointNotFoundError,
    FormatVersionError,
    ManifestError,
    StoreError,
    UsageError,
)
from tiered_checkpoint_io.metrics.recording import say_not_exported
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.silence import answer_within

try:
    from torch_checkpointing.checkpoint_writer import DEFAULT_TEMP_DIR_PREFIX
    from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"tiered_checkpoint_io.torch_checkpointing needs torch_checkpointing ({missing}):"
        " pip install 'tiered-checkpoint-io[torch-checkpointing]'",
        name=missing.name,
    ) from missing

__all__ = ["TieredStorageConfig"]

#: The key by which one of our checkpoints holds the files of one of theirs.
FILES = "files"
_EVERY = "s3_every_n_train_steps"


@dataclass
class TieredStorageConfig(StorageConfig):  # type: ignore[misc]
    """What ``CheckpointManager.Config(storage_config=...)`` takes, of a job of one process.

    A checkpoint's id is a name relative to ``dirpath``, such as ``step_100``; ``tiered:latest`` loads the newest.

    Attributes:
        dirpath: The durable tier: an S3 URL, another fsspec URL, or a directory.
        options: Further keys of docs/configuration.md, such as ``namespace``.
        s3_every_n_steps: Of which steps, by the number in their ids, the checkpoints go to the durable tier as well;
            None for all, or for what ``s3_every_n_train_steps`` in the options says.
    """

    dirpath: str
    options: Mapping[str, Any] = field(default_factory=dict)
    s3_every_n_steps: int | None = None
    _engine: Checkpointer | None = field(default=None, init=False, repr=False, compare=False)
    #: The checkpoint that is being read, by any storage: its id, and its files.
    _open: tuple[str, dict[str, torch.Tensor]] = field(default=("", {}), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Checks the interval; raises ConfigError."""
        check_positive("s3_every_n_steps", self.s3_every_n_steps)

    def is_durable(self, step: int | None) -> bool:
        """Whether the checkpoint of a step, or one that tells none, goes to the durable tier."""
        every = self.s3_every_n_steps
        if every is None:
            every = self.checkpointer.session.config.s3_every_n_train_steps if _EVERY in self.options else 1
        return every is not None and (step is None or step % every == 0)

    @property
    def checkpointer(self) -> Checkpointer:
        """The engine; made on first use, in the process that uses it."""
        if self._engine is None:
            config = TieredCheckpointConfig.from_any(None, dirpath=self.dirpath, **self.options)
            self._engine = Checkpointer(config)
            say_not_exported(self._engine.session, type(self).__name__)
        return self._engine

    def create_storage(self) -> TieredStorage:
        """The storage.

        Raises:
            UsageError: The job has several processes.
        """
        world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        if max(world_size, int(os.environ.get("WORLD_SIZE", "1"))) > 1:
            raise UsageError(
                "TieredStorageConfig in a job of several processes: a storage learns on rank 0 alone that all have"
                " written",
                operation="setup",
                hint="save by tiered_checkpoint_io.dcp there (docs/sharded.md)",
            )
        return TieredStorage(self)

    def close(self) -> None:
        """Waits for uploads, and frees everything; may be used again."""
        if self._engine is not None:
            self._engine.close()

    def __getstate__(self) -> dict[str, Any]:
        # An asynchronous save is written by a process of its own, which opens its own engine.
        return {**self.__dict__, "_engine": None, "_open": ("", {})}


class TieredStorage(Storage):  # type: ignore[misc]
    """Holds what is written below a temporary folder until that is renamed, and then saves it as one checkpoint."""

    def __init__(self, config: TieredStorageConfig) -> None:
        self._config = config
        #: Files that are written, and not committed yet.
        self._written: dict[Path, bytearray] = {}

    # ------------------------------------------------------------------------------------------ write
    def stream_write(self, path: Path) -> io.IOBase:
        """A file that is held once it is closed."""
        return _Written(self, path)

    def write(self, path: Path, data: Any) -> None:
        """Holds a whole file.

        Raises:
            UsageError: It is not below a temporary folder, so that nothing would tell when the checkpoint is complete.
        """
        if len(path.parts) < 2 or not path.parts[0].startswith(DEFAULT_TEMP_DIR_PREFIX):
            raise UsageError(
                f"torch_checkpointing writes {path}",
                operation="save",
                hint="a checkpoint's id is one name below dirpath, such as 'step_100'; leave write_to_temp_dir and"
                " temp_dir_prefix at their defaults",
            )
        self._written[path] = bytearray(data)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,  # noqa: ARG002 - there is nothing to clean up
    ) -> None:
        """Commits: the files below ``src_path`` become one checkpoint, in node memory when this returns.

        One for which memory has no room, and one that fails where ``on_save_error`` is ``warn``, is given up: the log
        says so, and training goes on.

        Raises:
            OSError: There is an intact checkpoint of that name; or the folder was not written here.
            SaveError: The save failed, and ``on_save_error`` is ``raise``.
        """
        # Nothing tells that a load has ended. What it has mapped would take node memory to the end of the job.
        self._config._open = ("", {})
        files = {path: data for path, data in self._written.items() if path.is_relative_to(src_path)}
        name = str(dst_path)
        if not is_directory or not files:
            raise OSError(errno.ENOTSUP, f"{src_path} is not a folder of files written by this storage")
        # Their writer does not come back to them, whatever becomes of them here.
        self._written = {path: data for path, data in self._written.items() if path not in files}
        if self._is_taken(name) and not self._is_damaged(name):
            raise FileExistsError(errno.EEXIST, f"there is a checkpoint {name} at {self._config.dirpath}")
        state = {
            FILES: {str(path.relative_to(src_path)): _tensor(data) for path, data in files.items()},
            "global_step": ids.step_in_name(name),
        }
        durable = self._config.is_durable(ids.step_in_name(name))
        self._config.checkpointer.save(state, name, tiers=TIERS if durable else {"memory"}, wait=False)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Does nothing: folders need not be made."""

    def delete(self, path: Path) -> None:
        """Removes a file that is not committed yet.

        Raises:
            OSError: It is part of a checkpoint, or there is none.
        """
        if path not in self._written:
            raise OSError(errno.ENOTSUP, f"{path} is not an uncommitted file; rmdir removes a whole checkpoint")
        del self._written[path]

    def rmdir(self, path: Path) -> None:
        """Removes a checkpoint from both tiers, or what is written of one."""
        written = [each for each in self._written if each.is_relative_to(path)]
        for each in written:
            del self._written[each]
        if not written:
            self._config.checkpointer.remove(str(path))

    # ------------------------------------------------------------------------------------------- read
    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:  # noqa: ARG002
        """A verified file of a checkpoint.

        Raises:
            FileNotFoundError: There is none.
        """
        return _Read(self._content(path))

    def getsize(self, path: Path) -> int:
        """Its size, bytes.

        Raises:
            FileNotFoundError: There is no such file.
        """
        return len(self._content(path))

    def exists(self, path: Path) -> bool:
        """Whether there is such a checkpoint, or such a file in one; of a checkpoint, this finds the newest anew."""
        if any(each.is_relative_to(path) for each in self._written):
            return True
        if len(path.parts) == 1:
            return self._load(str(path)) is not None
        try:
            self._content(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: Path) -> bool:
        """Whether it is a checkpoint, or the folder of all."""
        return str(path) == "." or str(path) in self._names()

    def ls(self, path: Path) -> list[str]:
        """The names of all checkpoints, or of the files of one."""
        if str(path) == ".":
            return sorted(self._names())
        return sorted(self._load(str(path)) or ())

    def remap_path(self, path: Path) -> str:
        """The checkpoint's URL."""
        return ids.join_url(self._config.dirpath, str(path))

    def _names(self) -> set[str]:
        session = self._config.checkpointer.session
        return self._held() | session.known.all(session.config.support.durable_timeout_s)

    def _held(self) -> set[str]:
        """The names that are in memory alone: what it has of the others may be waiting for its removal."""
        session = self._config.checkpointer.session
        held = [each.part for each in session.open().tier.parts() if each.part.place == session.place]
        return {part.name for part in held if not part.durable}

    def _is_taken(self, name: str) -> bool:
        """Whether a save must not take a name, as far as that is known: training does not stop for a silent server."""
        try:
            return name in self._names()
        except StoreError as error:
            self._config.checkpointer.session.log.warning(
                "could not check whether there is a checkpoint %s on the durable tier, and saves it all the same, in"
                " place of one that may be there: %s",
                name,
                error,
            )
            return name in self._held()

    def _is_damaged(self, name: str) -> bool:
        """Whether what has a name can't be loaded: a training that had to resume before it comes to its step again."""
        session = self._config.checkpointer.session
        if any(each.part.name == name and each.part.place == session.place for each in session.open().tier.parts()):
            return False
        try:
            why = answer_within(session.config.support.durable_timeout_s, lambda: self._damage_of(name))
        except StoreError:
            return False
        if why is not None:
            session.log.warning("%s is saved anew: what the durable tier has of it is damaged: %s", name, why)
        return why is not None

    def _damage_of(self, name: str) -> Damage | None:
        """What is wrong on the durable tier with a checkpoint; None where it is intact, or there is none."""
        store = self._config.checkpointer.session.durable()
        try:
            manifest = read_manifest(store, name)
        except FormatVersionError:
            # This release can't tell.
            return None
        except ManifestError as error:
            return Damage(error.message, file=error.key or "")
        return damage_of(store, manifest) if manifest is not None else None

    def _load(self, name: str) -> dict[str, torch.Tensor] | None:
        """The files of a checkpoint, found anew; None where there is none of theirs."""
        config = self._config
        config._open = ("", {})
        try:
            state = config.checkpointer.load(name, map_location="cpu")
        except CheckpointNotFoundError:
            return None
        if isinstance(state, NoCheckpoint) or FILES not in state:
            return None
        config._open = name, state[FILES]
        files: dict[str, torch.Tensor] = state[FILES]
        return files

    def _content(self, path: Path) -> memoryview:
        name = path.parts[0]
        opened, files = self._config._open
        content = ((files if name == opened else self._load(name)) or {}).get("/".join(path.parts[1:]))
        if content is None:
            raise FileNotFoundError(errno.ENOENT, f"there is no {path} at {self._config.dirpath}")
        return memoryview(cast("Any", content.numpy()))


class _Written(io.BytesIO):
    def __init__(self, storage: TieredStorage, path: Path) -> None:
        super().__init__()
        self._storage, self._path = storage, path

    def close(self) -> None:
        if not self.closed:
            self._storage.write(self._path, self.getbuffer())
        super().close()


class _Read(io.RawIOBase):
    """A file over memory, which is copied only where it is read."""

    def __init__(self, content: memoryview) -> None:
        self._content, self._position = content, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: len(self._content)}[whence]
        self._position = max(0, start + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        piece = self._content[self._position : self._position + len(buffer)]
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


def _tensor(data: bytearray) -> torch.Tensor:
    # torch makes no tensor of an empty buffer.
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8, device="cpu")
