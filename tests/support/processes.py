"""The command line as a process of its own."""

import os
import signal
import subprocess
import sys

#: For a process on a busy machine.
PATIENCE_S = 120
KEYS = {"AWS_EC2_METADATA_DISABLED": "true"}


def start(*arguments, run=("-m", "tiered_checkpoint_io"), env=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    line = [sys.executable, *run, *arguments]
    environment = {**os.environ, **KEYS, "COLUMNS": "80", **dict(env)}
    return subprocess.Popen(line, env=environment, preexec_fn=at_a_terminal, **options)  # noqa: PLW1509 - one call


def at_a_terminal():
    """Lets Ctrl-C reach the process, although a shell may run the tests in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process):
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    return process.returncode, out, err
