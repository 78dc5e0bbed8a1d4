"""Runs a part of the package in a process of its own and kills it, SIGKILL, at its n-th effect.

As a program this is a *zygote*: it has imported everything, and forks one process for each order
that it reads, one JSON line each, so that hundreds of deaths cost no start of Python. An effect is a
change of the file system or of memory that is mapped from it, or a request to S3; the process dies after it, before it
learns of it, and for each write there is one more death in its middle. ``dying.py`` has the work of the processes.
"""

import contextlib
import ctypes
import functools
import gc
import io
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

TESTS = Path(__file__).parents[1]
#: A process that neither ends nor dies by then is a failure of its own.
PATIENCE_S = 60
_LINE = 20
_PR_SET_CHILD_SUBREAPER = 36


class Counter:
    """Counts and reports effects below some folders, and kills the process at the given one."""

    def __init__(self, role, kill_at, roots, report):
        self.role = role
        self.kill_at = kill_at
        self.roots = tuple(roots)
        self.report = report
        self.effects = []
        #: Current work, for the table.
        self.phase = role
        self._own_phase = threading.local()
        self._lock = threading.Lock()
        self._write = os.write

    @contextlib.contextmanager
    def during(self, phase, *, own_thread=False):
        """Labels effects of the block with ``phase``; with ``own_thread``, only those of this thread."""
        holder = self._own_phase if own_thread else self
        before = getattr(holder, "phase", None)
        holder.phase = phase
        try:
            yield
        finally:
            holder.phase = before

    def tell(self, **said):
        # In one write: two processes share the pipe.
        self._write(self.report, json.dumps({"role": self.role, **said}).encode() + b"\n")

    def counts(self, path):
        # The heartbeat's effects come by the clock; without them a run is the same every time.
        return path.startswith(self.roots) and threading.current_thread().name != "tiered-heartbeat"

    def effect(self, kind, path, half=None):
        if not self.counts(path):
            return
        with self._lock:
            effect = [getattr(self._own_phase, "phase", None) or self.phase, kind, path[-60:]]
            self.effects.append(effect)
            if len(self.effects) == self.kill_at:
                if half is not None:
                    half()
                self.tell(killed=effect)
                os.kill(os.getpid(), signal.SIGKILL)

    def tell_all(self):
        for start in range(0, len(self.effects), _LINE):
            self.tell(effects=self.effects[start : start + _LINE])


def _path_of(descriptor):
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
    except OSError:
        return ""


def _resolved(path, options):
    path = os.fspath(path)
    folder = options.get("dir_fd")
    return path if folder is None else f"{_path_of(folder)}/{path}"


