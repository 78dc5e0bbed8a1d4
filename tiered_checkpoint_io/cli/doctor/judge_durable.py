"""What the measured facts of a bucket mean: pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from tiered_checkpoint_io.cli.doctor import rights
from tiered_checkpoint_io.cli.doctor.facts import Check, Setting, Status
from tiered_checkpoint_io.cli.doctor.judge_settings import judge_settings
from tiered_checkpoint_io.errors import TieredCheckpointError
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.s3_options import S3Options
from tiered_checkpoint_io.stores.s3_facts import NEEDS, BucketFacts, Tried

#: AWS refuses requests that are further from its time, seconds.
_SKEW_REFUSED_S = 900
#: What a clock that is synchronized never gets to, seconds.
_SKEW_ODD_S = 30
#: Without these the store does by other requests what they would do.
_DISPENSABLE = {
    "delete_many": "objects are deleted one by one",
    "copy": "copies such as last.ckpt are uploaded, or become aliases",
    "copy_part": "copies of more than 1 GiB are uploaded, or become aliases",
    "list_uploads": "uploads that dead processes left are never found",
}
_AWS = re.compile(
    r"//(?:[^/]*\.)?s3[.-](?:dualstack\.|accesspoint\.)?(?P<region>[a-z]{2,3}(?:-[a-z]+)+-\d)\.amazonaws\.com"
)


def judge_bucket(facts: BucketFacts, config: TieredCheckpointConfig) -> list[Check]:
    """The checks of a bucket: one that fails where it could not be reached, else one for each thing that was tried."""
    if not facts.is_reached:
        return _unreached(facts)
    checks = [Check("durable", "ok", "bucket", f"{facts.url} answers at {facts.endpoint_url}" + _style(facts))]
    checks += [*_region(facts), *_clock(facts), *_rights(facts, config), *_failures(facts, config)]
    checks += [*_conditions(facts), *_leftovers(facts), *judge_settings(facts.settings, facts.url)]
    if facts.left_behind:
        keys = ", ".join(facts.left_behind)
        checks.append(Check("durable", "warn", "left behind", f"{keys}: may not be removed", "remove by other rights"))
    return checks


def judge_refusal(error: TieredCheckpointError) -> list[Check]:
    """The one check where the durable tier could not be asked at all."""
    return [Check("durable", "fail", "durable tier", error.message, error.hint or "check dirpath and endpoint_url")]


def judge_tries(failures: Sequence[TieredCheckpointError], url: str) -> list[Check]:
    """The checks of a durable tier that is no bucket: write, list, read, delete."""
    if not failures:
        return [Check("durable", "ok", "durable tier", f"{url}: list, write, read and delete work")]
    what = "try again later" if all(each.retryable for each in failures) else "check dirpath and its rights"
    return [
        Check("durable", "fail", each.operation or "request", f"{url}: {each.message}", each.hint or what)
        for each in failures
    ]


def judge_folder(url: str, near: str, *, can_be_made: bool) -> list[Check]:
    """The check of a directory that is not there yet: a save makes it, in the first one above it that is."""
    measured = f"{url} does not exist yet"
    if can_be_made:
        return [
            Check("durable", "warn", "durable tier", f"{measured}; the first save makes it", "mkdir -p it, to try it")
        ]
    return [Check("durable", "fail", "durable tier", f"{measured}, and {near} can't be written to", "check dirpath")]


def missing_policy(facts: BucketFacts, config: TieredCheckpointConfig) -> list[dict[str, object]]:
    """The IAM statements that are missing."""
    missing = _missing(facts, config)
    region = facts.bucket_region or facts.region
    return rights.statements(
        facts.url, region, missing, facts.kms_key or S3Options.of(config.s3_options).SSEKMSKeyId or ""
    )


def recommend_for_bucket(facts: BucketFacts) -> list[Setting]:
    """The region, where requests are signed for another one."""
    if not facts.bucket_region or facts.bucket_region == facts.region:
        return []
    return [Setting("region", facts.bucket_region, "the bucket is there")]


def _missing(facts: BucketFacts, config: TieredCheckpointConfig) -> list[str]:
    options = S3Options.of(config.s3_options)
    kms = bool(facts.kms_key) or (options.ServerSideEncryption or "").startswith("aws:kms")
    return rights.missing_actions(facts.tries, acl=options.ACL is not None, kms=kms)


def _unreached(facts: BucketFacts) -> list[Check]:
    """A wrong clock where that explains the failure, else the error of the first request."""
    failed = facts.tries[0]
    clock = [each for each in _clock(facts) if each.status == "fail"]
    if clock and not failed.is_passing:
        return [replace(clock[0], measured=f"{clock[0].measured}; the server refuses requests ({failed.code})")]
    signed = f"; requests are signed for {facts.region} at {facts.endpoint_url}"
    text = f"{facts.url}: {failed.text}" + ("" if failed.is_passing else signed)
    return [Check("durable", "fail", "bucket", text, failed.hint or failed.server_text or "check dirpath")]


def _style(facts: BucketFacts) -> str:
    return ", path style" if facts.path_style else ", virtual-host style"


def _region(facts: BucketFacts) -> list[Check]:
    named = _AWS.search(facts.endpoint_url)
    if named and facts.region and named["region"] != facts.region:
        measured = f"the endpoint is of {named['region']}, requests are signed for {facts.region}"
        return [Check("durable", "fail", "region", measured, "leave endpoint_url out for AWS, and set region")]
    if facts.bucket_region and facts.bucket_region != facts.region:
        measured = f"the bucket is in {facts.bucket_region}, requests are signed for {facts.region or 'none'}"
        return [Check("durable", "warn", "region", f"{measured}: redirected", f"set region: {facts.bucket_region}")]
    return [Check("durable", "ok", "region", facts.bucket_region or f"{facts.region}, as far as the server tells")]


def _clock(facts: BucketFacts) -> list[Check]:
    if facts.skew_s is None:
        return [Check("durable", "ok", "clock", "the server tells no time")]
    off = abs(facts.skew_s)
    side = "ahead of" if facts.skew_s > 0 else "behind"
    unit = f"{off / 60:.0f} min" if off >= 120 else f"{off:.0f} s"
    measured = f"{unit} {side} the server's" if off >= 2 else "as the server's"
    status: Status = "fail" if off >= _SKEW_REFUSED_S else "warn" if off >= _SKEW_ODD_S else "ok"
    do = "have chrony or ntpd set this machine's clock" if status != "ok" else ""
    return [Check("durable", status, "clock", measured, do)]


def _rights(facts: BucketFacts, config: TieredCheckpointConfig) -> list[Check]:
    missing = set(_missing(facts, config))
    tried = {each.request: each for each in facts.tries}
    checks = []
    for action in dict.fromkeys(action for actions in NEEDS.values() for action in actions):
        # The others say of a right no more than those that need it alone.
        requests = [name for name, actions in NEEDS.items() if actions == (action,) and name in tried]
        denied = [tried[name] for name in requests if tried[name].is_denied]
        if action in missing and action == "s3:ListBucket" and not tried["list"].failed:
            measured = "listing is allowed, but a request for a missing object is answered by 403"
            do = "allow it without a condition on s3:prefix, which holds only for lists"
            checks.append(Check("durable", "fail", action, measured, do))
        elif action in missing:
            refused = denied or [each for each in facts.tries if each.is_denied and action in NEEDS[each.request]]
            said = refused[0].server_text
            measured = f"missing: {', '.join(each.request for each in refused)} refused ({refused[0].code})"
            measured += f": {said}" if said and said != "Access Denied" else ""
            checks.append(
                Check("durable", "fail", action, f"{measured}; {rights.WITHOUT[action]}", "see the policy below")
            )
        elif any(not tried[name].failed for name in requests):
            checks.append(Check("durable", "ok", action, ", ".join(dict.fromkeys(requests))))
    others = sorted(missing - {each.what for each in checks}, key=list(rights.WITHOUT).index)
    checks += [
        Check(
            "durable", "warn", each, f"may be missing, too: without it {rights.WITHOUT[each]}", "see the policy below"
        )
        for each in others
    ]
    if missing and (owner := S3Options.of(config.s3_options).ExpectedBucketOwner):
        do = "the bucket's own policy has to allow them as well: deploy/iam/cross-account-bucket-policy.json"
        checks.append(Check("durable", "warn", "bucket policy", f"the bucket is of {owner}", do))
    return checks


def _failures(facts: BucketFacts, config: TieredCheckpointConfig) -> list[Check]:
    """What failed for another reason than a right that is missing."""
    missing = set(_missing(facts, config))
    return [
        _failure(each)
        for each in facts.tries
        if each.failed and not (each.is_denied and missing & set(NEEDS[each.request]))
    ]


def _failure(each: Tried) -> Check:
    follows = _DISPENSABLE.get(each.request)
    said = f" ({each.server_text})" if each.server_text else ""
    measured = f"{each.text}{said}"
    if each.is_denied:
        do = "its rights are there: look for a Deny, in the bucket's policy, the VPC endpoint's, or the organization's"
        return Check("durable", "fail", each.request, measured, do)
    if follows is not None:
        return Check("durable", "warn", each.request, f"{measured}; {follows}")
    do = each.hint or ("try again later" if each.is_passing else "see what the server allows: each save needs this")
    return Check("durable", "fail", each.request, measured, do)


def _conditions(facts: BucketFacts) -> list[Check]:
    known = {name: state for name, state in facts.conditions.items() if state is not None}
    bad = [f"{name} is {state}" for name, state in known.items() if state != "judged"]
    if bad:
        measured = f"{', '.join(bad)}: two runs that write one name at the same moment may both believe they did"
        do = "start one run for each dirpath; where you can, use a server that judges If-Match and If-None-Match"
        return [Check("durable", "warn", "conditional writes", measured, do)]
    return [Check("durable", "ok", "conditional writes", ", ".join(known))] if known else []


def _leftovers(facts: BucketFacts) -> list[Check]:
    left = facts.leftovers
    if left is None:
        return []
    if not left:
        return [Check("durable", "ok", "unfinished uploads", "none older than a day")]
    do = "a lifecycle rule with AbortIncompleteMultipartUpload aborts them"
    # A whole bucket is not the drain's alone.
    do = f"the next drain aborts them; {do}, too" if ids.parse_s3_url(facts.url)[1] else do
    return [Check("durable", "warn", "unfinished uploads", f"{left} older than a day", do)]
