"""The drain as a process: its start by a trainer, its code, and its end by signals.

A trainer may run it as a thread instead, for stores that only one process sees.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tiered_checkpoint_io.engine.drain.status import LOG
from tiered_checkpoint_io.engine.drain.worker import Drain
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.logs import Logger, get_logger

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
    """Starts a drain over a memory tier's root, in this process' environment and folder.

    Relative paths of both mean what they mean here. The drain may find that another one works.
    """
    reap()
    # A folder put before the standard library would hide modules that this process has imported already.
    standard = os.path.dirname(os.__file__)
    first = standard, os.path.join(standard, "lib-dynload")
    path = sorted((each for each in sys.path if isinstance(each, str)), key=lambda each: each not in first)
    # In ASCII: a path may hold bytes that are no text.
    code = _CODE.format(path=ascii(path), place=ascii(str(_PLACE)), status=CANNOT_IMPORT)
    with _open_log(root, log) as file:
        child = subprocess.Popen(
            [sys.executable, "-c", code, *FOR_TRAINER, str(root)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            # Launchers kill the process group of their workers; the drain has work to finish.
            start_new_session=True,
        )
    _children.append(child)
    return child


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
