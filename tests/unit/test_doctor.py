"""What doctor makes of what it measured: tables of facts and checks; and its look at a real small tmpfs."""

from pathlib import Path

import pytest
from support.documented import document_of
from support.tenants import mounted_tmpfs
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.cli.doctor import _bytes_of, rights
from tiered_checkpoint_io.cli.doctor.facts import NodeFacts, RateFacts, Setting, StateSize, Tmpfs
from tiered_checkpoint_io.cli.doctor.judge_durable import judge_bucket, recommend_for_bucket
from tiered_checkpoint_io.cli.doctor.judge_network import judge_network, judge_rate, recommend_for_rate
from tiered_checkpoint_io.cli.doctor.judge_node import judge_node, recommend_for_node
from tiered_checkpoint_io.cli.doctor.judge_settings import judge_settings
from tiered_checkpoint_io.cli.doctor.visit import as_yaml
from tiered_checkpoint_io.engine.replication.network import Interface
from tiered_checkpoint_io.memory.spill import AUTO, spill_dir_of
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.stores.s3_facts import BucketFacts, Settings, Tried

MIB, GIB = 1 << 20, 1 << 30
CONFIG = TieredCheckpointConfig(dirpath="s3://bucket/run")
NODE = NodeFacts(
    memory_dir="/dev/shm",
    memory=Tmpfs("/dev/shm", 256 * GIB, 250 * GIB),
    is_tmpfs=True,
    is_writable=True,
    other_tmpfs=(),
    machine_memory=512 * GIB,
    memory_limit=512 * GIB,
    memory_left=500 * GIB,
    spill_dir="/tmp",
    spill_free=900 * GIB,
    spill_is_tmpfs=False,
    memlock=None,
    descriptors=65536,
    cores=64,
    numa_nodes=2,
    has_rdma=False,
    container="",
    versions={"python": "3.11.7", "lightning": "2.6.6"},
    supported={"python": ">=3.10", "lightning": "<2.7,>=2.4,!=2.6.2,!=2.6.3"},
)
SMALL = Tmpfs("/dev/shm", 64 * MIB, 64 * MIB)
STATE = StateSize(40 * GIB, "given")
UNKNOWN = StateSize()
NO_SPILL = {"spill_dir": None, "spill_free": None}
CASES = {
    "all is well": ({}, STATE, None, "ok", ""),
    "64 MiB, state unknown": ({"memory": SMALL}, UNKNOWN, "memory tier", "warn", "Docker's default"),
    "64 MiB, state known": ({"memory": SMALL}, STATE, "memory tier", "warn", "docker run --shm-size=120g"),
    "64 MiB, a spill": ({"memory": SMALL}, STATE, "memory tier", "warn", "saves go through the spill at /tmp"),
    "64 MiB, no spill": ({"memory": SMALL, **NO_SPILL}, STATE, "memory tier", "fail", "docker run --shm-size=120g"),
    "64 MiB, full spill": ({"memory": SMALL, "spill_free": 0}, UNKNOWN, "memory tier", "fail", "Docker's default"),
    "64 MiB alone": ({"memory": SMALL, **NO_SPILL}, UNKNOWN, "memory tier", "fail", "Docker's default"),
    "64 MiB, spill in it": ({"memory": SMALL, "spill_is_tmpfs": True}, STATE, "memory tier", "fail", "=120g"),
    "64 MiB, small spill": ({"memory": SMALL, "spill_free": GIB}, STATE, "memory tier", "fail", "=120g"),
    "64 MiB, spill unread": ({"memory": SMALL, "spill_free": None}, STATE, "memory tier", "fail", "=120g"),
    "64 MiB in a pod": (
        {"memory": SMALL, "container": "kubernetes", **NO_SPILL},
        STATE,
        "memory tier",
        "fail",
        "emptyDir with medium: Memory and sizeLimit: 120Gi",
    ),
    "room for one": ({"memory": Tmpfs("/dev/shm", 90 * GIB, 90 * GIB)}, STATE, "memory tier", "warn", "120.00 GiB"),
    "others are there": ({"memory": Tmpfs("/x", 200 * GIB, GIB)}, STATE, "memory tier", "warn", "1.00 GiB free"),
    "no folder": ({"memory": None}, STATE, "memory tier", "fail", "no such folder"),
    "not ours": ({"is_writable": False}, STATE, "memory tier", "fail", "may not write"),
    "a disk": ({"is_tmpfs": False}, UNKNOWN, "memory tier", "warn", "as fast as that disk"),
    "a job's limit": ({"memory_limit": 100 * GIB}, STATE, "memory", "warn", "raise the container's memory limit"),
    "far below it": ({"memory_limit": 60 * GIB}, STATE, "memory", "warn", "saves go through the spill at /tmp"),
    "far below it, no spill": ({"memory_limit": 60 * GIB, **NO_SPILL}, STATE, "memory", "fail", "memory limit"),
    "memory in use": ({"memory_left": 20 * GIB}, STATE, "memory", "warn", "other processes"),
    "no spill": (NO_SPILL, UNKNOWN, "spill", "warn", "node-local disk"),
    "no spill needed": (NO_SPILL, STATE, "spill", "ok", "none"),
    "spill in memory": ({"spill_is_tmpfs": True}, STATE, "spill", "warn", "in memory"),
    "small spill": ({"spill_free": GIB}, STATE, "spill", "warn", "larger disk"),
    "locked memory": ({"memlock": 64 << 10, "has_rdma": True}, STATE, "locked memory", "warn", "memlock=-1"),
    "descriptors": ({"descriptors": 256}, STATE, "file descriptors", "warn", "ulimit -n 8192"),
    "one core": ({"cores": 1}, STATE, "cores", "warn", "another core"),
    "withdrawn": ({"versions": {"python": "3.11", "lightning": "2.6.2"}}, STATE, "lightning", "fail", "GHSA-w37p"),
    "too old": ({"versions": {"python": "3.9.1", "lightning": "2.6.6"}}, STATE, "python", "fail", "supported: >=3.10"),
    "missing": ({"versions": {"python": "3.11"}}, STATE, "lightning", "fail", "not installed"),
}


