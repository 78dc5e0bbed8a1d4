"""Runs a user's command for a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from datetime import datetime, timezone

from tiered_checkpoint_io.cli.documents import Ran
from tiered_checkpoint_io.cli.output import printable, say, write_json
from tiered_checkpoint_io.inventory.record import CheckpointInfo, iso

#: How long a command has to end after SIGTERM, before it is killed, seconds: a container is killed after ten, mostly.
GRACE_S = 5.0
_STDERR = 2
_PREFIX = "TIERED_CKPT_"


class CommandLine:
    """A command for a shell, run for one checkpoint at a time.

    Attributes:
        failed: How often it failed.
    """

    def __init__(self, command: str, *, as_json: bool) -> None:
        """Takes the command; with ``as_json`` its output goes to stderr, and what became of it to stdout."""
        self._command = command
        self._as_json = as_json
        self.failed = 0

    def run(self, each: CheckpointInfo) -> None:
        """Runs it, and waits for its end; where this is interrupted, the command and what it started are ended."""
        began = time.monotonic()
        process = subprocess.Popen(
            ["/bin/sh", "-c", self._command, "tiered-ckpt", each.url],
            env={**os.environ, **variables(each)},
            stdin=subprocess.DEVNULL,
            stdout=_STDERR if self._as_json else None,
            # Ctrl-C at a terminal is for us, who tell it on.
            start_new_session=True,
        )
        try:
            status = process.wait()
        except BaseException:
            _end(process)
            raise
        if status:
            self.failed += 1
            how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
            say(printable(f"error: the command for {each.name} {how}"), err=True)
        if self._as_json:
            lasted = round(time.monotonic() - began, 3)
            write_json("watch", Ran("ran", datetime.now(timezone.utc), each, status, lasted))


def variables(each: CheckpointInfo) -> dict[str, str]:
    """What a command finds in its environment of a checkpoint; "" for what is not known."""
    facts = {
        "URL": each.url,
        "NAME": each.name,
        "DIRPATH": each.dirpath,
        "SAVE_ID": each.save_id,
        "STEP": each.step,
        "EPOCH": each.epoch,
        "KIND": each.kind,
        "SIZE_BYTES": each.size_bytes,
        "CREATED": iso(each.created),
        "METRIC_NAME": each.metric.monitor if each.metric is not None else None,
        "METRIC_VALUE": repr(each.metric.value) if each.metric is not None else None,
    }
    return {_PREFIX + what: "" if value is None else str(value) for what, value in facts.items()}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a command with all that it started, within ``GRACE_S``."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
