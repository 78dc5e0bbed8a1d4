"""States that a file system may show after a crash: recorded operations on a folder, and every legal state.

The model is the weakest that POSIX allows a program to rely on:

* A file's data is there once an ``fsync`` of the file has returned. Of each later write, nothing, all, half, some of
  its sectors, or as many zero bytes may be there, independently of other writes; a new length is there, or not. Writes
  through a mapping count as writes of pages.
* A name in a folder (made, renamed, removed) is as the last operation left it once an ``fsync`` of the folder has
  returned. After that any of its later states may show, independently of other names: a rename is a new name in one
  folder and a removal in another, each lost or kept by itself. The switch of one name to another file is atomic.
* A folder whose own name was lost is lost with all that is in it.

The arguments of an operation are not used: after each call, the files are compared with those before it.
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
#: Calls after which the files are compared. Changes without a call, as through a mapping, are noticed at the next one.
MOMENTS = (
    *("open", "close", "write", "pwrite", "writev", "truncate", "ftruncate", "posix_fallocate", "sendfile"),
    *("copy_file_range", "rename", "replace", "link", "symlink", "unlink", "remove", "mkdir", "rmdir", "fsync"),
)
PAGE, SECTOR = 4096, 512
FATES = ("all", "none", "half", "zero")


@dataclass(eq=False)
class File:
    """An inode of a file: its writes and when they were made, how many of them an fsync has made safe; how it is now."""

    writes: list = field(default_factory=list)
    times: list = field(default_factory=list)
    safe: int = 0
    now: bytes = b""

    def data(self, fates):
        """Returns the content, given the fate of each unsafe write; without a fate, all of the write is there.

        A number says which sectors of a write are there, by its bits.
        """
        content = bytearray()
        fates = itertools.chain(["all"] * self.safe, fates)
        for (offset, data), fate in zip(self.writes, itertools.chain(fates, itertools.repeat("all")), strict=False):
            if fate == "none":
                continue
            if data is None:
                del content[offset:]
                content.extend(bytes(offset - len(content)))
                continue
            for start, piece in _pieces(data, fate):
                content.extend(bytes(max(0, offset + start + len(piece) - len(content))))
                content[offset + start : offset + start + len(piece)] = piece
        return bytes(content)

    def becomes(self, data, time):
        """Notes the writes that lead to this content; whether there were any."""
        if data == self.now:
            return False
        if len(data) < len(self.now):
            self.writes.append((len(data), None))
        old = self.now[: len(data)]
        length = len(old)
        for start in range(0, len(data), PAGE):
            page, before = data[start : start + PAGE], old[start : start + PAGE]
            if page != before + bytes(len(page) - len(before)):
                # A program that appends writes only new bytes.
                at = start + (len(before) if page.startswith(before) else 0)
                self.writes.append((at, data[at : start + PAGE]))
                length = max(length, start + len(page))
        if length != len(data):
            self.writes.append((len(data), None))
        self.now = data
        self.times += [time] * (len(self.writes) - len(self.times))
        return True


def _pieces(data, fate):
    if isinstance(fate, int):
        starts = range(0, len(data), SECTOR)
        return [(start, data[start : start + SECTOR]) for number, start in enumerate(starts) if fate >> number & 1]
    return [(0, {"all": data, "half": data[: len(data) // 2], "zero": bytes(len(data))}[fate])]


@dataclass(eq=False)
class Folder:
    """An inode of a folder: for each name what it was, the safe state first, None if it is not there; and since when."""

    names: dict = field(default_factory=dict)
    times: dict = field(default_factory=dict)

    def now(self, name):
        return self.names.get(name, [None])[-1]

    def set(self, name, inode, time):
        self.names.setdefault(name, [None]).append(inode)
        self.times.setdefault(name, [0]).append(time)

    def sync(self):
        self.names = {name: [states[-1]] for name, states in self.names.items() if states[-1] is not None}
        self.times = {name: [0] for name in self.names}


class Recorder:
    """Patches ``os`` while it is entered, and keeps the inodes below a folder as the operations leave them."""

    def __init__(self, root, after):
        self.root = os.path.abspath(root)
        self.top = Folder()
        self._after = after
        #: Number of changes found.
        self.time = 0
        #: Inodes by device and number; each has a descriptor for reads, which also reserves its number.
        self._inodes = {}
        self._lock = threading.RLock()
        self._originals = {}
        self._error = None

    def __enter__(self):
        self._originals = {name: getattr(os, name) for name in MOMENTS}
        for name in MOMENTS:
            setattr(os, name, self._wrap(name))
        return self

    def __exit__(self, *_):
        for name, original in self._originals.items():
            setattr(os, name, original)
        for _, descriptor in self._inodes.values():
            os.close(descriptor)
        if self._error is not None:
            raise self._error

    def _wrap(self, name):
        original = self._originals[name]

        def wrapped(first, *args, **options):
            with self._lock:
                if name == "fsync":
                    self._look()
                result = original(first, *args, **options)
                try:
                    if self._synced(first) if name == "fsync" else self._look():
                        self._after(self)
                except Exception as error:
                    # The caller may take it for an error of the call.
                    self._error = self._error or error
                return result

        return wrapped

    def _look(self):
        """Takes up what has changed; whether anything has."""
        self.time += 1
        try:
            changed = self._look_into(self.root, self.top)
        except FileNotFoundError:
            return False
        for inode, descriptor in self._inodes.values():
            # Files without a name as well: a crash may show them.
            if isinstance(inode, File):
                changed |= inode.becomes(os.pread(descriptor, os.fstat(descriptor).st_size, 0), self.time)
        self.time -= not changed
        return changed

    def _look_into(self, path, folder):
        with os.scandir(path) as entries:
            found = {entry.name: self._inode(entry) for entry in entries}
        changed = False
        for name in {*folder.names, *found}:
            if folder.now(name) is not found.get(name):
                folder.set(name, found.get(name), self.time)
                changed = True
        for name, inode in found.items():
            if isinstance(inode, Folder):
                changed |= self._look_into(f"{path}/{name}", inode)
        return changed

    def _inode(self, entry):
        facts = entry.stat(follow_symlinks=False)
        assert entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False), "a link is not in the model"
        key = facts.st_dev, facts.st_ino
        if key not in self._inodes:
            descriptor = self._originals["open"](entry.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            self._inodes[key] = (File() if entry.is_file() else Folder(), descriptor)
        return self._inodes[key][0]

    def _synced(self, descriptor):
        facts = os.fstat(descriptor)
        inode, _ = self._inodes.get((facts.st_dev, facts.st_ino), (None, None))
        if isinstance(inode, Folder):
            inode.sync()
        elif inode is not None:
            inode.safe = len(inode.writes)
        elif os.path.exists(self.root) and os.path.samestat(facts, os.stat(self.root)):
            self.top.sync()
            return True
        return inode is not None


def states(recorder, chooser, draws=EXHAUSTIVE):
    """Returns legal states of the recorded operations: dictionaries of paths and contents, None for an empty folder.

    All of them if they are few; or else so many draws.
    """
    open_names, open_files, top = [], [], recorder.top
    pending, seen = [top], set()
    while pending:
        folder = pending.pop()
        for name, versions in folder.names.items():
            if len(versions) > 1:
                open_names.append((folder, name, versions))
            for inode in versions:
                if inode is None or inode in seen:
                    continue
                seen.add(inode)
                if isinstance(inode, Folder):
                    pending.append(inode)
                elif inode.safe < len(inode.writes):
                    open_files.append(inode)
    count = math.prod([*(len(versions) for *_, versions in open_names), *(4 ** _unsafe(file) for file in open_files)])
    if count <= EXHAUSTIVE:
        choices = [list(range(len(versions))) for *_, versions in open_names]
        choices += [list(itertools.product(FATES, repeat=_unsafe(file))) for file in open_files]
        combinations = itertools.product(*choices)
    else:
        combinations = (_drawn(open_names, open_files, chooser, recorder.time) for _ in range(draws))
    for combination in combinations:
        names = {(folder, name): at for (folder, name, _), at in zip(open_names, combination, strict=False)}
        files = dict(zip(open_files, combination[len(open_names) :], strict=True))
        tree = {}
        _fill(tree, "", top, names, files)
        yield tree


def _drawn(open_names, open_files, chooser, now):
    """Returns a combination: the system has written all by itself until some time; since then, anything.

    Or it has written all data, and not all names; or all names, and not all data.
    """
    until, whole = now - chooser.randint(0, min(now, chooser.choice((3, 10, 40, now)))), chooser.randrange(3)
    drawn = []
    for folder, name, versions in open_names:
        first = len(versions) - 1 if whole == 1 else sum(time <= until for time in folder.times[name]) - 1
        drawn.append(chooser.randrange(first, len(versions)))
    for file in open_files:
        written = sum(time <= until for time in file.times) if whole != 2 else len(file.times)
        written = max(0, written - file.safe)
        fates = ["all"] * written
        for _ in range(_unsafe(file) - written):
            fate = chooser.choice((*FATES, "torn"))
            fates.append(chooser.getrandbits(PAGE // SECTOR) if fate == "torn" else fate)
        drawn.append(fates)
    return tuple(drawn)


def present(top):
    """Returns the state that a running machine shows."""
    tree = {}
    _fill(tree, "", top, {}, {})
    return tree


def _unsafe(file):
    return len(file.writes) - file.safe


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
    """Makes a folder, private as all in it, that shows a state."""
    os.makedirs(root, 0o700)
    for path, content in tree.items():
        if content is None:
            os.mkdir(f"{root}/{path}", 0o700)
        else:
            with open(f"{root}/{path}", "wb") as file:
                file.write(content)


def read(root):
    """Returns the state that a folder shows."""
    found = {}
    for path in Path(root).rglob("*"):
        found[str(path.relative_to(root))] = path.read_bytes() if path.is_file() else None
    return found


@contextlib.contextmanager
def recording(root, after):
    """Calls ``after(recorder)`` behind each operation below ``root`` that changes what a crash may leave."""
    with Recorder(root, after) as recorder:
        yield recorder
