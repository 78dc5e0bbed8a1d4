"""How the new files of a checkpoint are put together in a scratch folder, sent and committed; or taken back."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM
from tiered_checkpoint_io.engine.chunks import hashed
from tiered_checkpoint_io.engine.durable.commit import commit, put_part
from tiered_checkpoint_io.engine.durable.removal import withdraw
from tiered_checkpoint_io.engine.save.facts import SaveFacts
from tiered_checkpoint_io.errors import ExportError, UsageError
from tiered_checkpoint_io.export.blocks import TargetBlock
from tiered_checkpoint_io.export.items import Tensors
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.index import IndexRow
from tiered_checkpoint_io.model.manifest import METADATA, Content, Part
from tiered_checkpoint_io.model.place import Place
from tiered_checkpoint_io.resharding.parts import Planned
from tiered_checkpoint_io.stores import Store
from tiered_checkpoint_io.stores.base import UploadContent
from tiered_checkpoint_io.stores.silence import local_work

#: Of the room of the scratch folder, what may be taken.
_ROOM = 0.95


class Mapped:
    """The bytes of a mapped file: the ``Content`` of an upload. Pages that were read leave this process' memory."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping

    def __len__(self) -> int:
        return len(self._mapping)

    def __getitem__(self, piece: slice, /) -> contextlib.AbstractContextManager[memoryview]:
        start, end, _ = piece.indices(len(self))
        return self._piece(start, end)

    @contextlib.contextmanager
    def _piece(self, start: int, end: int) -> Iterator[memoryview]:
        with memoryview(self._mapping) as view, view[start:end] as piece:
            yield piece
        first = start - start % mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first, end - first)


class Delivery:
    """A new checkpoint on its way to the durable tier; nothing has its name."""

    def __init__(
        self, store: Store, place: Place, facts: SaveFacts, folder: Path, progress: Callable[[int], None]
    ) -> None:
        """Takes what is known of it.

        Args:
            store: The durable tier.
            place: Where that is.
            facts: Of the save.
            folder: The scratch folder.
            progress: Called with the bytes that were read or sent, from any thread; what it raises ends the work.
        """
        self._store, self._place, self._facts, self._folder, self._progress = store, place, facts, folder, progress

    def send_file(self, data: Mapped) -> Content:
        """Sends and commits a full checkpoint; takes back what was sent where that fails."""
        name = self._facts.name
        with self._taken_back([name], switch=name):
            part = self._part(0, {name: data})
            self._commit([part], {name.rpartition("/")[2]: data})
            return part.content

    def send_parts(self, tensors: Tensors, planned: Sequence[Planned], beside: Mapping[str, memoryview]) -> Content:
        """Sends and commits a sharded checkpoint; takes back what was sent where that fails.

        Args:
            tensors: Where the elements come from.
            planned: The file of each part.
            beside: ``.metadata``, and other small files of the first part, by their basenames.
        """
        facts, sizes = self._facts, [each.image.size for each in planned]
        paths = [*map(facts.path, range(len(planned))), *(f"{facts.name}/{each}" for each in beside)]
        parts: list[Part] = []
        with self._taken_back(paths, switch=f"{facts.name}/{METADATA}"):
            for ranks in batches(sizes, _room(self._folder)):
                parts += self._send(tensors, {rank: planned[rank] for rank in ranks}, beside)
            if len(parts) > 1:
                self._commit(parts, {METADATA: beside[METADATA]})
            return parts[0].content

    def _send(self, tensors: Tensors, planned: Mapping[int, Planned], beside: Mapping[str, memoryview]) -> list[Part]:
        """Puts the files of some parts together, and sends them; a part that is alone is committed as well."""
        files = {rank: _new_file(self._folder, each) for rank, each in planned.items() if each.image.segments}
        targets: dict[str, list[TargetBlock]] = {}
        for rank, file in files.items():
            for (name, box), start in zip(planned[rank].shares, planned[rank].starts, strict=True):
                targets.setdefault(name, []).append(TargetBlock(box, file, start))
        tensors.fill(targets, progress=self._progress)
        parts = []
        for rank in planned:
            data: dict[str, UploadContent] = {}
            if rank == 0:
                data |= {f"{self._facts.name}/{basename}": view for basename, view in beside.items()}
            if rank in files:
                data[self._facts.path(rank)] = Mapped(files[rank])
            part = self._part(rank, data)
            by_basename = {path.rpartition("/")[2]: each for path, each in data.items()}
            if part.content.parts == 1:
                self._commit([part], by_basename)
            else:
                put_part(self._store, part, by_basename, progress=self._progress)
            parts.append(part)
        return parts

    def _part(self, rank: int, files: Mapping[str, UploadContent]) -> Part:
        """A part, once its files are hashed."""
        look = lambda _: self._progress(0)  # noqa: E731
        entries = tuple(hashed(path, view, progress=look) for path, view in files.items())
        return self._facts.describe(rank, self._place, entries, created=SYSTEM.wall())

    def _commit(self, parts: Sequence[Part], files: Mapping[str, UploadContent]) -> None:
        rows = {part.rank: IndexRow.of(part) for part in parts}
        fate = commit(self._store, parts[0], files, rows, progress=self._progress, is_new=True)
        if fate == "replaced":
            raise UsageError(
                "another save has taken the new name meanwhile",
                operation="reshard",
                key=ids.join_url(self._store.url, self._facts.name),
                hint="give another one",
            )

    @contextlib.contextmanager
    def _taken_back(self, paths: Sequence[str], *, switch: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            withdraw(self._store, self._facts.name, self._facts.save_id, paths, switch=switch)
            raise


def _new_file(folder: Path, planned: Planned) -> mmap.mmap:
    """A mapped file without a name that has all of a part's file but the elements of tensors."""
    image = planned.image
    with local_work(), tempfile.TemporaryFile(dir=folder) as file:
        # A mapped page without space would end the process when it is touched.
        os.posix_fallocate(file.fileno(), 0, image.size)
        for segment in image.segments:
            file.seek(segment.offset)
            file.write(segment.data)
        file.flush()
        return mmap.mmap(file.fileno(), image.size)


def _room(folder: Path) -> int:
    free = os.statvfs(folder)
    return int(free.f_bavail * free.f_frsize * _ROOM)


def batches(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which files are put together at the same time: as many, in order, as there is room for; pure.

    Raises:
        ExportError: There is no room for one alone.
    """
    found: list[list[int]] = []
    left = 0
    for index, size in enumerate(sizes):
        if size > room:
            raise ExportError(
                f"no room for a part of {size} bytes: the scratch folder has {room}",
                operation="reshard",
                hint="name a folder on a disk with more room by --scratch, or have it in more parts",
            )
        if not found or size > left:
            found.append([])
            left = room
        found[-1].append(index)
        left -= size
    return found
