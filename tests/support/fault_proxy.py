"""An S3 server's bad days: a proxy that counts requests, and spoils some of them by a plan."""

import base64
import contextlib
import hashlib
import http.client
import re
import socket
import struct
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import unescape


def refuse(status, code, **fields):
    """Answers in the server's place."""

    def act(exchange):
        extra = "".join(f"<{name}>{value}</{name}>" for name, value in fields.items())
        exchange.answer(status, f"<Error><Code>{code}</Code><Message>m</Message>{extra}</Error>".encode())

    return act


SLOW_DOWN = refuse(503, "SlowDown")


def when(is_so, fault):
    """Returns ``fault`` for the requests that match."""
    return lambda exchange: fault(exchange) if is_so(exchange) else exchange.pass_on()


def in_region(region):
    """Returns S3's documented answer to a signature for a wrong region; not all servers name the right one."""
    wrong = refuse(400, "AuthorizationHeaderMalformed")

    def is_elsewhere(exchange):
        return exchange.headers["Authorization"].partition("Credential=")[2].split("/")[2] != region

    return lambda *_: when(is_elsewhere, wrong)


def reset(exchange):
    """Cuts the connection before the server sees anything."""
    exchange.cut()


def lose_answer(exchange):
    """Passes the request on, and loses the answer."""
    exchange.forward()
    exchange.cut()


def answered_by_another(body):
    """Returns a fault: another program than the server answers with a success, such as a sign-in page."""
    return lambda exchange: exchange.answer(200, body, [("Content-Type", "text/html")])


def lost_by_another(exchange):
    """Answers any request as a gateway that has lost its way to the server does."""
    exchange.answer(404, b"default backend - 404", [("Content-Type", "text/plain; charset=utf-8")])


def object_lock(exchange):
    """Answers as S3 does for a bucket with Object Lock: a body without a checksum, or a wrong one, is refused."""
    digest = base64.b64encode(hashlib.md5(exchange.body).digest()).decode()
    when(lambda it: it.headers.get("Content-MD5") != digest, refuse(400, "InvalidRequest"))(exchange)


def directory_bucket(exchange):
    """Answers as a bucket of S3 Express does: it has a session for each client, and lists only whole folders."""
    query = parse_qs(urlsplit(exchange.path).query, keep_blank_values=True)
    prefix = query.get("prefix", [""])[0]
    if "session" in query:
        keys = "<AccessKeyId>a</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken>"
        facts = f"<Credentials>{keys}<Expiration>2099-01-01T00:00:00Z</Expiration></Credentials>"
        exchange.answer(200, f"<CreateSessionResult>{facts}</CreateSessionResult>".encode())
    elif "start-after" in query or (prefix and not prefix.endswith("/")):
        refuse(400, "InvalidArgument")(exchange)
    else:
        exchange.pass_on()


def locked(client, bucket, *ends):
    """Returns a plan: deletes of objects whose keys end so are refused, as by a policy; ``plan.asked`` counts."""
    asked = Counter()

    def held(key):
        asked.update(end for end in ends if key.endswith(end))
        return key.endswith(ends)

    one = when(lambda exchange: held(unquote(urlsplit(exchange.path).path)), refuse(403, "AccessDenied"))

    def many(exchange):
        errors = ""
        for key in re.findall("<Key>(.*?)</Key>", exchange.body.decode()):
            if held(unescape(key)):
                errors += f"<Error><Key>{key}</Key><Code>AccessDenied</Code></Error>"
            else:
                client.delete_object(Bucket=bucket, Key=unescape(key))
        exchange.answer(200, f"<DeleteResult>{errors}</DeleteResult>".encode())

    def plan(operation, *_):
        return {"delete": one, "post": many}.get(operation)

    plan.asked = asked
    return plan


def short_pages(count):
    """Lists of so many entries at most, which say that there are more, but without a marker for the next page."""

    def place(entry):
        return unquote(re.search(rb"<(?:Key|Prefix)>(.*?)<|$", entry)[1] or b"")

    def act(exchange):
        _, headers, body = exchange.forward()
        entries = re.findall(rb"(?s)<(?:Contents|CommonPrefixes|Part)>.*?</(?:Contents|CommonPrefixes|Part)>", body)
        for entry in sorted(entries, key=place)[count:]:
            body = body.replace(entry, b"")
        body = re.sub(rb"<IsTruncated>\w*</IsTruncated>|<(Next\w+)>.*?</\1>", b"", body)
        if len(entries) > count:
            body = re.sub(rb"(</List\w+Result>)", rb"<IsTruncated>true</IsTruncated>\1", body)
        exchange.answer(200, body, headers)

    return act