def only(checks, what):
    found = [each for each in checks if each.status != "ok"] if what is None else [e for e in checks if e.what == what]
    assert len(found) == (what is not None), found
    return found[0] if found else None


@pytest.mark.parametrize("case", CASES)
def test_a_node(case):
    changes, state, what, status, text = CASES[case]
    found = only(judge_node(NODE._replace(**changes), state, CONFIG), what)
    if found is not None:
        assert (found.status, text in f"{found.measured} {found.do}") == (status, True), found


def test_settings_differ_from_the_defaults_only_where_that_mends_something():
    assert recommend_for_node(NODE, STATE, CONFIG) == []
    large = Tmpfs("/mnt/memory", 400 * GIB, 400 * GIB)
    (found,) = recommend_for_node(NODE._replace(memory=SMALL, other_tmpfs=(large,)), STATE, CONFIG)
    assert (found.key, found.value) == ("memory_dir", "/mnt/memory")
    (found,) = recommend_for_node(NODE._replace(memory_limit=200 * GIB), STATE, CONFIG)
    assert (found.key, found.value) == ("memory_allocation_percentage", 60)
    (found,) = recommend_for_node(NODE._replace(memory=Tmpfs("/dev/shm", 100 * GIB, 100 * GIB)), STATE, CONFIG)
    assert (found.key, found.value) == ("memory_keep_last", 1)
    lines = as_yaml([found, Setting("memory_dir", "/dev/shm", "the default"), Setting("region", "eu-west-1", "why")])
    assert [line.partition("#")[0].strip() for line in lines] == [
        "s3_checkpointing:",
        "memory_keep_last: 1",
        'region: "eu-west-1"',
    ]


def bucket(denied=(), failed=None, **changes):
    tries = [
        Tried(name, *(("AccessDenied", "S3 failed", "", "", True) if name in denied else ())) for name in rights.NEEDS
    ]
    tries = [Tried(each.request, *failed[each.request]) if each.request in (failed or {}) else each for each in tries]
    facts = BucketFacts(
        "s3://bucket/run", "https://s3.eu-west-1.amazonaws.com", "eu-west-1", "", False, 0.4, tuple(tries)
    )
    return facts._replace(leftovers=0, settings=Settings(rules=(RULE,)), **changes)


RULE = {"Status": "Enabled", "Filter": {"Prefix": "run/"}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 7}}
BUCKETS = {
    "all is well": (bucket(), None, "ok", ""),
    "delete": (bucket({"delete", "delete_many"}), "s3:DeleteObject", "fail", "delete, delete_many refused"),
    "uploads": (bucket({"list_uploads"}), "s3:ListBucketMultipartUploads", "fail", "dead processes"),
    "list by prefix alone": (bucket({"absent"}), "s3:ListBucket", "fail", "without a condition on s3:prefix"),
    "clock": (bucket(skew_s=-1200.0), "clock", "fail", "20 min behind the server's"),
    "clock, a little": (bucket(skew_s=45.0), "clock", "warn", "45 s ahead of"),
    "region": (bucket(bucket_region="us-east-2"), "region", "warn", "set region: us-east-2"),
    "endpoint": (bucket(region="us-east-2"), "region", "fail", "endpoint is of eu-west-1"),
    "copy alone": (bucket({"copy"}), "copy", "fail", "look for a Deny"),
    "conditions": (bucket(conditions={"put If-Match": "ignored"}), "conditional writes", "warn", "at the same moment"),
    "no such thing": (bucket(failed={"copy": ("NotImplemented", "S3 failed")}), "copy", "warn", "aliases"),
    "no put": (bucket(failed={"put": ("EntityTooLarge", "S3 failed")}), "put", "fail", "each save needs this"),
    "left behind": (bucket(left_behind=("run/.tiered/doctor/x/object",)), "left behind", "warn", "doctor/x/object"),
}


