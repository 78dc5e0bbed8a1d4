"""Committed parts in one folder of the memory tier: found, read, and cleared of dead processes' remains.

A part's folder holds its files, ``part.json``, and markers: empty files whose names are the part's states. Markers are
made with the part, under hidden names, so that a mark takes neither space, nor an inode, nor a descriptor.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tiered_checkpoint_io.clock import SYSTEM, Clock
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, CorruptCheckpointError
from tiered_checkpoint_io.memory.node import flock, is_scarcity, sync_folder, write_atomic, write_private
from tiered_checkpoint_io.memory.slots import clean_dead
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.manifest import Part

SAVES = "saves"
REPLICAS = "replicas"
PART_FILE = "part.json"
#: Folder of the parts that are arriving from other nodes.
INCOMING = "incoming"
DRAINED = "drained"
PINNED = "pinned"
REPLICATED = "replicated"
AWAITED = "awaited"
MARKERS = (DRAINED, PINNED, REPLICATED, AWAITED)
#: Names that no file of a part can have.
_RESERVED = {PART_FILE, *MARKERS, *(f".{name}" for name in MARKERS)}
#: End of the name of a folder that is still being made.
NEW = ".new"
#: Time for a file that another process has locked, and between two tries, seconds.
_LOOK_S = (0.1, 0.005)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A committed part in the memory tier.

    Attributes:
        part: The part's description.
        folder: The part's folder.
        drained: True if the durable tier has the part, or gave it up.
        replicated: True if all parts of its save are in the memory of other nodes as well.
        awaited: True if its save is being replicated.
    """

    part: Part
    folder: Path
    drained: bool
    replicated: bool = False
    awaited: bool = False

    @property
    def save_id(self) -> str:
        return self.part.save_id

    @property
    def op_id(self) -> str:
        """The id of the operation that uploads it."""
        return ids.part_op_id(self.part.save_id, self.part.rank, commits=self.part.commits)

    @property
    def pending(self) -> bool:
        """True if the part waits for the durable tier."""
        return self.part.durable and not self.drained and not self.is_replica

    @property
    def is_replica(self) -> bool:
        """True for a copy of another node's part; that node uploads the part."""
        return self.folder.parent.parent.name == REPLICAS

    def file(self, basename: str) -> Path:
        return self.folder / basename


class PartIndex:
    """A folder of parts, by save and rank, as one process looks at it."""

    def __init__(self, folder: Path) -> None:
        """Takes ``<root>/saves`` or ``<root>/replicas``."""
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, int], Part]] = {}

    def scan(self) -> Iterator[StoredPart | tuple[Path, Exception]]:
        """Yields all parts in the order of their saves; for an unreadable part, the folder and the reason."""
        known: dict[str, tuple[tuple[int, int], Part]] = {}
        for save_id in sorted(os.listdir(self._folder)):
            try:
                ranks = sorted(os.listdir(self._folder / save_id))
            except (FileNotFoundError, NotADirectoryError):
                continue
            for rank in ranks:
                folder = self._folder / save_id / rank
                if rank.endswith(NEW):
                    continue
                description, at = f"{folder}/{PART_FILE}", f"{folder}/"
                try:
                    part = self._read_part(description, known)
                    if part.save_id != save_id:
                        raise CorruptCheckpointError(
                            f"part of save {part.save_id} in the folder of {save_id}", key=str(folder)
                        )
                    drained, *others = (os.path.exists(at + name) for name in (DRAINED, REPLICATED, AWAITED))
                    if not drained:
                        # Or else the part was taken away, marker and all, since its description was read.
                        os.stat(description)
                    yield StoredPart(part, folder, drained, *others)
                except FileNotFoundError as error:
                    # Removed while we looked; only a folder that is still there is damaged.
                    if folder.exists():
                        yield folder, error
                except (CorruptCheckpointError, OSError) as error:
                    yield folder, error
        self._known = known

    def _read_part(self, path: str, known: dict[str, tuple[tuple[int, int], Part]]) -> Part:
        """Reads the changes since the last look: the drain looks often, and descriptions hold many hashes."""
        facts = os.stat(path)
        stamp = (facts.st_ino, facts.st_mtime_ns)
        last = self._known.get(path)
        part = last[1] if last and last[0] == stamp else Part.from_json(Path(path).read_bytes(), where=path)
        known[path] = (stamp, part)
        return part


def check_file_name(path: str) -> None:
    """Refuses, with a ConfigError, a file that would replace another one in its part's folder."""
    if path.rpartition("/")[2] in _RESERVED:
        raise ConfigError(
            f"checkpoint name {path!r} ends in a word that node memory has for its own files",
            operation="save",
            hint="give it another ending, such as '.ckpt'",
        )


