"""How a command that works for long is ended: by SIGTERM or Ctrl-C, and within a bound."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

from tiered_checkpoint_io.logs import Logger

#: How long the work may take to end after a signal, seconds: half of what containers are given before they are killed.
GRACE_S = 5.0
#: How long the last line may take, where nothing reads it.
_LAST_LINE_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
#: No signal's number.
_ENDED = 0
#: The status of what Ctrl-C has ended, as shells have it.
_INTERRUPTED = 128 + signal.SIGINT


class Stop(threading.Event):
    """Is set by the signal that ends the work.

    Attributes:
        is_interrupt: Whether that was Ctrl-C.
    """

    is_interrupt = False


@contextlib.contextmanager
def ended_by_signal(log: Logger, *, late: int) -> Iterator[Stop]:
    """Gives an event that is set by SIGTERM and SIGINT while the block runs.

    A block that does not end within ``GRACE_S`` of the signal, because a server does not answer, is not waited for:
    the process ends with the status ``late``, or 130 after Ctrl-C. So the next process must be able to continue from
    whatever the block leaves at any point, as after a kill.
    """
    stop, done = Stop(), threading.Event()
    reader, writer = os.pipe()
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
