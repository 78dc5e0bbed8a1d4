"""doctor finds what is wrong with a durable tier, says what to mend, and finds nothing once that is mended."""

import io
import os
import secrets
import signal
import threading
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest
from support.documented import document_of
from support.fault_proxy import FaultProxy, refuse, stall, where
from support.processes import start
from support.refusing import BUCKET, ServerWithRights, in_region
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.cli.doctor import probe_durable
from tiered_checkpoint_io.model import ids
from tiered_checkpoint_io.model.config import TieredCheckpointConfig
from tiered_checkpoint_io.model.ids import DOCTOR_PREFIX
from tiered_checkpoint_io.stores.s3_probe import probe_bucket

OBJECTS = {
    *("s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
    *("s3:AbortMultipartUpload", "s3:ListMultipartUploadParts"),
}
ALL = {*OBJECTS, "s3:ListBucket", "s3:ListBucketMultipartUploads"}


@pytest.fixture(scope="module")
def moto():
    with ServerWithRights() as server:
        yield server


@pytest.fixture
def come_as(moto, monkeypatch):
    def come(actions):
        policy = {
            "Version": "2012-10-17",
            "Statement": [{"Effect": "Allow", "Action": sorted(actions), "Resource": "*"}],
        }
        for name, value in moto.user(f"user-{secrets.token_hex(4)}", policy).items():
            monkeypatch.setenv(name, value)

    return come


@pytest.fixture
def doctor(memory_dir):
    """Runs the command; gives its exit status and document."""

    def run(dirpath, *arguments):
        given = ["doctor", dirpath, "--memory-dir", memory_dir, "--state-size", "1MiB", "--quick", "--json", *arguments]
        done = CliRunner().invoke(app, given)
        assert isinstance(done.exception, SystemExit | None), done.exception
        return done.exit_code, document_of("doctor", done)

    return run


def durable(document):
    """What is not well with the durable tier, by what it is."""
    checks = (each for each in document["checks"] if each["group"] == "durable" and each["status"] != "ok")
    return {each["what"]: each for each in checks}


def left(client, prefix):
    """What doctor has not removed: keys of objects, and of uploads."""
    listed = client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    uploads = client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix).get("Uploads", ())
    assert all(DOCTOR_PREFIX in each["Key"] for each in (*listed, *uploads))
    return sorted(each["Key"] for each in (*listed, *uploads))


@pytest.mark.parametrize(
    "missing",
    [
        pytest.param(each, marks=() if "Delete" in each or "Uploads" in each else pytest.mark.matrix)
        for each in sorted(ALL)
    ],
)
def test_a_missing_right_is_named_and_its_statement_mends_it(missing, moto, come_as, doctor):
    url = f"s3://{BUCKET}/{secrets.token_hex(4)}/run"
    come_as(ALL - {missing} | {"s3:GetLifecycleConfiguration"})
    status, found = doctor(url)
    failed = {what for what, each in durable(found).items() if each["status"] == "fail"}
    assert (status, failed) == (1, {missing})
    (statement,) = found["missing_policy"]["Statement"]
    assert statement["Action"] == [missing]
    below = url.removeprefix(f"s3://{BUCKET}/")
    assert statement["Resource"] == f"arn:aws:s3:::{BUCKET}{'' if 'Bucket' in missing else f'/{below}/*'}"
    owner = moto.client("s3", *moto.keys)
    try:
        # What it had to leave is named.
        named = durable(found).get("left behind", {"measured": ": "})["measured"].split(": ")[0].split(", ")
        assert [each for each in named if each] == left(owner, below)
        come_as(ALL)
        status, found = doctor(url)
        assert (status, found["missing_policy"]) == (0, None)
        assert not {what for what in durable(found) if what.startswith("s3:")}
    finally:
        owner.close()


