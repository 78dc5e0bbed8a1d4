"""State of the benchmarks' storing S3 server: objects and uploads, as spans of pages of anonymous files."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import ClassVar

BUCKET = "bench"
#: Bytes of removed objects whose pages are kept for new ones.
_SPARE_BYTES = 2 << 30


class Pages:
    """Memory for a body: an anonymous file, mapped; given back once no object refers to it."""

    _spare: ClassVar[defaultdict[int, list[tuple[int, mmap.mmap]]]] = defaultdict(list)
    _spare_bytes = 0

    def __init__(self, size: int) -> None:
        self.size = size
        with contextlib.suppress(IndexError):
            self.descriptor, self.mapping = self._spare[size].pop()
            Pages._spare_bytes -= size
            return
        self.descriptor = os.memfd_create("s3")
        os.ftruncate(self.descriptor, max(size, 1))
        self.mapping = mmap.mmap(self.descriptor, max(size, 1))

    def __del__(self) -> None:
        if Pages._spare_bytes + self.size <= _SPARE_BYTES:
            Pages._spare_bytes += self.size
            self._spare[self.size].append((self.descriptor, self.mapping))
        else:
            self.mapping.close()
            os.close(self.descriptor)


Span = tuple[Pages, int, int]


@dataclass
class Entry:
    """An object, or a part of an upload: spans of pages (offset, length), one after the other."""

    spans: list[Span]
    etag: str
    headers: dict[str, str] = field(default_factory=dict)
    modified: float = field(default_factory=time.time)

    @property
    def size(self) -> int:
        return sum(length for _, _, length in self.spans)

    def slice(self, start: int, end: int) -> list[Span]:
        """The spans of the bytes from ``start`` up to ``end``."""
        found, at = [], 0
        for pages, offset, length in self.spans:
            low, high = max(start, at), min(end, at + length)
            if low < high:
                found.append((pages, offset + low - at, high - low))
            at += length
        return found

    @property
    def date(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(self.modified))


@dataclass
class Upload:
    """A multipart upload in progress."""

    bucket: str
    key: str
    headers: dict[str, str]
    parts: dict[int, Entry] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Request:
    """One request: header names in lower case."""

    bucket: str
    key: str
    arguments: dict[str, str]
    headers: dict[str, str]
    body: Pages


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


class State:
    """All that the server holds."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.buckets = {BUCKET}
        self.objects: dict[tuple[str, str], Entry] = {}
        self.uploads: dict[str, Upload] = {}
        self._counter = itertools.count(1)
        #: Requests answered and bytes of bodies received, as ``GET /-figures`` gives them.
        self.figures = {"requests": 0, "bytes": 0}

    def count(self, size: int) -> None:
        with self.lock:
            self.figures["requests"] += 1
            self.figures["bytes"] += size

    def number(self) -> str:
        return f"{next(self._counter):032x}"

    def entry(self, bucket: str, key: str) -> Entry:
        with self.lock:
            found = self.objects.get((bucket, key))
        if found is None:
            raise RefusedError(404, "NoSuchKey")
        return found

    def upload(self, arguments: dict[str, str]) -> Upload:
        with self.lock:
            found = self.uploads.get(arguments["uploadId"])
        if found is None:
            raise RefusedError(404, "NoSuchUpload")
        return found

    def put(self, asked: Request, entry: Entry) -> None:
        """Puts an object if its conditions hold."""
        bucket, key, request = asked.bucket, asked.key, asked.headers
        with self.lock:
            found = self.objects.get((bucket, key))
            wanted = request.get("if-match")
            if wanted is not None and (found is None or wanted.strip('"') != found.etag):
                raise RefusedError(412 if found else 404, "PreconditionFailed" if found else "NoSuchKey")
            if request.get("if-none-match") == "*" and found is not None:
                raise RefusedError(412, "PreconditionFailed")
            self.objects[bucket, key] = entry
