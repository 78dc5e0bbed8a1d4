"""Judges S3 requests by policies as AWS documents it, if moto does not: copies, keys of KMS, conditions, batches.

A plan for a FaultProxy; what it lets pass, the server behind it answers.
"""

import re
from fnmatch import fnmatchcase
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

from support.fault_proxy import refuse

DENIED = refuse(403, "AccessDenied")
_KMS = "x-amz-server-side-encryption"


def policy(rights):
    """Returns a policy that allows these actions on every bucket and key, and no others."""
    return {"Statement": [{"Effect": "Allow", "Action": sorted(rights), "Resource": "arn:aws:s3:::*"}]}


class Asked(NamedTuple):
    action: str
    resource: str
    context: tuple = ()


class Judge:
    """Lets pass what each of several documents allows: of the identity, of the bucket, of the endpoint.

    Attributes:
        used: All actions that were asked for.
    """

    def __init__(self, *documents, account="111122223333", region="us-east-1", role="trainer", key_arn=""):
        self.documents, self.used = documents, set()
        self.principal = f"arn:aws:iam::{account}:role/{role}"
        self.context = {"aws:PrincipalAccount": account, "kms:ViaService": f"s3.{region}.amazonaws.com"}
        self.key_arn = key_arn

    def plan(self, operation, number):
        return self.act

    def act(self, exchange):
        asked = self._needed(exchange)
        self.used |= {each.action for each in asked}
        if not all(map(self._allowed, asked)):
            DENIED(exchange)
            return
        status, headers, body = exchange.forward()
        reads = exchange.command in ("GET", "HEAD") and asked[0].action == "s3:GetObject"
        bucket = asked[0].resource.partition("/")[0]
        # Without the right to list, a missing object is not reported as missing; this is no list, and has no prefix.
        if reads and status == 404 and not self._allowed(Asked("s3:ListBucket", bucket)):
            DENIED(exchange)
            return
        if reads and {name.lower(): value for name, value in headers}.get(_KMS) == "aws:kms":
            self.used.add("kms:Decrypt")
            if not self._allowed(self._key("kms:Decrypt")):
                DENIED(exchange)
                return
        exchange.answer(status, body, headers)

    def _key(self, action):
        return Asked(action, self.key_arn)

    def _needed(self, exchange):
        """Returns the permissions that a request needs, as AWS documents them."""
        parts = urlsplit(exchange.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        on_bucket, on_object = f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/{key}"
        if exchange.command == "POST" and "delete" in query:
            keys = re.findall(rb"<Key>(.*?)</Key>", exchange.body)
            return [Asked("s3:DeleteObject", f"{on_bucket}/{each.decode()}") for each in keys]
        if not key:
            action = "s3:ListBucketMultipartUploads" if "uploads" in query else "s3:ListBucket"
            return [Asked(action, on_bucket, tuple(("s3:prefix", value) for value in query.get("prefix", ())))]
        if exchange.command == "DELETE":
            return [Asked("s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject", on_object)]
        if exchange.command in ("GET", "HEAD"):
            return [Asked("s3:ListMultipartUploadParts" if "uploadId" in query else "s3:GetObject", on_object)]
        asked = [Asked("s3:PutObject", on_object)]
        source = exchange.headers.get("x-amz-copy-source")
        if source:
            asked.append(Asked("s3:GetObject", f"arn:aws:s3:::{unquote(source).lstrip('/').partition('?')[0]}"))
        if exchange.headers.get(_KMS) == "aws:kms":
            asked.append(self._key("kms:GenerateDataKey"))
            asked += [self._key("kms:Decrypt")] if "uploads" in query or source else []
        return asked

    def _allowed(self, asked):
        context = {**self.context, **dict(asked.context)}
        judges = [document for document in self.documents if _speaks_of(document, asked)]
        return bool(judges) and all(self._by(document, asked, context) for document in judges)

    def _by(self, document, asked, context):
        found = [each["Effect"] for each in document["Statement"] if self._fits(each, asked, context)]
        return bool(found) and "Deny" not in found

    def _fits(self, statement, asked, context):
        principal = statement.get("Principal", "*")
        known = {"Effect", "Sid", "Action", "Resource", "Principal", "Condition"}
        assert set(statement) <= known, set(statement) - known
        return (
            (principal == "*" or self.principal in _listed(principal["AWS"]))
            and any(fnmatchcase(asked.action, each) for each in _listed(statement["Action"]))
            and any(fnmatchcase(asked.resource, each) for each in _listed(statement["Resource"]))
            and all(_holds(kind, tests, context) for kind, tests in statement.get("Condition", {}).items())
        )


def _speaks_of(document, asked):
    """Returns True if a policy is about the requested service: a key's policy is not about buckets, for one."""
    services = {action.partition(":")[0] for each in document["Statement"] for action in _listed(each["Action"])}
    return asked.action.partition(":")[0] in services


def _holds(kind, tests, context):
    matches = {"StringEquals": str.__eq__, "StringLike": fnmatchcase}[kind]
    return all(
        name in context and any(matches(context[name], each) for each in _listed(value))
        for name, value in tests.items()
    )


def _listed(value):
    return value if isinstance(value, list) else [value]