def test_a_wrong_region_is_named(s3_url, s3_server, doctor):
    with FaultProxy(s3_server.endpoint_url, in_region("eu-central-1", told=False)) as proxy:
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url, "--region", "us-west-2")
        (what,) = durable(found).values()
        assert (status, what["status"], what["what"]) == (1, "fail", "bucket")
        assert "requests are signed for us-west-2" in what["measured"]
        assert "set region and endpoint_url" in what["do"]
        # Where the server tells it, boto3 follows: each client asks twice.
        proxy.plan = in_region("eu-central-1")
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url, "--region", "us-west-2")
        assert (status, durable(found)["region"]["do"]) == (0, "set region: eu-central-1")
        assert [(each["key"], each["value"]) for each in found["recommended"]] == [("region", "eu-central-1")]
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url, "--region", "eu-central-1")
        assert (status, "region" in durable(found), found["recommended"]) == (0, False, [])


def at_another_time(minutes, *, refuses):
    """A server whose clock is elsewhere; AWS refuses what is signed for a time that is 15 minutes from its own."""
    offset = timedelta(minutes=minutes)

    def act(exchange):
        signed = datetime.strptime(exchange.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ").replace(tzinfo=timezone.utc)
        now = datetime.now(timezone.utc) + offset
        date = [("Date", format_datetime(now, usegmt=True))]
        if refuses and abs(now - signed) > timedelta(minutes=15):
            body = b"<Error><Code>RequestTimeTooSkewed</Code><Message>m</Message></Error>"
            exchange.answer(403, body, date)
            return
        status, headers, body = exchange.forward()
        exchange.answer(status, body, [each for each in headers if each[0].lower() != "date"] + date)

    return where(act)


@pytest.mark.parametrize("refuses", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_a_clock_off_by_20_minutes_is_one_failure(s3_url, s3_server, doctor, refuses):
    with FaultProxy(s3_server.endpoint_url, at_another_time(20, refuses=refuses)) as proxy:
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url)
        failed = [each for each in durable(found).values() if each["status"] == "fail"]
        assert (status, [each["what"] for each in failed]) == (1, ["clock"])
        assert failed[0]["measured"].startswith("20 min behind the server's")
        assert "chrony" in failed[0]["do"]
        assert found["missing_policy"] is None
        proxy.plan = at_another_time(0, refuses=refuses)
        assert doctor(s3_url, "--endpoint-url", proxy.endpoint_url)[0] == 0


@pytest.mark.skipif("TIERED_TEST_S3_ENDPOINT" in os.environ, reason="only rclone takes no notice of any")
def test_a_server_that_takes_no_notice_of_conditions_is_named(moto, come_as, s3_url, s3_server, doctor, monkeypatch):
    status, found = doctor(s3_url)
    conditions = durable(found)["conditional writes"]
    assert (status, conditions["status"]) == (0, "warn")
    assert "put If-None-Match is ignored" in conditions["measured"]
    assert "one run for each dirpath" in conditions["do"]
    come_as(ALL)
    assert "conditional writes" not in durable(doctor(f"s3://{BUCKET}/{secrets.token_hex(4)}")[1])


@pytest.mark.parametrize(
    ("code", "word"), [((501, "NotImplemented"), "refused"), ((412, "PreconditionFailed"), "misjudged")]
)
@pytest.mark.matrix
def test_conditions_that_are_refused(moto, come_as, doctor, code, word):
    def without(exchange):
        if {name.lower() for name in exchange.headers} & {"if-match", "if-none-match"}:
            refuse(*code)(exchange)
        else:
            status, headers, body = exchange.forward()
            exchange.answer(status, body, headers)

    come_as(ALL)
    with FaultProxy(moto.endpoint_url, where(without)) as proxy:
        found = doctor(f"s3://{BUCKET}/{secrets.token_hex(4)}", "--endpoint-url", proxy.endpoint_url)[1]
    assert f"put If-Match is {word}" in durable(found)["conditional writes"]["measured"]


def test_a_silent_server_is_one_failure_within_the_timeout(s3_url, s3_server, doctor):
    with FaultProxy(s3_server.endpoint_url, where(stall)) as proxy:
        began = time.monotonic()
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url, "--timeout", "1")
        assert time.monotonic() - began < 10
    (what,) = durable(found).values()
    assert (status, what["status"], "has not answered for 1 s" in what["measured"]) == (1, "fail", True)


