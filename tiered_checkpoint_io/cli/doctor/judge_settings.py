"""What a bucket's owner has set, and what that does to checkpoints: pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_checkpoint_io.cli.doctor.facts import Check
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.stores.s3_facts import Settings

#: Objects of these classes have to be restored before they can be read, which takes hours.
_UNREADABLE = ("GLACIER", "DEEP_ARCHIVE")
_RULE = "set a lifecycle rule below dirpath with {}, such as the project's deploy/lifecycle.json"


def judge_settings(settings: Settings, url: str) -> list[Check]:
    """The checks of a bucket's lifecycle, versions and Object Lock."""
    prefix = ids.parse_s3_url(url)[1].strip("/")
    prefix += "/" if prefix else ""
    checks: list[Check] = []
    if settings.unread:
        measured = f"may not be read: {', '.join(settings.unread)}"
        do = "with the rights in deploy/iam/doctor.json, check that no rule deletes objects below dirpath"
        checks.append(Check("durable", "warn", "bucket settings", measured, do))
    if "s3:GetLifecycleConfiguration" not in settings.unread:
        checks += _lifecycle(settings, prefix)
    if "s3:GetBucketVersioning" not in settings.unread:
        checks += _versions(settings, prefix)
    if settings.locked_days:
        measured = f"new objects are kept for {settings.locked_days} days: deleted and overwritten ones cost as long"
        do = "shorten the bucket's default retention, or use a bucket without"
        checks.append(Check("durable", "warn", "Object Lock", measured, do))
    return checks


def _lifecycle(settings: Settings, prefix: str) -> list[Check]:
    checks: list[Check] = []
    for rule in settings.rules:
        if not _touches(rule, prefix):
            continue
        name, below = rule.get("ID") or "without a name", _prefix_of(rule) or "all of the bucket"
        expires = rule.get("Expiration", {})
        when = f"{expires['Days']} days" if "Days" in expires else str(expires.get("Date", ""))
        if when:
            do = f"have the rule leave out {prefix or 'this bucket'}: checkpoints are deleted by save_top_k alone"
            measured = f"rule {name!r} deletes objects below {below} after {when}: checkpoints become incomplete"
            checks.append(Check("durable", "fail", "lifecycle", measured, do))
        archived = [each for each in rule.get("Transitions", ()) if each.get("StorageClass") in _UNREADABLE]
        if archived:
            measured = (
                f"rule {name!r} moves objects below {below} to {archived[0]['StorageClass']}: no restart can read them"
            )
            do = "use GLACIER_IR, or leave this prefix out"
            checks.append(Check("durable", "fail", "lifecycle", measured, do))
    if not any("AbortIncompleteMultipartUpload" in rule for rule in _covering(settings, prefix)):
        measured = "no rule aborts unfinished uploads: what dead nodes leave costs storage for ever"
        checks.append(Check("durable", "warn", "lifecycle", measured, _RULE.format("AbortIncompleteMultipartUpload")))
    return checks or [
        Check("durable", "ok", "lifecycle", "no rule deletes checkpoints; unfinished uploads are aborted")
    ]


def _versions(settings: Settings, prefix: str) -> list[Check]:
    if settings.versioning != "Enabled":
        return [Check("durable", "ok", "versions", "none are kept")]
    if any("NoncurrentVersionExpiration" in rule for rule in _covering(settings, prefix)):
        return [Check("durable", "ok", "versions", "kept, and noncurrent ones expire")]
    measured = "kept for ever: each deleted checkpoint, and a lease an hour for each run, goes on costing storage"
    return [Check("durable", "warn", "versions", measured, _RULE.format("NoncurrentVersionExpiration"))]


def _covering(settings: Settings, prefix: str) -> list[Mapping[str, Any]]:
    """The rules that hold for all below the prefix."""
    return [rule for rule in settings.rules if prefix.startswith(_prefix_of(rule)) and not _is_narrow(rule)]


def _touches(rule: Mapping[str, Any], prefix: str) -> bool:
    """Whether a rule holds for some of what lies below the prefix, besides what doctor itself makes."""
    its = _prefix_of(rule)
    ours = (prefix + ids.DOCTOR_PREFIX, prefix + ids.PREFLIGHT_PREFIX)
    return (prefix.startswith(its) or its.startswith(prefix)) and not _has_tags(rule) and not its.startswith(ours)


def _prefix_of(rule: Mapping[str, Any]) -> str:
    chosen = rule.get("Filter", {})
    return str(chosen.get("Prefix") or chosen.get("And", {}).get("Prefix") or rule.get("Prefix") or "")


def _has_tags(rule: Mapping[str, Any]) -> bool:
    """Whether a rule is for objects with tags, which ours have none of."""
    chosen = rule.get("Filter", {})
    return "Tag" in chosen or bool(chosen.get("And", {}).get("Tags"))


def _is_narrow(rule: Mapping[str, Any]) -> bool:
    """Whether a rule is for some objects only, by tag or size."""
    chosen = rule.get("Filter", {})
    sizes = {"ObjectSizeGreaterThan", "ObjectSizeLessThan"}
    return _has_tags(rule) or bool(sizes & (set(chosen) | set(chosen.get("And", {}))))
