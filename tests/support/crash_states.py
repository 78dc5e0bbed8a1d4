"""What a file system may show after a crash: the operations on a folder recorded, and every legal state made of them.

The model is the weakest that POSIX allows a program to rely on:

* A file's data is there once an ``fsync`` of the file has returned. Of each later write, nothing, all, half, or as many
  zero bytes may be there, whatever became of other writes.
* A name in a folder (made, renamed, removed) is as the last operation left it once an ``fsync`` of the folder has
  returned. After that any of its later states may show, whatever became of other names: a rename is a new name in one
  folder and a removal in another, each lost or kept by itself. The switch of one name to another file is atomic.
* A folder whose own name was lost is lost with all that is in it.
"""

import contextlib
import itertools
import math
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

#: States that are tried exhaustively behind one operation; beyond, as many are drawn.
EXHAUSTIVE = 64


@dataclass(eq=False)
class File:
    """An inode of a file: its writes, and how many of them an fsync has made safe."""

    writes: list = field(default_factory=list)
    safe: int = 0

    def data(self, fates):
        """The content, given what became of each write that is not safe: ``all``, ``none``, ``half``, ``zero``."""
        content = bytearray()
        for (offset, data), fate in zip(self.writes, itertools.chain(["all"] * self.safe, fates), strict=False):
            if fate == "none":
                continue
            piece = {"all": data, "half": data[: len(data) // 2], "zero": bytes(len(data))}[fate]
            content.extend(bytes(max(0, offset + len(piece) - len(content))))
            content[offset : offset + len(piece)] = piece
        return bytes(content)


@dataclass(eq=False)
class Folder:
    """An inode of a folder: for each name what it was, the safe state first; None where it is not there."""

    names: dict = field(default_factory=dict)

    def now(self, name):
        return self.names.get(name, [None])[-1]

    def set(self, name, inode):
        self.names.setdefault(name, [None]).append(inode)

    def sync(self):
        self.names = {name: [states[-1]] for name, states in self.names.items() if states[-1] is not None}


class Recorder:
    """Patches ``os`` while it is entered, and keeps the inodes below a folder as the operations leave them."""

    def __init__(self, root, after):
        self.root = os.path.abspath(root)
        self.top = Folder()
        self._after = after
        self._held = {}
        self._lock = threading.RLock()
        self._originals = {}

    def __enter__(self):
        for name in ("open", "close", "write", "fsync", "rename", "replace", "unlink", "remove", "mkdir", "rmdir"):
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._wrap(name))
        for name in ("pwrite", "writev", "link", "symlink", "truncate", "ftruncate", "sendfile", "copy_file_range"):
            self._originals[name] = getattr(os, name)
            setattr(os, name, self._refuse(name))
        return self

    def __exit__(self, *_):
        for name, original in self._originals.items():
            setattr(os, name, original)

    def _wrap(self, name):
        original, note = self._originals[name], getattr(self, f"_{name}")

        def wrapped(first, *args, **options):
            with self._lock:
                known = first in self._held if name in ("write", "fsync", "close") else self._inside(first)
                result = original(first, *args, **options)
                if known and note(result, first, *args):
                    self._after(name)
                return result

        return wrapped

    def _refuse(self, name):
        original = self._originals[name]

        def refused(*args, **options):
            touched = any(self._inside(each) or each in self._held for each in args if isinstance(each, int | str))
            assert not touched, f"os.{name} is not in the model: add it"
            return original(*args, **options)

        return refused

    def _inside(self, path):
        return isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(f"{self.root}/")

    def _find(self, path):
        """The folder that holds a path, and its name there; the top itself has none."""
        inner = os.path.relpath(os.fspath(path), self.root)
        if inner == ".":
            return None, ""
        *above, name = inner.split("/")
        folder = self.top
        for each in above:
            folder = folder.now(each)
        return folder, name

    def _at(self, path):
        folder, name = self._find(path)
        return self.top if folder is None else folder.now(name)

    # Each tells whether it changed what a crash may leave.
    def _open(self, descriptor, path, flags, *_):
        inode = self._at(path)
        made = inode is None
        if made:
            inode = File()
            folder, name = self._find(path)
            folder.set(name, inode)
        assert not flags & os.O_TRUNC, "O_TRUNC is not in the model: add it"
        self._held[descriptor] = [inode, 0]
        return made

    def _close(self, _, descriptor):
        del self._held[descriptor]
        return False

    def _write(self, count, descriptor, data):
        inode, offset = self._held[descriptor]
        inode.writes.append((offset, bytes(memoryview(data)[:count])))
        self._held[descriptor][1] += count
        return True

    def _fsync(self, _, descriptor):
        inode = self._held[descriptor][0]
        if isinstance(inode, Folder):
            inode.sync()
        else:
            inode.safe = len(inode.writes)
        return True

    def _rename(self, _, source, target, **__):
        inode = self._at(source)
        for path, becomes in ((target, inode), (source, None)):
            folder, name = self._find(path)
            folder.set(name, becomes)
        return True

    _replace = _rename

    def _unlink(self, _, path, **__):
        folder, name = self._find(path)
        folder.set(name, None)
        return True

    _remove = _rmdir = _unlink

    def _mkdir(self, _, path, *__):
        folder, name = self._find(path)
        if folder is None:
            return False
        folder.set(name, Folder())
        return True


def states(top, chooser):
    """Legal states of a folder tree: each a dictionary of paths and contents, None for an empty folder."""
    open_names, open_files = [], []
    pending, seen = [top], set()
    while pending:
        folder = pending.pop()
        for name, versions in folder.names.items():
            if len(versions) > 1:
                open_names.append((folder, name, versions))
            for inode in versions:
                if isinstance(inode, Folder):
                    pending.append(inode)
                elif inode is not None and inode not in seen and inode.safe < len(inode.writes):
                    seen.add(inode)
                    open_files.append(inode)
    fates = [list(itertools.product(("all", "none", "half", "zero"), repeat=_open_writes(file))) for file in open_files]
    choices = [list(range(len(versions))) for *_, versions in open_names] + fates
    if math.prod(map(len, choices)) <= EXHAUSTIVE:
        combinations = itertools.product(*choices)
    else:
        combinations = (tuple(chooser.choice(each) for each in choices) for _ in range(EXHAUSTIVE))
    for combination in combinations:
        names = {(folder, name): at for (folder, name, _), at in zip(open_names, combination, strict=False)}
        files = dict(zip(open_files, combination[len(open_names) :], strict=True))
        tree = {}
        _fill(tree, "", top, names, files)
        yield tree


def present(top):
    """The state that a running machine shows."""
    tree = {}
    _fill(tree, "", top, {}, _AllWritten())
    return tree


class _AllWritten:
    def get(self, file, _):
        return ("all",) * len(file.writes)


def _open_writes(file):
    count = len(file.writes) - file.safe
    assert count <= 8, "more writes than can be told apart without an fsync"
    return count


def _fill(tree, path, folder, names, files):
    shown = {name: versions[names.get((folder, name), -1)] for name, versions in folder.names.items()}
    for name, inode in shown.items():
        inner = f"{path}{name}"
        if isinstance(inode, Folder):
            tree[inner] = None
            _fill(tree, f"{inner}/", inode, names, files)
        elif inode is not None:
            tree[inner] = inode.data(files.get(inode, ()))


def write(tree, root):
    """Makes a folder that shows a state."""
    Path(root).mkdir(parents=True)
    for path, content in tree.items():
        if content is None:
            os.mkdir(f"{root}/{path}")
        else:
            with open(f"{root}/{path}", "wb") as file:
                file.write(content)


@contextlib.contextmanager
def recording(root, after):
    """Calls ``after(recorder)`` behind each operation below ``root`` that changes what a crash may leave."""
    recorder = Recorder(root, lambda _: after(recorder))
    with recorder:
        yield recorder