class _Counted(io.BufferedWriter):
    """A file whose writes can be cut in the middle."""

    def __init__(self, descriptor, counter):
        super().__init__(io.FileIO(descriptor, "wb"))
        self._counter = counter

    def write(self, data):
        path = _path_of(self.fileno())

        def half():
            super(_Counted, self).write(data[: len(data) // 2])
            self.flush()

        self._counter.effect("write, half", path, half)
        count = super().write(data)
        self.flush()
        self._counter.effect("write", path)
        return count


def install(counter):
    """Counts effects of this process from now on."""

    def behind(name, kind, path_of):
        call = getattr(os, name)

        @functools.wraps(call)
        def counted(*args, **options):
            result = call(*args, **options)
            counter.effect(kind, path_of(args, options))
            return result

        setattr(os, name, counted)

    for name in ("rename", "replace"):
        behind(name, "rename", lambda args, options: os.fspath(args[1]))
    for name in ("unlink", "rmdir", "mkdir"):
        behind(name, name, lambda args, options: _resolved(args[0], options))
    for name, kind in (("fsync", "fsync"), ("ftruncate", "truncate"), ("posix_fallocate", "allocate")):
        behind(name, kind, lambda args, options: _path_of(args[0]))
    opens, writes, pwrites, fdopen, maps = os.open, os.write, os.pwrite, os.fdopen, mmap.mmap

    def open_counted(path, flags, *args, **options):
        new = flags & os.O_CREAT and not os.path.exists(path)
        descriptor = opens(path, flags, *args, **options)
        if new:
            counter.effect("create", _resolved(path, options))
        return descriptor

    def write_counted(descriptor, data):
        path = _path_of(descriptor)
        counter.effect("write, half", path, lambda: writes(descriptor, bytes(data)[: len(data) // 2]))
        count = writes(descriptor, data)
        counter.effect("write", path)
        return count

    def pwrite_counted(descriptor, data, offset):
        path = _path_of(descriptor)
        counter.effect("write, half", path, lambda: pwrites(descriptor, bytes(data)[: len(data) // 2], offset))
        count = pwrites(descriptor, data, offset)
        counter.effect("write", path)
        return count

    def fdopen_counted(descriptor, mode="r", *args, **options):
        if mode == "wb" and counter.counts(_path_of(descriptor)):
            return _Counted(descriptor, counter)
        return fdopen(descriptor, mode, *args, **options)

    def map_counted(descriptor, *args, **options):
        mapping = maps(descriptor, *args, **options)
        if descriptor >= 0:
            counter.effect("mmap", _path_of(descriptor))
        return mapping

    os.open, os.write, os.pwrite = open_counted, write_counted, pwrite_counted
    os.fdopen, mmap.mmap = fdopen_counted, map_counted

    from botocore.client import BaseClient

    request = BaseClient._make_api_call

    def request_counted(client, operation, arguments):
        answer = request(client, operation, arguments)
        counter.effect(f"s3 {operation}", f"{counter.roots[-1]}/{arguments.get('Key', '')}")
        return answer

    BaseClient._make_api_call = request_counted

    from tiered_checkpoint_io.stores.s3_client import Body

    read = Body.read

    def read_in_halves(body, size=-1):
        half = len(body._data) // 2
        if half and body._position == half:
            # The first half has gone out, or into the signature.
            counter.effect("s3 body, half", counter.roots[-1])
        elif half and body._position == 0:
            body._piece.release()
            body._piece = body._data[:half]
            body._position = half
            return body._piece
        return read(body, size)

    Body.read = read_in_halves


# ----------------------------------------------------------------------------------------- zygote
def child(order, report):
    from support import dying, pairs

    signal.alarm(PATIENCE_S)
    os.environ.update(order["env"])
    counter = Counter(order["role"], order["kill_at"], order["roots"], report)
    install(counter)
    try:
        answer = {**dying.ROLES, **pairs.ROLES}[order["role"]](order, counter)
        counter.tell(answer=answer)
    except BaseException:
        counter.tell(error=traceback.format_exc()[-3000:])
    counter.tell_all()
    os._exit(0)


def main():
    from support import dying, pairs

    dying.import_all()
    pairs.import_all()
    # A collection would otherwise copy each page of the modules into each child.
    gc.collect()
    gc.freeze()
    # Orphans of the processes are ours to reap.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for line in sys.stdin:
        order = json.loads(line)
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            child(order, write)
        os.close(write)
        with open(read, "rb") as report:
            # Until the last of them, a drain that outlives its trainer as well, has ended.
            said = [json.loads(each) for each in report.read().splitlines()]
        died_by = 0
        with contextlib.suppress(ChildProcessError):
            while True:
                ended, status = os.waitpid(-1, 0)
                if ended == pid:
                    died_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        print(json.dumps({"signal": died_by, "said": said}), flush=True)


@dataclass
class Run:
    """Result of one order.

    Attributes:
        killed: Effect at which each role died: the work, kind of effect, path.
        effects: All effects of each role that came to its end, likewise.
        done: Reports of the process about finished work, in order.
        answer: Answer of the role; None if it died.
    """

    killed: dict = field(default_factory=dict)
    effects: dict = field(default_factory=dict)
    done: list = field(default_factory=list)
    answer: object = None


class Zygote:
    """The test's end of it."""

    def __init__(self):
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        # Stories of lost peers report by themselves.
        env["TORCH_CPP_LOG_LEVEL"] = "FATAL"
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
        )

    def run(self, role, *, kill_at=0, **order):
        """Runs a role of ``dying.py`` to its end, or to its death as ordered."""
        env = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        self._process.stdin.write(json.dumps({"role": role, "kill_at": kill_at, "env": env, **order}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        run = Run()
        for each in answer["said"]:
            assert "error" not in each, f"{each['role']}: {each['error']}"
            if "killed" in each:
                run.killed[each["role"]] = each["killed"]
            elif "effects" in each:
                run.effects.setdefault(each["role"], []).extend(each["effects"])
            elif "done" in each:
                run.done.append(each["done"])
            elif each["role"] == role:
                run.answer = each["answer"]
        expected = signal.SIGKILL if role in run.killed else 0
        assert answer["signal"] == expected, f"{role} ended by signal {answer['signal']}"
        return run

    def close(self):
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS))
    main()
