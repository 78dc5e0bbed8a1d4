"""A storing S3 server on loopback for benchmarks: a process of its own that keeps bodies in memory and copies nothing.

Bodies are received straight into the pages of anonymous files, and sent from there by ``sendfile``; completed uploads
and server-side copies refer to the same pages, and pages of removed objects are used again. So what a benchmark sees is
its client, not the server. Signatures are not checked, ETags are no digests, and nothing is kept when it ends.

As a program it prints its URL and serves until its standard input is closed::

    python benchmarks/s3_server.py [--elsewhere] [CERTIFICATE]

With ``--elsewhere`` it has the lowest priority, as if it were on another machine: it takes no core from what else runs.
Benchmarks start it by ``s3_process.py``; what it holds is in ``s3_state.py``.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import io
import json
import os
import re
import socket
import ssl
import sys
import threading
import time
import urllib.parse
import urllib.request
from xml.sax.saxutils import escape, unescape

from s3_state import Entry, Pages, RefusedError, Request, Span, State, Upload

#: Keys of one answer to a listing.
#: Parameters of the first version of a listing; its pages go on after the last key.
_FIRST_LISTING = {"prefix", "delimiter", "max-keys", "marker", "encoding-type"}
_PAGE = 1000
#: Headers that a server keeps with an object, and gives back.
_KEPT = re.compile(r"x-amz-meta-.*|content-type$")


class Chunks(io.RawIOBase):
    """A body of ``Transfer-Encoding: chunked``, without the sizes: what botocore sends over TLS."""

    def __init__(self, file: io.BufferedReader) -> None:
        self._file, self._left, self._ended = file, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        if not self._left and not self._ended:
            self._left = int(self._file.readline().partition(b";")[0], 16)
            if not self._left:
                self._ended = True
                self._file.readline()
        if self._ended:
            return 0
        count = self._file.readinto(memoryview(buffer)[: self._left])
        self._left -= count
        if not self._left:
            self._file.readline()
        return count


class Handler(threading.Thread):
    """One connection."""

    def __init__(self, connection: socket.socket, state: State) -> None:
        super().__init__(daemon=True)
        self._socket, self._state = connection, state
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # Of a body, only what came with the head passes through this buffer.
        self._file = io.BufferedReader(connection.makefile("rb", buffering=0), 4096)

    def run(self) -> None:
        with contextlib.suppress(ConnectionError, ValueError), self._socket:
            while self._one():
                pass

    def _one(self) -> bool:
        line = self._file.readline()
        if not line:
            return False
        method, target, _ = line.decode().split(" ")
        request: dict[str, str] = {}
        while line := self._file.readline().strip():
            name, _, value = line.decode().partition(":")
            request[name.lower()] = value.strip()
        path, _, query = target.partition("?")
        bucket, _, key = urllib.parse.unquote(path[1:]).partition("/")
        arguments = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        if request.get("expect", "").lower() == "100-continue":
            self._socket.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._receive(request)
        if bucket == "-figures":
            self._answer(200, json.dumps(self._state.figures))
            return True
        self._state.count(body.size)
        try:
            if key:
                getattr(self, f"_do_{method.lower()}")(Request(bucket, key, arguments, request, body))
            else:
                self._bucket(method, bucket, arguments, body)
        except RefusedError as error:
            xml = "" if method == "HEAD" else f"<Error><Code>{error.code}</Code><Message>{error.code}</Message></Error>"
            self._answer(error.status, xml)
        return request.get("connection", "").lower() != "close"

    # --------------------------------------------------------------------------------------- bodies
    def _receive(self, request: dict[str, str]) -> Pages:
        """The body of a request; also where it is sent in pieces, each after its size, with checksums at the end."""
        is_chunked = request.get("x-amz-content-sha256", "").startswith("STREAMING-")
        size = int(request.get("x-amz-decoded-content-length" if is_chunked else "content-length", 0))
        pages, file = Pages(size), self._file
        if is_framed := request.get("transfer-encoding") == "chunked":
            file = io.BufferedReader(Chunks(file), 4096)
        with memoryview(pages.mapping) as view:
            if not is_chunked:
                self._fill(file, view[:size])
                return pages
            at = 0
            while length := int(file.readline().partition(b";")[0], 16):
                self._fill(file, view[at : at + length])
                file.readline()
                at += length
            while file.readline().strip():
                pass
        if is_framed:
            file.read()
        return pages

    @staticmethod
    def _fill(file: io.BufferedReader, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise ConnectionResetError
            done += count
        view.release()

    def _answer(self, status: int, body: str = "", headers: dict[str, str] | None = None, length: int = -1) -> None:
        data = body.encode()
        lines = [f"HTTP/1.1 {status} X", f"Date: {email.utils.formatdate(usegmt=True)}"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        lines += [f"Content-Length: {len(data) if length < 0 else length}", "", ""]
        self._socket.sendall("\r\n".join(lines).encode() + data)

    # -------------------------------------------------------------------------------------- objects
    def _do_head(self, asked: Request) -> None:
        self._send(asked, with_body=False)

    def _do_get(self, asked: Request) -> None:
        if "uploadId" not in asked.arguments:
            self._send(asked, with_body=True)
            return
        parts = "".join(
            f'<Part><PartNumber>{number}</PartNumber><ETag>"{part.etag}"</ETag><Size>{part.size}</Size></Part>'
            for number, part in sorted(self._state.upload(asked.arguments).parts.items())
        )
        self._answer(200, f"<ListPartsResult><IsTruncated>false</IsTruncated>{parts}</ListPartsResult>")

    def _send(self, asked: Request, *, with_body: bool) -> None:
        entry, request = self._state.entry(asked.bucket, asked.key), asked.headers
        if request.get("if-match", entry.etag).strip('"') != entry.etag:
            raise RefusedError(412, "PreconditionFailed")
        start, end, status, size = 0, entry.size, 200, entry.size
        headers = {"ETag": f'"{entry.etag}"', "Last-Modified": email.utils.formatdate(entry.modified, usegmt=True)}
        headers |= entry.headers
        if "range" in request:
            first, _, last = request["range"].partition("=")[2].partition("-")
            start = int(first) if first else max(0, size - int(last))
            end = min(size, int(last) + 1) if first and last else size
            if start >= size:
                raise RefusedError(416, "InvalidRange")
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{size}"
        self._answer(status, headers=headers, length=end - start)
        for pages, offset, length in entry.slice(start, end) if with_body else ():
            at, stop = offset, offset + length
            if isinstance(self._socket, ssl.SSLSocket):
                # What sendfile sends would not be encrypted.
                with memoryview(pages.mapping) as view:
                    self._socket.sendall(view[at:stop])
                continue
            while at < stop:
                at += os.sendfile(self._socket.fileno(), pages.descriptor, at, stop - at)

    def _do_put(self, asked: Request) -> None:
        state, arguments, request, body = self._state, asked.arguments, asked.headers, asked.body
        source = request.get("x-amz-copy-source")
        spans: list[Span] = [(body, 0, body.size)]
        kept = {name: value for name, value in request.items() if _KEPT.match(name)}
        if source is not None:
            path = urllib.parse.unquote(source.partition("?")[0]).lstrip("/")
            origin = state.entry(*path.split("/", 1))
            if request.get("x-amz-copy-source-if-match", origin.etag).strip('"') != origin.etag:
                raise RefusedError(412, "PreconditionFailed")
            span = re.fullmatch(r"bytes=(\d+)-(\d+)", request.get("x-amz-copy-source-range", ""))
            spans = origin.slice(int(span[1]), int(span[2]) + 1) if span else origin.spans
            kept = kept if request.get("x-amz-metadata-directive") == "REPLACE" else origin.headers
        entry = Entry(spans, state.number(), kept)
        if "uploadId" in arguments and source is not None:
            # Who copies a part compares its MD5; that of what is sent is not looked at, and would take time.
            entry.etag = md5_of(spans)
        if "uploadId" in arguments:
            state.upload(arguments).parts[int(arguments["partNumber"])] = entry
        else:
            state.put(asked, entry)
        if source is None:
            self._answer(200, headers={"ETag": f'"{entry.etag}"'})
            return
        kind = "CopyPartResult" if "uploadId" in arguments else "CopyObjectResult"
        xml = f'<{kind}><ETag>"{entry.etag}"</ETag><LastModified>{entry.date}</LastModified></{kind}>'
        self._answer(200, xml)

    def _do_post(self, asked: Request) -> None:
        state, bucket, key, arguments = self._state, asked.bucket, asked.key, asked.arguments
        body = asked.body
        if "uploads" in arguments:
            upload_id = state.number()
            kept = {name: value for name, value in asked.headers.items() if _KEPT.match(name)}
            state.uploads[upload_id] = Upload(bucket, key, kept)
            xml = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><UploadId>{upload_id}</UploadId>"
            self._answer(200, f"<InitiateMultipartUploadResult>{xml}</InitiateMultipartUploadResult>")
            return
        upload = state.upload(arguments)
        numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)<", body.mapping[: body.size])]
        if not numbers or any(number not in upload.parts for number in numbers):
            raise RefusedError(400, "InvalidPart")
        spans = [span for number in numbers for span in upload.parts[number].spans]
        entry = Entry(spans, f"{state.number()}-{len(numbers)}", upload.headers)
        state.put(asked, entry)
        state.uploads.pop(arguments["uploadId"], None)
        xml = f'<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key><ETag>"{entry.etag}"</ETag>'
        self._answer(200, f"<CompleteMultipartUploadResult>{xml}</CompleteMultipartUploadResult>")

    def _do_delete(self, asked: Request) -> None:
        state, bucket, key, arguments = self._state, asked.bucket, asked.key, asked.arguments
        if "uploadId" in arguments:
            state.upload(arguments)
            state.uploads.pop(arguments["uploadId"], None)
        else:
            with state.lock:
                found = state.objects.get((bucket, key))
                if found is not None and asked.headers.get("if-match", found.etag).strip('"') != found.etag:
                    raise RefusedError(412, "PreconditionFailed")
                state.objects.pop((bucket, key), None)
        self._answer(204)

    # -------------------------------------------------------------------------------------- buckets
    def _bucket(self, method: str, bucket: str, arguments: dict[str, str], body: Pages) -> None:
        state = self._state
        if method == "PUT":
            state.buckets.add(bucket)
            self._answer(200)
        elif bucket not in state.buckets:
            raise RefusedError(404, "NoSuchBucket")
        elif method == "POST" and "delete" in arguments:
            keys = [unescape(key.decode()) for key in re.findall(rb"<Key>(.*?)</Key>", body.mapping[: body.size])]
            with state.lock:
                for key in keys:
                    state.objects.pop((bucket, key), None)
            done = "".join(f"<Deleted><Key>{escape(key)}</Key></Deleted>" for key in keys)
            self._answer(200, f"<DeleteResult>{done}</DeleteResult>")
        elif method == "HEAD":
            self._answer(200)
        elif method == "GET" and "uploads" in arguments:
            self._answer(200, self._uploads(bucket, arguments.get("prefix", "")))
        elif method == "GET" and "location" in arguments:
            self._answer(200, "<LocationConstraint/>")
        elif method == "GET" and (arguments.get("list-type") == "2" or set(arguments) <= _FIRST_LISTING):
            self._answer(200, self._listing(bucket, arguments))
        else:
            raise RefusedError(501, "NotImplemented")

    def _uploads(self, bucket: str, prefix: str) -> str:
        found = "".join(
            f"<Upload><Key>{escape(upload.key)}</Key><UploadId>{name}</UploadId>"
            f"<Initiated>{time.strftime('%Y-%m-%dT%H:%M:%S.000Z', time.gmtime(upload.begun))}</Initiated></Upload>"
            for name, upload in list(self._state.uploads.items())
            if upload.bucket == bucket and upload.key.startswith(prefix)
        )
        return f"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated>{found}</ListMultipartUploadsResult>"

    def _listing(self, bucket: str, arguments: dict[str, str]) -> str:
        prefix, delimiter = arguments.get("prefix", ""), arguments.get("delimiter", "")
        after = arguments.get("continuation-token") or arguments.get("start-after") or arguments.get("marker", "")
        limit = min(int(arguments.get("max-keys", _PAGE)), _PAGE)
        with self._state.lock:
            entries = sorted(
                (k, e) for (b, k), e in self._state.objects.items() if b == bucket and k.startswith(prefix)
            )
        rows: dict[str, str] = {}
        is_cut = False
        for key, entry in entries:
            folder, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            name = prefix + folder + found if found else key
            if name <= after or name in rows:
                continue
            if len(rows) == limit:
                is_cut = True
                break
            rows[name] = (
                f"<CommonPrefixes><Prefix>{self._encoded(name, arguments)}</Prefix></CommonPrefixes>"
                if found
                else f"<Contents><Key>{self._encoded(key, arguments)}</Key><LastModified>{entry.date}</LastModified>"
                f'<ETag>"{entry.etag}"</ETag><Size>{entry.size}</Size></Contents>'
            )
        more = f"<NextContinuationToken>{escape(list(rows)[-1])}</NextContinuationToken>" if is_cut else ""
        encoding = "<EncodingType>url</EncodingType>" if "encoding-type" in arguments else ""
        head = f"<KeyCount>{len(rows)}</KeyCount><IsTruncated>{str(is_cut).lower()}</IsTruncated>{more}{encoding}"
        return f"<ListBucketResult>{head}{''.join(rows.values())}</ListBucketResult>"

    @staticmethod
    def _encoded(key: str, arguments: dict[str, str]) -> str:
        return urllib.parse.quote(key) if "encoding-type" in arguments else escape(key)


def md5_of(spans: list[Span]) -> str:
    found = hashlib.md5(usedforsecurity=False)
    for pages, offset, length in spans:
        with memoryview(pages.mapping) as view:
            found.update(view[offset : offset + length])
    return found.hexdigest()


def main() -> None:
    state = State()
    context: ssl.SSLContext | None = None
    options = sys.argv[1:]
    if "--elsewhere" in options:
        from tiered_checkpoint_io.engine.drain.process import give_way

        options.remove("--elsewhere")
        give_way(19)
    if options:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options[0])
    scheme = "https" if context else "http"
    with socket.create_server(("127.0.0.1", 0), backlog=256) as server:
        print(f"{scheme}://127.0.0.1:{server.getsockname()[1]}", flush=True)

        def accept() -> None:
            while True:
                connection = server.accept()[0]
                if context is None:
                    Handler(connection, state).start()
                    continue
                # The handshake is the handler's business: one that stays silent must not hold up others.
                wrapped = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                Handler(wrapped, state).start()

        threading.Thread(target=accept, daemon=True).start()
        sys.stdin.read()
        os._exit(0)


if __name__ == "__main__":
    main()
