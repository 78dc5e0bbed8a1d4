"""Clocks for tests: with bounds of seconds instead of minutes, or with a time that only the test moves."""

import contextlib
import random
import threading
import time
from dataclasses import replace

from tiered_checkpoint_io.clock import SYSTEM, Clock, Timing

#: Intervals of looks in tests: bounds stay as they are, and changes are seen sooner.
LOOKS = {"drain_rest_s": 0.01, "wait_poll_s": 0.005, "lock_poll_s": 0.005, "namespace_poll_s": 0.01}
LOOKS |= {"full_look_s": 0.1, "accept_poll_s": 0.01}
#: Interval of looks of a thread that waits by a virtual clock, if it is not woken.
_LOOK_S = 0.001


def quick(**seconds):
    """Returns a clock of real time with these bounds and intervals."""
    return Clock(Timing(**{**LOOKS, **seconds}))


def hurry(**seconds):
    """Sets other bounds of this process' own clock: for workers, whose sessions are made deep inside."""
    object.__setattr__(SYSTEM, "timing", replace(SYSTEM.timing, **seconds))


@contextlib.contextmanager
def hurried(**seconds):
    """Does :func:`hurry` within the block."""
    before = SYSTEM.timing
    hurry(**seconds)
    try:
        yield
    finally:
        object.__setattr__(SYSTEM, "timing", before)


class VirtualClock(Clock):
    """A time that only the test moves; waiting threads wake up at their time."""

    def __init__(self, **seconds):
        super().__init__(Timing(**seconds), random.Random(0))
        self.__dict__["now"] = 0.0
        #: Until when each thread waits, and for what.
        self.__dict__["_due"] = {}
        self.__dict__["_changed"] = threading.Condition()

    def wall(self):
        return self.now

    monotonic = since_boot = wall

    def sleep(self, seconds):
        self.wait(threading.Event(), seconds)

    def wait(self, event, seconds):
        me, due = threading.current_thread(), self.now + seconds
        self._note(me, (due, event))
        try:
            # Woken by the event, or when the time moves; looks in any case, for a wake-up between two looks.
            while not (came := event.wait(_LOOK_S)) and self.now < due:
                pass
        finally:
            self._note(me, None)
        return came

    def join(self, thread, seconds):
        end = self.now + seconds
        while thread.is_alive() and self.now < end:
            thread.join(_LOOK_S)

    def advance(self, seconds, *threads):
        """Moves the time, waking who is due on the way; returns once these threads wait again, or have ended."""
        end = self.now + seconds
        self._await_idle(threads)
        while (due := min((due for due, _ in list(self._due.values())), default=float("inf"))) <= end:
            self.__dict__["now"] = max(self.now, due)
            for until, event in list(self._due.values()):
                if until <= self.now and isinstance(event, threading.Event):
                    # Wakes it up without setting it.
                    with event._cond:
                        event._cond.notify_all()
            self._await_idle(threads)
        self.__dict__["now"] = end

    def _note(self, thread, what):
        with self._changed:
            if what is None:
                del self._due[thread]
            else:
                self._due[thread] = what
            self._changed.notify_all()

    def _await_idle(self, threads):
        deadline = time.monotonic() + 10
        while any(each.is_alive() and self._due.get(each, (-1.0,))[0] <= self.now for each in threads):
            assert time.monotonic() < deadline, "a thread neither waits nor ends"
            with self._changed:
                self._changed.wait(_LOOK_S)
