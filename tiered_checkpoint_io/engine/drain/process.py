"""The drain as a process: its start by a trainer, its code, and its end by signals.

A trainer may run it as a thread instead, for stores that only one process sees.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tiered_checkpoint_io.clock import Clock
from tiered_checkpoint_io.engine.drain.queue import Queue
from tiered_checkpoint_io.engine.drain.serving import ask_to_serve
from tiered_checkpoint_io.engine.drain.status import LOG
from tiered_checkpoint_io.engine.drain.stores import CONFIG_FILE
from tiered_checkpoint_io.engine.drain.worker import LOCK_FILE, TRAINERS_FILE, Drain
from tiered_checkpoint_io.errors import DrainError, TieredCheckpointError
from tiered_checkpoint_io.logs import DebugOnly, Logger, get_logger
from tiered_checkpoint_io.memory.node import (
    MemoryFullError,
    is_locked,
    is_lost,
    release,
    share,
    try_lock,
    write_atomic,
    write_over,
)
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

#: The arguments of the command; the root is last.
FOR_TRAINER = ["drain", "--for-trainer", "--root"]
#: Exit status of a drain that can't import a module: another drain would fail, too.
CANNOT_IMPORT = 3
#: The drain runs its trainer's copy of this package, even if another is installed, and has its trainer's search path
#: for all other modules. The package is loaded by its path: its folder, put first, might hide the standard library.
_CODE = """\
# tiered_checkpoint_io drain, of a trainer
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
sys.path[:] = {path}
try:
    spec = PathFinder.find_spec("tiered_checkpoint_io", [{place}])
    if spec is None:
        raise ImportError("tiered_checkpoint_io is no longer at " + {place})
    sys.modules[spec.name] = package = module_from_spec(spec)
    spec.loader.exec_module(package)
    from tiered_checkpoint_io.__main__ import main
    main()
except ImportError as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr)
    sys.exit({status})
"""
#: Variables that name one file or folder, for access to S3 and for fsspec's packages.
_FILES = (
    "AWS_CA_BUNDLE",
    "AWS_CONFIG_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_LOGIN_CACHE_DIRECTORY",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "CURL_CA_BUNDLE",
    "FSSPEC_CONFIG_DIR",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "REQUESTS_CA_BUNDLE",
    "SSL_CERT_FILE",
)
#: Variables that list folders, of which an empty one is the current folder.
_FOLDERS = ("AWS_DATA_PATH", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "SSL_CERT_DIR")
#: Folder of this package.
_PLACE = Path(__file__).absolute().parents[3]
#: Drains that this process has started, and that may outlive their handle: reaped when they have ended.
_children: list[subprocess.Popen[bytes]] = []
#: Interval at which a waiting drain looks whether it is needed, seconds.
_STAND_BY_S = 1.0
#: Lower priority than the trainer's, by so much. If training fills all cores, the drain still gets a tenth of one.
_NICENESS = 10
#: Time for the work to end after a signal, seconds: half of the time that containers get before they are killed.
GRACE_S = 5.0
#: Time for the last line, if nothing reads it.
_LAST_LINE_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: No signal's number.
_ENDED = 0
#: Exit status after Ctrl-C, as shells have it.
_INTERRUPTED = 128 + signal.SIGINT


def start_process(root: Path, log: Logger) -> subprocess.Popen[bytes]:
    """Starts a drain over a memory tier's root, in this process' environment; it may find that another one works."""
    reap()
    # In ASCII: a path may hold bytes that are no text.
    code = _CODE.format(path=ascii(module_path()), place=ascii(str(_PLACE)), status=CANNOT_IMPORT)
    with _open_log(root, log) as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *FOR_TRAINER, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # Launchers kill the process group of their workers; the drain has work to finish.
            start_new_session=True,
            cwd="/",
            env=elsewhere(),
        )
    _children.append(child)
    return child


def elsewhere() -> dict[str, str]:
    """Returns this process' environment for one in another folder: relative paths are made absolute from here."""
    found = dict(os.environ)
    try:
        here = os.getcwd()
    except FileNotFoundError:
        # The folder is gone, and so are all paths relative to it.
        return found
    for name in _FILES:
        if found.get(name):
            found[name] = _from(here, found[name])
    for name in _FOLDERS:
        if found.get(name):
            found[name] = os.pathsep.join(_from(here, each) for each in found[name].split(os.pathsep))
    return found


def module_path() -> list[str]:
    """Returns the folders in which this process looks for modules, for a process in another folder."""
    found = [each for each in sys.path if isinstance(each, str)]
    with contextlib.suppress(FileNotFoundError):
        here = os.getcwd()
        # An entry that is no file or folder is an installer's own word, and stays one.
        found = [path if os.path.exists(path := os.path.join(here, each)) else each for each in found]
    # A folder put first would hide modules that this process has imported already.
    standard = os.path.dirname(os.__file__)
    return sorted(found, key=lambda each: each not in (standard, os.path.join(standard, "lib-dynload")))


