"""Small files whose space was taken in advance, for what must be written where a file system has become full.

A checkpoint for which there is no room goes another way. What became of one that is already on its
way has no other way: trainer and drain would wait for each other. Such a file is made of a spare one,
by writing into the pages that it has and renaming it, which takes neither space nor an inode.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from tiered_checkpoint_io.errors import MemoryFullError
from tiered_checkpoint_io.memory.private import scratch_beside, write_atomic, write_private
from tiered_checkpoint_io.memory.space import NO_SPACE

FOLDER = "spares"
_COUNT = 8
#: One page. Outcomes, requests and notes have a few hundred bytes.
_SIZE = 4096


class Spares:
    """The spare files of one memory tier; all its processes take from them, and make new ones."""

    def __init__(self, root: Path) -> None:
        """Takes the tier's root, whose folder ``spares`` need not be there yet."""
        self._folder = root / FOLDER

    def fill(self) -> None:
        """Makes the spare files that are missing, as far as there is space for them."""
        try:
            found = os.listdir(self._folder)
            for _ in range(_COUNT - len(found)):
                self._make(self._folder / secrets.token_hex(6))
        except OSError:
            # Full, or out of descriptors, or no folder: then there are fewer of them, until the next call.
            return

    def write(self, path: Path, data: bytes) -> None:
        """As :func:`write_atomic`; where there is no space, from a spare file.

        Raises:
            MemoryFullError: There is no spare file either, or the data are larger than one.
        """
        try:
            write_atomic(path, data)
        except MemoryFullError:
            if len(data) > _SIZE or not self._write_spare(path, data):
                raise
            # What it replaced, if anything, has given back as much.
            self.fill()

    def mark(self, path: Path) -> None:
        """Makes an empty file, from a spare one where the file system has no inode for it.

        Raises:
            FileNotFoundError: Its folder is gone.
            MemoryFullError: There is no spare file either.
        """
        try:
            write_private(path, b"")
        except MemoryFullError:
            if not self._write_spare(path, b""):
                raise

    def _write_spare(self, path: Path, data: bytes) -> bool:
        temporary = scratch_beside(path)
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return False
        for name in names:
            try:
                os.rename(self._folder / name, temporary)
            except FileNotFoundError:
                # Another process was quicker, or the folder to write to is gone: the next one tells.
                continue
            try:
                descriptor = os.open(temporary, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.truncate()
                os.replace(temporary, path)
            except OSError as error:
                temporary.unlink(missing_ok=True)
                if error.errno not in NO_SPACE:
                    raise
                # Its maker was killed before it had its space.
                continue
            return True
        return False

    @staticmethod
    def _make(path: Path) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, _SIZE)
        except OSError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            raise
        finally:
            os.close(descriptor)
