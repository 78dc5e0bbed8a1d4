"""Runs in other processes, which carry out commands: see :mod:`support.lease_worker`."""

import contextlib
import json
import os
import signal
import socket
import tempfile
import time
from pathlib import Path

from support.launch import zygote

WORKER = Path(__file__).with_name("lease_worker.py")
ANSWER_S = 60.0
QUICK = {"lease_beat_s": 0.3, "lease_ttl_s": 1.5, "lease_poll_s": 0.1, "namespace_wait_s": 0.5}


@contextlib.contextmanager
def runner():
    """Starts a process from which runs are forked; yields its address, the first argument of :class:`Run`."""
    with tempfile.TemporaryDirectory() as folder:
        path, log = f"{folder}/runs", Path(folder, "log.txt")
        process = zygote().start(WORKER, path, environment=dict(os.environ), out=log).started()
        try:
            end = time.monotonic() + ANSWER_S
            while "ready\n" not in log.read_text():
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.02)
            yield path
        finally:
            process.kill()


class Run:
    """A run on a dirpath."""

    def __init__(self, path, dirpath, memory_dir, *, times=QUICK, env=(), **options):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(ANSWER_S)
        self._socket.connect(path)
        self._lines = self._socket.makefile("rw")
        env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")} | dict(env)
        job = {"dirpath": dirpath, "memory_dir": memory_dir, "times": times, "env": env}
        self.pid = int(self.do(json.dumps({**job, **options})))

    def tell(self, line):
        self._lines.write(line + "\n")
        self._lines.flush()

    def hear(self):
        return self._lines.readline().strip()

    def do(self, line):
        self.tell(line)
        return self.hear()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self):
        self.kill()
        self._lines.close()
        self._socket.close()

    def until(self, line, is_it, deadline_s):
        """Does a line again and again; returns the first such answer."""
        end = time.monotonic() + deadline_s
        while not is_it(answer := self.do(line)):
            assert time.monotonic() < end, answer
            time.sleep(0.05)
        return answer