def prepare_markers(folder: Path, *, drained: bool) -> None:
    """Makes the markers of a part that is being made; only ``drained`` may already be visible."""
    for name in MARKERS:
        write_private(folder / (name if drained and name == DRAINED else f".{name}"), b"")


def mark(folder: Path, name: str, *, synced: bool = False) -> None:
    """Shows a marker of a part; ``synced``: for a part on a disk, also after a power loss.

    Raises FileNotFoundError if the part is gone, MemoryFullError if a power loss took the prepared marker and there is
    no space for another.
    """
    try:
        os.rename(folder / f".{name}", folder / name)
    except FileNotFoundError:
        if not (folder / name).exists():
            # Prepared markers are not synced: a power loss may leave the part without them.
            write_private(folder / name, b"")
    if synced:
        try:
            sync_folder(folder)
        except OSError as error:
            # The mark itself takes no descriptor, and is there.
            if not is_scarcity(error):
                raise


def begin_removal(stored: StoredPart) -> bool:
    """Keeps a part from becoming awaited; returns False if it has, since it was looked at, or is gone."""
    try:
        os.rename(stored.folder / f".{AWAITED}", stored.folder / f".not-{AWAITED}")
    except FileNotFoundError:
        return stored.folder.exists() and not (stored.folder / AWAITED).exists()
    return True


def mark_durable(stored: StoredPart) -> StoredPart:
    """Queues the upload of a part that was to stay in memory, or whose upload was given up.

    No index names the description of such a part yet, so it may change. Raises CheckpointNotFoundError if the part is
    gone, MemoryFullError if there is no space for its new description.
    """
    part = replace(stored.part, durable=True)
    try:
        if stored.part != part:
            write_atomic(stored.folder / PART_FILE, part.to_json())
        with contextlib.suppress(FileNotFoundError):
            os.rename(stored.folder / DRAINED, stored.folder / f".{DRAINED}")
        if not (stored.folder / PART_FILE).exists():
            raise gone(stored)
    except FileNotFoundError as error:
        raise gone(stored) from error
    return replace(stored, part=part, drained=False)


def is_read(stored: StoredPart) -> bool:
    """Returns whether some process is in a block of :func:`opened` for a part, or can't be asked."""
    for entry in stored.part.content.files:
        try:
            descriptor = os.open(stored.file(entry.basename), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(descriptor)
    return False


def _share(descriptor: int, stored: StoredPart) -> None:
    """Locks a part's file for reading; raises CheckpointNotFoundError if its owner has taken it back."""
    # An exclusive lock: the file is its owner's slot again, or :func:`is_read` looks at it, for a moment.
    if not flock(descriptor, *_LOOK_S, SYSTEM, shared=True):
        raise gone(stored)


@contextlib.contextmanager
def opened(stored: StoredPart, *, keep: bool = False) -> Iterator[dict[str, int]]:
    """Opens a part's files for reading, and yields a descriptor of each, by basename; meanwhile they are not reused.

    With ``keep``, mappings of the files may outlive the block (tensors loaded with ``mmap=True``): the files are then
    never reused, only unlinked.

    Raises:
        CheckpointNotFoundError: The part was removed in the meantime.
        CorruptCheckpointError: A file is missing, or not as long as its manifest says.
    """
    descriptors: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for entry in stored.part.content.files:
            path = stored.file(entry.basename)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            except FileNotFoundError as error:
                if not stored.folder.exists():
                    raise gone(stored) from error
                raise CorruptCheckpointError(
                    "a file is missing", operation="read", tier="memory", key=str(path), rank=stored.part.rank
                ) from error
            stack.callback(os.close, descriptor)
            _share(descriptor, stored)
            if os.fstat(descriptor).st_size != entry.size:
                if not stored.folder.exists():
                    raise gone(stored)
                raise CorruptCheckpointError(
                    f"{os.fstat(descriptor).st_size} bytes instead of {entry.size}",
                    operation="read",
                    tier="memory",
                    key=str(path),
                    rank=stored.part.rank,
                )
            descriptors[entry.basename] = descriptor
        # The owner renames the folder away before it looks for locks and this marker, so a
        # folder that is still in place now will not be reused while we read it.
        try:
            if keep:
                mark(stored.folder, PINNED)
            elif not (stored.folder / PART_FILE).exists():
                raise gone(stored)
        except FileNotFoundError as error:
            raise gone(stored) from error
        yield descriptors


@contextlib.contextmanager
def reading(stored: StoredPart) -> Iterator[dict[str, memoryview]]:
    """Maps a part's files for reading: as :func:`opened`, with the bytes of each instead of a descriptor."""
    with opened(stored) as descriptors:
        yield {name: mapped(descriptor) for name, descriptor in descriptors.items()}


def mapped(descriptor: int) -> memoryview:
    """Returns all bytes of a file."""
    size = os.fstat(descriptor).st_size
    # An empty file cannot be mapped.
    return memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else b"")