@pytest.mark.parametrize("case", BUCKETS)
def test_a_bucket(case):
    facts, what, status, text = BUCKETS[case]
    found = only([each for each in judge_bucket(facts, CONFIG) if what is None or each.status != "ok"], what)
    if found is not None:
        assert (found.status, text in f"{found.measured} {found.do}") == (status, True), found
    assert [each.value for each in recommend_for_bucket(facts)] == (["us-east-2"] if case == "region" else [])


def test_leftovers_are_counted():
    facts = bucket()._replace(leftovers=30)
    (found,) = (each for each in judge_bucket(facts, CONFIG) if each.status != "ok")
    assert (found.status, found.measured) == ("warn", "30 older than a day")
    assert "the next drain aborts them" in found.do
    (found,) = (each for each in judge_bucket(facts._replace(url="s3://bucket"), CONFIG) if "older" in each.measured)
    assert "drain" not in found.do


@pytest.mark.parametrize(
    ("request_clock", "expected"),
    [(("RequestTimeTooSkewed", "S3 list failed"), "clock"), (("NoSuchBucket", "S3 list failed"), "bucket")],
)
def test_what_is_not_reached_is_one_line(request_clock, expected):
    skew = 1200.0 if expected == "clock" else 0.1
    facts = bucket()._replace(tries=(Tried("list", *request_clock),), skew_s=skew)
    (found,) = judge_bucket(facts, CONFIG)
    assert (found.status, found.what) == ("fail", expected)


@pytest.mark.parametrize(
    ("denied", "missing"),
    [
        ({"copy"}, []),
        ({"absent"}, ["s3:ListBucket"]),
        ({"get", "head", "absent"}, ["s3:GetObject"]),
        ({"get", "head", "copy", "copy_part"}, ["s3:GetObject"]),
        ({"delete"}, ["s3:DeleteObject"]),
        (set(), []),
    ],
)
def test_a_refusal_blames_what_explains_it(denied, missing):
    assert rights.missing_actions(bucket(denied).tries, acl=False, kms=False) == missing


def test_statements_name_bucket_prefix_access_point_and_key():
    assert rights.missing_actions(bucket({"put"}).tries, acl=True, kms=True) == [
        *("s3:PutObject", "s3:PutObjectAcl", "kms:GenerateDataKey", "kms:Decrypt")
    ]
    made = rights.statements("s3://bu/x/run", "cn-north-1", ["s3:ListBucket", "s3:PutObject", "kms:Decrypt"], "1-2")
    assert [(each["Action"], each["Resource"]) for each in made] == [
        (["s3:ListBucket"], "arn:aws-cn:s3:::bu"),
        (["s3:PutObject"], "arn:aws-cn:s3:::bu/x/run/*"),
        (["kms:Decrypt"], "arn:aws-cn:kms:REGION:ACCOUNT:key/1-2"),
    ]
    point = "arn:aws:s3:eu-west-1:123456789012:accesspoint/name"
    (made,) = rights.statements(f"s3://{point}/run", "eu-west-1", ["s3:GetObject"])
    assert made["Resource"] == f"{point}/object/run/*"