def truncate(count):
    """Returns a fault: only the answer's head, and so many bytes of its body."""

    def act(exchange):
        status, headers, body = exchange.forward()
        exchange.answer(status, body, headers, send=count)
        exchange.cut()

    return act


def late(seconds):
    """Answers, but only after a while."""

    def act(exchange):
        exchange.owner.closing.wait(seconds)
        exchange.pass_on()

    return act


def stall(exchange):
    """Takes the request, and never says a word; until the proxy is closed."""
    exchange.owner.closing.wait()
    exchange.cut()


def wrong_bytes(exchange):
    """Returns the right answer, except one bit of its body."""
    status, headers, body = exchange.forward()
    body = bytearray(body)
    if body:
        body[len(body) // 2] ^= 1
    exchange.answer(status, bytes(body), headers)


def where(fault, *, operation=None, key="", part=None, calls=None):
    """Returns a plan: ``fault`` for the requests that match.

    Args:
        fault: Fault for these requests.
        operation: As :func:`operation_of` names it; any by default.
        key: Text that the request's path holds.
        part: The number of a part of an upload.
        calls: Numbers, from 1, among the requests that match all else; all by default.
    """
    lock, matched = threading.Lock(), Counter()

    def plan(name, _, path):
        query = parse_qs(urlsplit(path).query)
        if operation not in (None, name) or key not in urlsplit(path).path:
            return None
        if part is not None and query.get("partNumber") != [str(part)]:
            return None
        with lock:
            matched["calls"] += 1
            return fault if calls is None or matched["calls"] in calls else None

    plan.takes_path = True
    return plan


class FaultProxy:
    """A proxy of an S3 server.

    ``plan(operation, number)`` is called at each request, with its number among the requests of its operation, from 1;
    its result is done to the request, and None lets it pass. Plans of :func:`where` are asked with the path as well.
    """

    def __init__(self, endpoint, plan=lambda operation, number: None, port=0):
        self.target = urlsplit(endpoint)
        self.plan = plan
        self.counts = Counter()
        self.lock = threading.Lock()
        #: Method and path of each request.
        self.requests = []
        #: Number of opened connections.
        self.connections = 0
        #: Set at the end, so that nothing that is held up outlives the proxy.
        self.closing = threading.Event()
        proxy = self

        class Handler(Exchange):
            owner = proxy

        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.server.daemon_threads = True
        self.endpoint_url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.closing.set()
        self.server.shutdown()
        self.thread.join(10)
        self.server.server_close()

    def count(self, method, text):
        """Returns the number of requests of a method whose path holds ``text``."""
        return sum(1 for each, path in self.requests if each == method and text in path)

    def fault_for(self, operation, path):
        with self.lock:
            self.counts[operation] += 1
            asked = (operation, self.counts[operation])
            return self.plan(*asked, path) if getattr(self.plan, "takes_path", False) else self.plan(*asked)


class Exchange(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30

    def setup(self):
        with self.owner.lock:
            self.owner.connections += 1
        super().setup()

    def handle_any(self):
        self.owner.requests.append((self.command, self.path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.owner.fault_for(operation_of(self.command, self.path), self.path)
        (fault or Exchange.pass_on)(self)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

    def forward(self):
        target = self.owner.target
        with contextlib.closing(http.client.HTTPConnection(target.hostname, target.port, timeout=30)) as upstream:
            # The signature covers the Host that the client named.
            upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in ("expect", "connection"):
                    upstream.putheader(name, value)
            upstream.endheaders(self.body or None)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def pass_on(self):
        """Has the server answer."""
        status, headers, body = self.forward()
        self.answer(status, body, headers)

    def answer(self, status, body, headers=(), send=None):
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length" and self.command == "HEAD":
                length = value
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:send])

    def cut(self):
        self.wfile.flush()
        # Closed with a reset, as by a dying server or a dropped NAT entry.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, *_):
        pass


def operation_of(method, path):
    query = parse_qs(urlsplit(path).query, keep_blank_values=True)
    if "uploadId" in query:
        return {"PUT": "part", "POST": "complete", "DELETE": "abort", "GET": "list_parts"}[method]
    if "uploads" in query:
        return "create" if method == "POST" else "list_uploads"
    if "list-type" in query:
        return "list"
    return {"GET": "get", "PUT": "put", "HEAD": "head", "DELETE": "delete", "POST": "post"}[method]