class Incoming:
    """A part that a process of this node reads from another one, as further nodes may read it: chunk by chunk.

    A file, locked by that process, holds the part's description, the paths of its files, and a byte for each chunk,
    which is set once the chunk is there and verified.
    """

    def __init__(self, descriptor: int, head: bytes) -> None:
        """Takes the open file and its first line."""
        described, self.paths = json.loads(head)
        self.part = Part.from_json(described.encode(), where=INCOMING)
        self._descriptor = descriptor
        counts = (len(entry.chunks) for entry in self.part.content.files)
        self._starts = list(itertools.accumulate(counts, initial=len(head)))
        self._shown: Path | None = None

    @classmethod
    def show(cls, root: Path, part: Part, paths: Sequence[str]) -> Incoming:
        """Shows a part whose files this process begins to write; raises OSError."""
        folder = root / INCOMING
        folder.mkdir(mode=0o700, exist_ok=True)
        clean_dead(str(folder))
        path, head = folder / f"{part.save_id}-{part.rank}", json.dumps([part.to_json().decode(), paths]).encode()
        new = path.with_name(f"{path.name}{NEW}")
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found = cls(descriptor, head + b"\n")
            os.truncate(descriptor, 0)
            os.posix_fallocate(descriptor, 0, found._starts[-1])
            os.pwrite(descriptor, head + b"\n", 0)
            os.rename(new, path)
        except BaseException:
            os.close(descriptor)
            raise
        found._shown = path
        return found

    @classmethod
    def find(cls, root: Path, save_id: str, rank: int) -> Incoming | None:
        """Returns a part that is arriving; None if there is none."""
        with contextlib.suppress(OSError):
            path = root / INCOMING / f"{save_id}-{rank}"
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb", closefd=False) as file:
                found = cls(descriptor, file.readline())
            if found.is_arriving():
                return found
            found.close()
        return None

    def is_arriving(self) -> bool:
        """Returns True if the process that reads it is still at work."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return False

    def mark(self, number: int, chunk: int) -> None:
        """Notes that a chunk of a file is there, and verified."""
        os.pwrite(self._descriptor, b"\1", self._starts[number] + chunk)

    def has(self, number: int, first: int, last: int) -> bool:
        """Returns True if the chunks with these bytes of a file are there, the last one included."""
        chunk_size = self.part.content.files[number].chunk_size
        first, count = first // chunk_size, last // chunk_size + 1 - first // chunk_size
        return os.pread(self._descriptor, count, self._starts[number] + first) == b"\1" * count

    def close(self) -> None:
        """Shows the part no more, if this process has shown it."""
        if self._shown is not None:
            self._shown.unlink(missing_ok=True)
        os.close(self._descriptor)


def gone(stored: StoredPart) -> CheckpointNotFoundError:
    """Returns the error of a part that was removed since it was looked up."""
    return CheckpointNotFoundError(
        "the checkpoint was removed from memory while it was being read",
        operation="read",
        tier="memory",
        key=str(stored.folder),
        step=stored.part.content.step,
    )


def clear_dead(root: Path, clock: Clock) -> None:
    """Clears the remains of dead processes below a tier's root: their free slots, trash and half-made folders."""
    clean_dead(str(root / "slots"))
    for entry in os.scandir(root / "trash"):
        # Renamed first: a live remover must not see its folder without the marker against reuse of the files.
        doomed = root / "trash" / f"clean.{os.getpid()}.{clock.token(4)}"
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry.path, doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    begun = clock.wall() - clock.timing.half_made_s
    for save in (*os.scandir(root / SAVES), *os.scandir(root / REPLICAS)):
        with contextlib.suppress(OSError):
            for rank in os.scandir(save.path):
                if rank.name.endswith(NEW) and rank.stat(follow_symlinks=False).st_mtime < begun:
                    shutil.rmtree(rank.path, ignore_errors=True)
            if save.stat(follow_symlinks=False).st_mtime < begun:
                # Succeeds only if the folder is empty.
                os.rmdir(save.path)
