"""Which rights each request needs, and the IAM statements that grant them: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.s3_facts import NEEDS, Tried

#: What follows where an action is missing.
WITHOUT = {
    "s3:ListBucket": "restarts find no checkpoint, and a first save fails",
    "s3:PutObject": "nothing is uploaded",
    "s3:GetObject": "nothing can be restored, and no save is committed",
    "s3:DeleteObject": "old checkpoints are never removed, and no name can be overwritten",
    "s3:AbortMultipartUpload": "parts of uploads that broke off stay, and cost storage",
    "s3:ListMultipartUploadParts": "uploads in parts can't be taken up again, nor copies checked",
    "s3:ListBucketMultipartUploads": "uploads that dead processes left are never found, and cost storage",
    "s3:PutObjectAcl": "nothing is uploaded with this acl",
    "kms:GenerateDataKey": "nothing is uploaded that this key encrypts",
    "kms:Decrypt": "nothing can be restored that this key encrypts, nor uploaded in parts",
}
ON_BUCKET = ("s3:ListBucket", "s3:ListBucketMultipartUploads")
KMS = ("kms:GenerateDataKey", "kms:Decrypt")


def missing_actions(tries: Iterable[Tried], *, acl: bool, kms: bool) -> list[str]:
    """The actions that are missing, as far as refusals tell.

    A refused request that needs several actions is explained by those that are known to be missing; where none is, by
    those that no other request has shown to be there.

    Args:
        tries: What was tried.
        acl: Whether objects are written with an ACL, which needs a right of its own.
        kms: Whether a KMS key encrypts them.
    """
    ended = {each.request: each for each in tries}
    denied = [request for request in NEEDS if request in ended and ended[request].is_denied]
    alone = {request: actions[0] for request, actions in NEEDS.items() if len(actions) == 1}
    shown = {action for request, action in alone.items() if request in ended and not ended[request].failed}
    missing = list(dict.fromkeys(alone[request] for request in denied if request in alone))
    for request in denied:
        if not set(NEEDS[request]) & set(missing):
            missing += [action for action in NEEDS[request] if action not in shown]
    if "absent" in denied and not set(NEEDS["absent"]) & set(missing):
        missing.append("s3:ListBucket")
    if "s3:PutObject" in missing and acl:
        missing.append("s3:PutObjectAcl")
    if kms and {"s3:PutObject", "s3:GetObject"} & set(missing):
        missing += KMS
    return sorted(missing, key=list(WITHOUT).index)


def statements(url: str, region: str, actions: Sequence[str], kms_key: str = "") -> list[dict[str, Any]]:
    """IAM statements that allow these actions below an S3 URL; those of one resource are one statement.

    Args:
        url: ``s3://bucket/prefix``, or one of an access point.
        region: Of the bucket, which tells AWS's partition.
        actions: Of S3 and KMS.
        kms_key: The key's ARN; a placeholder stands where it is not known.
    """
    bucket, prefix = ids.parse_s3_url(url)
    partition = "aws-cn" if region.startswith("cn-") else "aws-us-gov" if region.startswith("us-gov-") else "aws"
    is_access_point = bucket.startswith("arn:")
    on_bucket = bucket if is_access_point else f"arn:{partition}:s3:::{bucket}"
    below = "/".join(filter(None, (on_bucket, "object" if is_access_point else "", prefix, "*")))
    key = kms_key if kms_key.startswith("arn:") else f"arn:{partition}:kms:REGION:ACCOUNT:key/{kms_key or 'KEY'}"
    kinds = {
        "TieredCheckpointBucket": (on_bucket, [each for each in actions if each in ON_BUCKET]),
        "TieredCheckpointObjects": (below, [each for each in actions if each not in ON_BUCKET and each not in KMS]),
        "TieredCheckpointKey": (key, [each for each in actions if each in KMS]),
    }
    return [
        {"Sid": sid, "Effect": "Allow", "Action": sorted(wanted), "Resource": resource}
        for sid, (resource, wanted) in kinds.items()
        if wanted
    ]


def policy(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A policy of these statements, ready to be pasted."""
    return {"Version": "2012-10-17", "Statement": list(found)}
