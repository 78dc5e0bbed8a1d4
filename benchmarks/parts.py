"""Time of a call, split: seconds in some of the functions that it runs, by the clock.

::

    with Parts({"planning": ["package.module:Class.method"]}) as parts:
        save()
    parts.seconds  # {"planning": 0.002}

A function inside another one counts for itself alone, so that the parts add up. Only the thread that entered counts.
If many threads do the same, ``shares`` looks at them all every millisecond.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

#: Functions of our save of a full checkpoint.
OF_SAVE = {
    "planning": ["tiered_checkpoint_io.engine.save.saver:plan"],
    "taking a slot": ["tiered_checkpoint_io.engine.save.saver:PartSave.reserve"],
    "copying and hashing": ["tiered_checkpoint_io.engine.save.saver:PartSave.fill"],
    "hashing": ["tiered_checkpoint_io.formats.image:Image.hashes"],
    "committing": ["tiered_checkpoint_io.engine.save.saver:PartSave.seal"],
}
_DCP, _WRITER = "torch.distributed.checkpoint", "tiered_checkpoint_io.adapters.dcp_writer:TieredStorageWriter"
#: Functions of the call of an asynchronous sharded save.
OF_SHARDED = {
    "DCP's plans": [
        f"{_DCP}.default_planner:DefaultSavePlanner.{name}"
        for name in ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan")
    ],
    "DCP's exchanges": [
        f"{_DCP}.utils:_DistWrapper.{name}"
        for name in ("gather_object", "scatter_object", "broadcast_object", "all_gather_object")
    ],
    "beginning": [f"{_WRITER}.prepare_local_plan", f"{_WRITER}.prepare_global_plan"],
    "laying out": [f"{_WRITER}._write"],
    "taking a slot": ["tiered_checkpoint_io.engine.save.saver:PartSave.reserve"],
    "copying": ["tiered_checkpoint_io.engine.save.saver:PartSave.fill"],
    "committing": [f"{_WRITER}.finish"],
}
#: Functions of DCP's load by our reader.
OF_DCP_LOAD = {
    "finding it": ["tiered_checkpoint_io.adapters.dcp_reader:open_shards"],
    "reading and hashing": ["tiered_checkpoint_io.adapters.dcp_reader:PlanReader.read"],
}
#: Functions of a load of a full checkpoint, beside the copy into the parameters.
OF_LOAD = {
    "finding and hashing it": ["tiered_checkpoint_io.engine.checkpointer:restore"],
    "torch.load of the mapped file": ["tiered_checkpoint_io.engine.restore.restore:Restored.load"],
}


class Parts:
    """A context manager that times the functions of its names; a name that is gone is left out.

    Attributes:
        seconds: Seconds in each part since this was entered last; parts that did not run have 0.
    """

    def __init__(self, functions: Mapping[str, Sequence[str]]) -> None:
        self.seconds: dict[str, float] = {}
        self._functions = functions
        self._replaced: list[tuple[Any, str, Any]] = []
        self._inner: list[float] = []
        self._thread = 0

    def restart(self) -> None:
        """Begins at 0 again."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def __enter__(self) -> Parts:  # noqa: PYI034 - Self needs Python 3.11
        self.seconds, self._thread = {}, threading.get_ident()
        for part, paths in self._functions.items():
            for path in paths:
                owner, name = _owner_of(path)
                if owner is not None:
                    original = getattr(owner, name)
                    self.seconds[part] = 0.0
                    self._replaced.append((owner, name, original))
                    setattr(owner, name, self._timed(part, original))
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced.clear()

    def _timed(self, part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original, updated=())
        def timed(*arguments: Any, **options: Any) -> Any:
            if threading.get_ident() != self._thread:
                return original(*arguments, **options)
            self._inner.append(0.0)
            began = time.perf_counter()
            try:
                return original(*arguments, **options)
            finally:
                took = time.perf_counter() - began
                self.seconds[part] += took - self._inner.pop()
                if self._inner:
                    self._inner[-1] += took

        return timed


def _owner_of(path: str) -> tuple[Any, str]:
    """The module or class that has a function, and its name there; None if it is gone."""
    module, _, names = path.partition(":")
    *classes, name = names.split(".")
    try:
        owner = functools.reduce(getattr, classes, importlib.import_module(module))
        getattr(owner, name)
    except (ImportError, AttributeError):
        return None, name
    return owner, name


def medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median of each part over rounds."""
    return {part: statistics.median(each[part] for each in rounds) for part in rounds[0]} if rounds else {}


#: Work of an upload's threads, by the innermost known file on a thread's stack.
OF_UPLOAD = {
    "/ssl.py": "sending",
    "/http/client.py": "sending",
    "/socket.py": "sending",
    "/urllib3/": "urllib3",
    "/hashlib": "checksums",
    "/botocore/auth.py": "signing",
    "/botocore/httpchecksum.py": "checksums",
    "/botocore/": "botocore",
    "/boto3/": "botocore",
    "/tiered_checkpoint_io/": "ours",
}
_SAMPLE_S = 0.001
_IDLE = ("/threading.py", "/concurrent/futures/", "/queue.py", "/selectors.py")


@contextlib.contextmanager
def shares(known: Mapping[str, str]) -> Iterator[dict[str, float]]:
    """Yields the time share of each kind of work, by samples of all threads that are not waiting."""
    counts: Counter[str] = Counter()
    found: dict[str, float] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_SAMPLE_S):
            for thread, frame in sys._current_frames().items():
                if thread != threading.get_ident() and (kind := _kind_of(frame, known)):
                    counts[kind] += 1

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield found
    finally:
        ended.set()
        watcher.join()
        found.update({kind: count / sum(counts.values()) for kind, count in counts.most_common()})


def _kind_of(frame: FrameType | None, known: Mapping[str, str]) -> str:
    """Returns the kind of a thread's work; "" if it waits for others."""
    assert frame is not None
    if any(word in frame.f_code.co_filename for word in _IDLE):
        return ""
    while frame is not None:
        for word, kind in known.items():
            if word in frame.f_code.co_filename:
                return kind
        frame = frame.f_back
    return "others"
