"""Runs that other processes are, which do as they are told."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

WORKER = Path(__file__).with_name("lease_worker.py")
ANSWER_S = 60.0
#: Beat, time to live, and poll of leases, seconds.
QUICK = (0.3, 1.5, 0.1)


class Run:
    """A process of :mod:`support.lease_worker`."""

    def __init__(self, dirpath, memory_dir, *, machine="", times=QUICK, **options):
        told = {"dirpath": dirpath, "memory_dir": memory_dir, "machine": machine, "times": times, **options}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
            env={name: value for name, value in os.environ.items() if name != "TIERED_CHECKPOINT_OWNER"},
        )
        self._told = queue.Queue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            self._told.put(line.strip())

    def ready(self):
        assert self._told.get(timeout=ANSWER_S) == "ready"
        return self

    def tell(self, line):
        self.process.stdin.write(line + "\n")

    def hear(self):
        return self._told.get(timeout=ANSWER_S)

    def do(self, line):
        self.tell(line)
        return self.hear()

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self):
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()

    def until(self, line, is_it, deadline_s):
        """Does a line again and again; gives the first answer that is it."""
        end = time.monotonic() + deadline_s
        while not is_it(answer := self.do(line)):
            assert time.monotonic() < end, answer
            time.sleep(0.05)
        return answer