def reap() -> None:
    """Forgets drains that have ended."""
    _children[:] = [child for child in _children if child.poll() is None]


def _open_log(root: Path, log: Logger) -> BinaryIO:
    path = root / LOG
    try:
        return open(path, "ab")
    except OSError as error:
        # No space for one more file: that must not keep the drain from its work.
        log.warning("the drain has no log: %s: %s", path, error.strerror)
        return open(os.devnull, "ab")


def _from(folder: str, path: str) -> str:
    # Values that boto3 expands are left to boto3.
    if os.path.isabs(os.path.expandvars(os.path.expanduser(path))):
        return path
    return os.path.join(folder, path) if path else folder


class DrainRunner:
    """The drain of a node, as one trainer starts and leaves it."""

    def __init__(self, root: Path, queue: Queue, config: TieredCheckpointConfig, logger: Logger, clock: Clock) -> None:
        self._root, self._queue = root, queue
        self._config = config
        self._log = logger
        self._clock = clock
        self._pid = os.getpid()
        self._trainer_lock: int | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None
        self._drain: Drain | None = None
        self._stop = threading.Event()
        self._spawned_at, self._respawn_wait = 0.0, clock.timing.respawn_s

    # ----------------------------------------------------------------------------------- life
    def start(self) -> None:
        """Announces this trainer, and makes sure that a drain runs; raises MemoryFullError if there is no space."""
        if self.is_foreign:
            return
        reap()
        if self._trainer_lock is not None and is_lost(self._trainer_lock):
            # Another process removed this memory: the drain needs new files.
            release(self._trainer_lock)
            self._trainer_lock = None
        if self._trainer_lock is None:
            self._queue.open()
            self._write_config()
            is_first = self._join()
            if is_first:
                # An earlier job may have asked for another address.
                ask_to_serve(self._root, "")
            if is_first and self._config.support.drain == "process":
                self._follow(self._queue.announced())
        self.ensure()

    def _join(self) -> bool:
        """Takes the trainers' lock; returns whether no other trainer has it. Raises DrainError if a drain keeps it."""
        path, timing = self._root / TRAINERS_FILE, self._clock.timing
        # A drain that looks whether a trainer lives has it for a moment.
        lock = try_lock(path, patience_s=timing.drain_lock_s, clock=self._clock)
        is_first = lock is not None
        if lock is None:
            lock = try_lock(path, shared=True, patience_s=timing.trainers_lock_s, clock=self._clock)
        else:
            share(lock)
        if lock is None:
            text = "a drain that should have ended still holds the trainers' lock"
            raise DrainError(text, operation="start", tier="memory", key=str(path))
        self._trainer_lock = lock
        return is_first

    def _follow(self, token: str) -> None:
        """Asks the drain of an earlier trainer, which may still work, to leave, and starts ours, which waits for it."""
        if token:
            # If there is no space to ask, that drain continues.
            with contextlib.suppress(MemoryFullError):
                self._queue.ask_to_leave(token)
            self._spawn()

    def _write_config(self) -> None:
        path, text = self._root / CONFIG_FILE, self._config.to_json().encode()
        if not path.exists() or path.read_bytes() != text:
            try:
                write_atomic(path, text)
            except MemoryFullError:
                if not path.exists():
                    raise
                # The file has a page of its own.
                write_over(path, text)

    def ensure(self) -> None:
        """Starts a drain if none runs; one that dies again and again is started ever more rarely."""
        if self.is_foreign or self.is_running:
            return
        now, timing = self._clock.monotonic(), self._clock.timing
        if self._spawned_at and now - self._spawned_at < self._respawn_wait:
            return
        if self._spawned_at:
            self._respawn_wait = min(timing.respawn_max_s, self._respawn_wait * 2)
        if self._child is not None or self._thread is not None:
            self._log.warning("the drain has ended; starting it again: %s", self.last_words())
        self._spawn()

    def _spawn(self) -> None:
        self._spawned_at = self._clock.monotonic()
        try:
            if self._config.support.drain != "thread":
                self._child = start_process(self._root, self._log)
                return
            self._stop = threading.Event()
            # The trainer logs outcomes: the drain's own messages would repeat them.
            quiet = DebugOnly(self._log, {})
            drain = Drain(self._root, logger=quiet, stop=self._stop, stay=True, clock=self._clock)
            self._thread = self._clock.start(functools.partial(self._run, drain), "tiered-drain")
            self._drain = drain
        except MemoryFullError:
            raise
        except OSError as error:
            # The system allows no more processes, threads or descriptors: no reason to take saves for failed.
            self._log.warning("the drain can't be started, so nothing is uploaded; to be tried again: %s", error)

    def _run(self, drain: Drain) -> None:
        try:
            drain.run()
        except Exception as error:
            # The next call that needs it starts it again.
            self._log.error("the drain has ended: %s", error)

    def leave(self, timeout_s: float) -> None:
        """Leaves the drain to itself; a thread is stopped within ``timeout_s``."""
        if self._thread is not None:
            self._stop.set()
            self._clock.join(self._thread, timeout_s)
            self._thread = self._drain = None
        if self._trainer_lock is not None:
            release(self._trainer_lock)
            self._trainer_lock = None
            self._queue.ring()
        # The next start reaps the process, or init, which adopts it when this process ends.
        self._child = None
        self._spawned_at = 0.0

    # ----------------------------------------------------------------------------------- state
    @property
    def is_foreign(self) -> bool:
        """True in a forked child (a DataLoader's worker): it has our memory, but not our role."""
        return os.getpid() != self._pid

    @property
    def is_announced(self) -> bool:
        """True if the drain knows of this trainer."""
        return self._trainer_lock is not None

    @property
    def is_thread(self) -> bool:
        """True if the drain is, or was, a thread of this process."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """True if a drain runs, of this process or another."""
        if self._thread is not None and self._thread.is_alive():
            return True
        if self._child is not None and self._child.poll() is None:
            return True
        return is_locked(self._root / LOCK_FILE)

    @property
    def has_worked(self) -> bool:
        """True if this process or an earlier one ever started a drain over this memory."""
        return (self._root / CONFIG_FILE).exists()

    @property
    def trouble(self) -> str:
        """See :attr:`DrainProgress.trouble`."""
        return self._drain.trouble if self._drain is not None else self._queue.progress().trouble

    @property
    def cannot_import(self) -> bool:
        """True if no drain runs because the last one started here can't import a module."""
        return self._child is not None and self._child.poll() == CANNOT_IMPORT and not self.is_running

    def last_words(self) -> str:
        """Returns the path of the drain's log, and its last line."""
        path, last = self._root / LOG, ""
        with contextlib.suppress(OSError):
            last = path.read_text(errors="replace").strip().rpartition("\n")[2]
        return f"{path} ends with: {last}" if last else f"see {path}"