@pytest.mark.matrix
def test_a_server_that_falls_silent_in_the_middle(s3_url, s3_server, doctor):
    with FaultProxy(s3_server.endpoint_url, where(stall, operation="create")) as proxy:
        status, found = doctor(s3_url, "--endpoint-url", proxy.endpoint_url, "--timeout", "2")
    assert (status, [each["what"] for each in durable(found).values()]) == (1, ["durable tier"])


def test_the_throughput_is_measured_and_nothing_stays(s3_url, s3_server, memory_dir, monkeypatch):
    monkeypatch.setattr(probe_durable, "_SIZES", (1 << 20, 9 << 20))
    given = ["doctor", s3_url, "--memory-dir", memory_dir, "--state-size", "1TiB"]
    found = document_of("doctor", CliRunner().invoke(app, [*given, "--json"]))
    (check,) = (each for each in found["checks"] if each["what"] == "throughput")
    assert "1024.00 GiB take" in check["measured"]
    assert min(found["upload_bytes_per_s"], found["download_bytes_per_s"]) > 0
    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    assert not s3_server.client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents")
    assert not s3_server.uploads(bucket, prefix)


def test_an_interrupted_doctor_leaves_nothing(s3_url, s3_server, memory_dir):
    """Ctrl-C while the server is slow to answer."""
    there = threading.Event()

    def act(exchange):
        there.set()
        stall(exchange)

    bucket, _, prefix = s3_url.removeprefix("s3://").partition("/")
    with FaultProxy(s3_server.endpoint_url, where(act, operation="create")) as proxy:
        process = start("doctor", s3_url, "--memory-dir", memory_dir, "--endpoint-url", proxy.endpoint_url)
        assert there.wait(30)
        assert s3_server.client.list_objects_v2(Bucket=bucket, Prefix=prefix)["KeyCount"] == 1
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=20)
    assert (process.returncode, said, errors) == (130, "", "interrupted\n")
    assert not s3_server.client.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents")


def test_the_owner_s_settings_and_what_a_killed_doctor_left(moto, doctor, monkeypatch):
    for name, value in moto.writer.items():
        monkeypatch.setenv(name, value)
    owner = moto.client("s3", *moto.keys)
    prefix = f"{secrets.token_hex(4)}/run"
    rule = {"ID": "tidy", "Status": "Enabled", "Filter": {"Prefix": prefix}, "Expiration": {"Days": 30}}
    owner.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": [rule]})
    owner.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
    # moto has all uploads begin in 2010.
    upload = owner.create_multipart_upload(Bucket=BUCKET, Key=f"{prefix}/a.ckpt")["UploadId"]
    place = {"Bucket": BUCKET, "Key": f"{prefix}/a.ckpt", "UploadId": upload}
    owner.upload_part(**place, PartNumber=1, Body=io.BytesIO(bytes(1 << 20)))
    try:
        status, found = doctor(f"s3://{BUCKET}/{prefix}")
        bad = durable(found)
        assert (status, bad["versions"]["status"], bad["unfinished uploads"]["measured"]) == (
            *(1, "warn"),
            "1 older than a day",
        )
        rules = [each for each in found["checks"] if each["what"] == "lifecycle"]
        assert [each["status"] for each in rules] == ["fail", "warn"]
        assert "'tidy' deletes objects" in rules[0]["measured"]
    finally:
        owner.abort_multipart_upload(**place)
        owner.delete_bucket_lifecycle(Bucket=BUCKET)
        owner.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Suspended"})
        owner.close()


def test_the_settings_of_a_bucket_whose_reader_pays_are_read(moto, come_as):
    url = f"s3://{BUCKET}/{secrets.token_hex(4)}"
    come_as({"s3:*"})
    facts = probe_bucket(
        TieredCheckpointConfig(dirpath=url, s3_options={"RequestPayer": "requester"}), ids.doctor_prefix("x")
    )
    assert facts.settings.unread == ()
    assert [each for each in facts.tries if each.failed] == []


def test_without_a_dirpath_it_looks_at_that_of_the_last_run(kept, doctor):
    done = CliRunner().invoke(app, ["doctor", "--memory-dir", kept.options["memory_dir"], "--quick", "--json"])
    found = document_of("doctor", done)
    assert (done.exit_code, found["dirpath"]) == (0, kept.options["dirpath"])
    assert found["state_size_bytes"] > 4000