EXPIRES = {"ID": "tidy", "Status": "Enabled", "Expiration": {"Days": 30}}
SETTINGS = {
    "expires all": ((RULE, EXPIRES), "", "fail", "'tidy' deletes objects below all of the bucket after 30 days"),
    "expires some": ((RULE, {**EXPIRES, "Filter": {"Prefix": "run/a"}}), "", "fail", "after 30 days"),
    "expires others": ((RULE, {**EXPIRES, "Filter": {"Prefix": "logs/"}}), "", "ok", "no rule deletes"),
    "expires what has tags": ((RULE, {**EXPIRES, "Filter": {"Tag": {"Key": "a", "Value": "b"}}}), "", "ok", "no rule"),
    "archives": (
        (RULE, {"Status": "Enabled", "Transitions": [{"Days": 1, "StorageClass": "GLACIER"}]}),
        *("", "fail", "no restart can read them"),
    ),
    "aborts nothing": ((), "", "warn", "costs storage for ever"),
    "keeps versions": ((RULE,), "Enabled", "warn", "a lease an hour"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_bucket_s_settings(case):
    rules, versioning, status, text = SETTINGS[case]
    checks = judge_settings(Settings(versioning, rules), "s3://bucket/run")
    assert [each for each in checks if each.status == status and text in each.measured], checks
    assert status == "ok" or len([each for each in checks if each.status != "ok"]) == 1


def test_settings_that_may_not_be_read_and_object_lock():
    unread, lock = judge_settings(Settings(locked_days=9, unread=("s3:GetLifecycleConfiguration",)), "s3://bu/run")[::2]
    assert (unread.status, lock.status, lock.what) == ("warn", "warn", "Object Lock")


@pytest.mark.parametrize(
    ("interface", "speed", "wanted", "status"),
    [
        (Interface("eth0", "10.0.0.3"), 100_000, True, "ok"),
        (Interface("eth0", "10.0.0.3"), 0, True, "ok"),
        (Interface("eth0", "10.0.0.3"), 100, True, "warn"),
        (Interface("lo", "127.0.0.1"), 0, True, "warn"),
        (Interface("lo", "127.0.0.1"), 0, False, "ok"),
        (Interface("docker0", "172.17.0.1"), 10_000, True, "warn"),
        (None, 0, True, "warn"),
    ],
)
def test_the_interface(interface, speed, wanted, status):
    (found,) = judge_network(interface, speed, STATE, wanted=wanted)
    assert found.status == status
    assert status == "ok" or "GLOO_SOCKET_IFNAME" in found.do


def test_the_interface_is_the_one_that_replication_would_use(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    command = ["doctor", str(tmp_path), "--memory-dir", str(tmp_path), "--quick"]
    assert "replication: lo (127.0.0.1): reaches no other node" in CliRunner().invoke(app, command).stdout
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth99")
    done = CliRunner().invoke(app, command)
    assert "fail  replication: GLOO_SOCKET_IFNAME is 'eth99'" in done.stdout
    assert done.exit_code == 1


def test_a_rate_is_told_as_time():
    (found,) = judge_rate(RateFacts(1000 * MIB, 500 * MIB, 64 * MIB), STATE)
    assert (found.status, "40.00 GiB take 41.0 s up, 81.9 s down" in found.measured) == ("ok", True)
    (found,) = judge_rate(RateFacts(10 * MIB, 500 * MIB, 8 * MIB), STATE)
    assert (found.status, "every 68 min" in found.do) == ("warn", True)
    assert recommend_for_rate(RateFacts(1000 * MIB, 1.0, 1), CONFIG) == []
    assert recommend_for_rate(RateFacts(10 * MIB, 1.0, 1), CONFIG)[0].value == 8


@pytest.mark.parametrize(("text", "size"), [("40GiB", 40 * GIB), ("1.5 g", 3 * GIB // 2), ("2GB", 2 * 10**9), ("7", 7)])
def test_sizes(text, size):
    assert _bytes_of(text) == size


def test_a_real_tmpfs_of_64_mib(tmp_path):
    status = "fail" if spill_dir_of(AUTO) is None else "warn"
    with mounted_tmpfs(tmp_path / "shm", 64 * MIB) as folder:
        done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--memory-dir", str(folder), "--quick"])
        (line,) = (line for line in done.stdout.splitlines() if "memory tier:" in line)
        assert line.startswith(
            f"{status}  memory tier: {folder}: tmpfs, 64.00 MiB, 64.00 MiB free; that is Docker's default"
        )
        assert "--shm-size=8g" in line
        again = CliRunner().invoke(
            app, ["doctor", str(tmp_path), "--memory-dir", str(folder), "--quick", "--state-size", "100MiB", "--json"]
        )
        found = document_of("doctor", again)
    fails = any(each["status"] == "fail" for each in found["checks"])
    assert (done.exit_code, again.exit_code) == (fails, fails)
    assert found["state_size_bytes"] == 100 * MIB
    (memory,) = (each for each in found["checks"] if each["what"] == "memory tier")
    assert (memory["status"], "one checkpoint takes 100.00 MiB (given)" in memory["measured"]) == (status, True)
    # /dev/shm would do, which is the default.
    assert found["recommended"] == []
    assert not list(Path(tmp_path).glob(".tiered/doctor/*"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--state-size", "many"], "is no size"),
        (["--region", "eu-west-1"], "need its dirpath"),
        (["http://a/bu"], "s3://bu"),
    ],
)
def test_wrong_use(arguments, text, memory_dir):
    done = CliRunner().invoke(app, ["doctor", "--memory-dir", memory_dir, *arguments])
    assert (done.exit_code, text in done.output) == (2, True), done.output


def test_a_directory_that_is_not_there_is_not_made(tmp_path, memory_dir):
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "a/b"), "--memory-dir", memory_dir])
    assert "does not exist yet; the first save makes it" in done.stdout
    assert not (tmp_path / "a").exists()
