"""Waits of tests: no longer than needed, and with patience for a busy machine."""

import time

PATIENCE_S = 60.0


def until(is_so, what="it is so", timeout_s=PATIENCE_S, poll_s=0.01):
    """Waits until a condition holds; returns its result."""
    end = time.monotonic() + timeout_s
    while not (found := is_so()):
        assert time.monotonic() < end, f"waited in vain: {what}"
        time.sleep(poll_s)
    return found
