"""Writes a checkpoint of a durable tier anew, as another number of parts or as one file, and commits it there.

The new files are put together in a scratch folder on disk, as many as it has room for, by reading each file of the old
checkpoint from its front to its end; then they are hashed and sent.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import StorageMeta

from tiered_checkpoint_io.engine.durable.manifests import exists, read_manifest
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.errors import ConfigError, ExportError, TieredCheckpointError, UsageError
from tiered_checkpoint_io.export.files import to_torch_file
from tiered_checkpoint_io.export.find import SourceCheckpoint, copy_file, read_found
from tiered_checkpoint_io.export.folder import Folder
from tiered_checkpoint_io.export.items import Items, Tensors, loaded
from tiered_checkpoint_io.export.state import MappedState
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.manifest import METADATA, Content
from tiered_checkpoint_io.resharding.delivery import Delivery, Mapped
from tiered_checkpoint_io.resharding.parts import plan_parts
from tiered_checkpoint_io.stores import Store, open_store, place_of

#: What only a whole training state of Lightning's has.
_LIGHTNINGS = "pytorch-lightning_version"
_MOST_PARTS = 100_000

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Resharded:
    """A checkpoint that was written anew.

    Attributes:
        source: The checkpoint that it was made of; of an alias, its target.
        name: The new one.
        kind: ``full`` or ``sharded``.
        parts: How many parts it has.
        step: The training step; -1 where it is not known.
        resumable: Whether training can resume from it.
        size_bytes: Bytes of its files.
    """

    source: str
    name: str
    kind: str
    parts: int
    step: int
    resumable: bool
    size_bytes: int


def reshard_checkpoint(
    dirpath: str | os.PathLike[str],
    name: str,
    new_name: str,
    *,
    parts: int | None,
    weights_only: bool = True,
    scratch: str | os.PathLike[str] | None = None,
    progress: Progress = lambda _: None,
    begin: Progress = lambda _: None,
    **options: Any,
) -> Resharded:
    """Writes a checkpoint anew, as another number of parts or as one file, and commits it under a new name.

    Every byte of a checkpoint of ours is verified on the way, and all tensors keep their bits. The new checkpoint comes
    right before the old one's run in the order of saves: ``tiered:latest`` stays what it was. A checkpoint that is
    made of what others wrote comes before all saves, and is loaded by name.

    Args:
        dirpath: The durable tier.
        name: The checkpoint there, also of a folder that plain DCP wrote, or a file of torch.save;
            ``tiered:latest`` for the latest save that training can resume from.
        new_name: The name of the new checkpoint; it must be free.
        parts: How many ranks' parts it shall have, as a job of so many ranks would save it; None for one file, as
            ``torch.save`` writes it.
        weights_only: Refuse objects that are neither tensors nor plain data, where they have to be loaded: between a
            file and parts.
        scratch: A folder on a disk with room for the largest part at least; by default that of temporary files. The old
            checkpoint is read once where it has room for the whole new one.
        progress: Called with bytes that were read or sent, from any thread; what it raises ends the work,
            and nothing is left of it.
        begin: Called with how many bytes those will be, in all.
        options: Keys of the configuration: ``endpoint_url``, ``region``, ``profile`` ...

    Raises:
        CheckpointNotFoundError: There is no such checkpoint.
        OtherKindError: It is a local one.
        UsageError: The new name is taken; or a full checkpoint is to become one file.
        CorruptCheckpointError: Its bytes are not those that were saved.
        RestoreError: It holds classes that are not allowed.
        ExportError: The scratch folder has no room.
        StoreError: The durable tier could not be asked.
    """
    if parts is not None and not 1 <= parts <= _MOST_PARTS:
        raise ConfigError(f"parts is {parts}", hint=f"allowed: 1 to {_MOST_PARTS}, or None for one file")
    config = TieredCheckpointConfig.from_any(dirpath=dirpath, **options)
    new_name = ids.validate_new_name(new_name)
    with contextlib.closing(open_store(config)) as store, _scratch_folder(scratch) as folder:

        def work(found: SourceCheckpoint) -> Resharded:
            _check_free(store, new_name)
            if found.folder is None and parts is None:
                raise UsageError(
                    "it is one file already", operation="reshard", key=found.name, hint="give the number of parts"
                )
            done = _Work(store, config, found, new_name, folder, progress, begin, weights_only=weights_only)
            try:
                return done.as_file() if parts is None else done.as_parts(parts)
            except (OSError, ExportError) as error:
                # A file that is put together there raises an ExportError, which names that file.
                cause = error.__cause__ if isinstance(error, ExportError) else error
                if not isinstance(cause, OSError) or isinstance(cause, TieredCheckpointError):
                    raise
                raise ExportError(
                    f"the scratch folder can't be written: {cause.strerror or cause}",
                    operation="reshard",
                    key=str(folder),
                    hint="name another one, on a disk with more room, by --scratch",
                ) from error

        # Once: what has begun to be sent is not sent again.
        return read_found(store, name, work, operation="reshard", tries=1)


def _check_free(store: Store, name: str) -> None:
    where = ids.join_url(store.url, name)
    if read_manifest(store, name) is not None or exists(store, name) or exists(store, f"{name}/{METADATA}"):
        raise UsageError("the new name is taken", operation="reshard", key=where, hint="give another one")
    found = next(iter(store.list(f"{name}/")), None)
    if found is not None:
        raise UsageError(
            f"the new name is no checkpoint, but has files, such as {found.key}",
            operation="reshard",
            key=where,
            hint="give another name; or remove them, where a reshard was killed and no save to that name is under way",
        )


@contextlib.contextmanager
def _scratch_folder(scratch: str | os.PathLike[str] | None) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(prefix=".tiered-reshard-", dir=scratch, ignore_cleanup_errors=True)
    except OSError as error:
        raise ExportError(
            f"no scratch folder: {error.strerror or error}",
            operation="reshard",
            key=str(scratch or tempfile.gettempdir()),
            hint="name a folder on a disk with room by --scratch",
        ) from error
    with made as folder:
        yield Path(folder)


class _Work:
    """One checkpoint that is written anew."""

    def __init__(
        self,
        store: Store,
        config: TieredCheckpointConfig,
        found: SourceCheckpoint,
        name: str,
        folder: Path,
        progress: Progress,
        begin: Progress,
        *,
        weights_only: bool,
    ) -> None:
        self._store, self._found, self._name, self._folder = store, found, name, folder
        self._place = place_of(config)
        self._progress, self._begin, self._weights_only = progress, begin, weights_only

    # ------------------------------------------------------------------------------------ one file
    def as_file(self) -> Resharded:
        """A sharded checkpoint as one file."""
        folder = self._found.folder
        assert folder is not None
        items = Items(folder)
        total = sum(map(items.nbytes, items.tensors))
        self._begin(2 * total)
        rest = self._rest(items, folder)
        file = self._folder / "full"
        weights_only = self._weights_only
        to_torch_file(folder, file, weights_only=weights_only, beside=rest, progress=self._progress, synced=False)
        content = self._found.copies[0][0] if self._found.copies else None
        facts = self._facts(content, "full", 1, resumable=rest is None)
        with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            file.unlink()
            return self._made(self._delivery(facts).send_file(Mapped(mapping)), len(mapping))

    def _rest(self, items: Items, folder: Folder) -> Mapping[str, Any] | None:
        """What Lightning put beside the shards, as its own consolidation adds it to the state."""
        beside = self._beside(items)
        basename = ids.rest_in(beside)
        if basename is None:
            return None
        data = io.BytesIO(folder.read(basename, 0, beside[basename]))
        rest = loaded(data, basename, folder.where, weights_only=self._weights_only)
        return rest if isinstance(rest, dict) else None

    def _beside(self, items: Items) -> dict[str, int]:
        """Basenames and sizes of the files that are neither shards nor their metadata."""
        prefix = f"{self._found.name}/"
        if self._found.copies:
            listed = {entry.path: entry.size for _, files in self._found.copies for entry in files}
        else:
            listed = {entry.key: entry.size for entry in self._store.list(prefix)}
        shards = {*items.files, METADATA}
        beside = {path.removeprefix(prefix): size for path, size in listed.items()}
        # Of ours, a rank's file is a shard even where nothing is in it.
        return {
            name: size
            for name, size in beside.items()
            if "/" not in name and name not in shards and not name.endswith(".distcp")
        }

    # --------------------------------------------------------------------------------------- parts
    def as_parts(self, parts: int) -> Resharded:
        """Any checkpoint as so many parts."""
        found, content = self._found, None
        beside: dict[str, int] = {}
        tensors: Tensors
        if found.folder is not None:
            tensors = items = Items(found.folder)
            beside = self._beside(items)
            content = found.copies[0][0] if found.copies else None
            resumable = True
        else:
            file = self._folder / "full"
            content = copy_file(self._store, found, file, operation="reshard", synced=False)
            where = ids.join_url(self._store.url, found.name)
            tensors = MappedState(file, where, weights_only=self._weights_only)
            file.unlink()
            # Lightning's sharded strategies name optimizers' tensors in another way.
            resumable = _LIGHTNINGS not in tensors.objects
        facts = self._facts(content, "sharded", parts, resumable=resumable)
        planned, metadata = plan_parts(
            tensors.tensors,
            {name: tensors.saved(name) for name in tensors.objects},
            parts,
            file_names=[facts.file_name(rank) for rank in range(parts)],
            paths=tensors.paths,
        )
        url = ids.join_url(self._store.url, self._name)
        metadata.storage_meta = StorageMeta(checkpoint_id=url, save_id=facts.save_id)
        self._begin(sum(map(tensors.nbytes, tensors.tensors)) + sum(each.image.size for each in planned))
        first = {METADATA: memoryview(pickle.dumps(metadata))}
        for basename, size in beside.items():
            assert found.folder is not None
            first[basename] = found.folder.read(basename, 0, size)
        sent = self._delivery(facts).send_parts(tensors, planned, first)
        return self._made(sent, sum(each.image.size for each in planned) + sum(map(len, first.values())))

    # -------------------------------------------------------------------------------------- commit
    def _delivery(self, facts: SaveFacts) -> Delivery:
        return Delivery(self._store, self._place, facts, self._folder, self._progress)

    def _made(self, content: Content, size: int) -> Resharded:
        return Resharded(
            self._found.name, self._name, content.kind, content.parts, content.step, content.resumable, size
        )

    def _facts(self, content: Content | None, payload: Any, parts: int, *, resumable: bool) -> SaveFacts:
        """The facts of the new save: those of the old one, as far as they are known."""
        if content is not None:
            return SaveFacts(
                self._name,
                ids.id_before_run_of(content.save_id),
                content.step,
                parts,
                durable=True,
                payload=payload,
                epoch=content.epoch,
                metric=content.metric,
                coordinator=0,
                resumable=resumable and content.resumable,
            )
        # Nothing tells when others saved it, nor whether training can resume from it: it comes before all saves.
        step = ids.step_in_name(self._found.name)
        return SaveFacts(
            self._name,
            ids.save_id(ids.new_run_id(now=0), 1),
            step if step is not None else -1,
            parts,
            durable=True,
            payload=payload,
            coordinator=0,
            resumable=False,
        )