def run(worker: Drain, root: Path, log: Logger, stop: threading.Event, *, stay: bool = False) -> bool:
    """Runs a drain, or waits while another one works; returns whether it had the root at first."""
    worked = worker.run()
    if not worked:
        stands_by = stay or worker.follows()
        log.info("another drain works on %s; %s", root, "standing by" if stands_by else "leaving")
        while (stay or worker.follows()) and not stop.wait(_STAND_BY_S) and not worker.run():
            pass
    return worked


def give_way(niceness: int) -> None:
    """Lowers this process' priority: other work on the node is to have the cores."""
    with contextlib.suppress(OSError):
        niceness = os.nice(niceness)
        if os.getsid(0) == os.getpid():
            # Linux may share the cores out among sessions first, by this, and go by niceness only within each.
            Path("/proc/self/autogroup").write_text(str(niceness))


def main() -> None:
    """Runs a trainer's drain on the root, the last argument; an error is one line on stderr, and status 1."""
    # Slurm signals all processes of a step: the trainer then saves its last checkpoint, uploaded here.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    give_way(_NICENESS)
    root = Path(sys.argv[-1])
    log = get_logger(root.name)
    try:
        with ended_by_signal(log, late=0) as stop:
            run(Drain(root, logger=log, stop=stop, for_trainer=True), root, log, stop)
    except (TieredCheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


class Stop(threading.Event):
    """Is set by the signal that ends the work, or as by SIGTERM; ``is_interrupt`` after Ctrl-C."""

    is_interrupt, writer = False, -1

    def set(self) -> None:
        super().set()
        os.write(self.writer, bytes([signal.SIGTERM]))


@contextlib.contextmanager
def ended_by_signal(log: Logger, *, late: int) -> Iterator[Stop]:
    """Yields an event that SIGTERM and SIGINT set while the block runs.

    If the block does not end within ``GRACE_S`` of the signal, the process ends with the status ``late``, or 130 after
    Ctrl-C: the next process continues as after a kill.
    """
    stop, done = Stop(), threading.Event()
    reader, writer = os.pipe()
    stop.writer = writer
    os.set_blocking(writer, False)

    def watch() -> None:
        while (number := os.read(reader, 1)[0]) not in _SIGNALS:
            if number == _ENDED:
                return
        stop.is_interrupt = number == signal.SIGINT
        stop.set()
        if not done.wait(GRACE_S):
            text = "the work has not ended within %.0f s of the signal: exiting; queued operations stay queued"
            last_line = threading.Thread(target=log.warning, args=(text, GRACE_S), daemon=True)
            last_line.start()
            last_line.join(_LAST_LINE_S)
            os._exit(_INTERRUPTED if stop.is_interrupt else late)

    thread = threading.Thread(target=watch, name="tiered-ending", daemon=True)
    # A handler runs in the main thread, between any two of its steps, and must not wait for a lock that this thread
    # holds, as that of an event: all that a signal does is to write its number.
    before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield stop
    finally:
        done.set()
        signal.set_wakeup_fd(fd_before)
        for number, handler in zip(_SIGNALS, before, strict=True):
            signal.signal(number, handler or signal.SIG_DFL)
        os.write(writer, bytes([_ENDED]))
        thread.join()
        os.close(writer)
        os.close(reader)
