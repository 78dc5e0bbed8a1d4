"""The command line over a durable tier: list and verify; over all tiers: test_listing."""

from dataclasses import replace

import pytest
from support.documented import verified
from support.draining import Node, part_of
from typer.testing import CliRunner

from tiered_checkpoint_io.cli import app
from tiered_checkpoint_io.engine.durable.manifests import read_manifest
from tiered_checkpoint_io.errors import CheckpointNotFoundError
from tiered_checkpoint_io.model.documents import dump
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.directory import DirectoryStore

LONG = "a" * 200 + ".ckpt"


def command(*arguments):
    return CliRunner().invoke(app, arguments)


@pytest.fixture
def node(memory_dir, tmp_path):
    """A durable tier whose names sort in another way than its saves, and look like markup."""
    node = Node(memory_dir, str(tmp_path / "run[/b]"))
    node.save("z.ckpt", b"Z")
    node.save(LONG, b"A")
    node.save("c[/b].ckpt", b"C" * 100)
    node.alias("a-last.ckpt", "c[/b].ckpt")
    node.save("weights.ckpt", b"W", resumable=False)
    node.drain()
    return node


def listed(done):
    header, *rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert header == ["name", "step", "size", "age", "metric", "where", "kind", "state", "note"]
    return {row[0]: row[1:] for row in rows}


def test_names_are_whole_in_the_order_of_saves_and_latest_is_marked(node):
    found = command("ls", node.dirpath)
    rows = listed(found)
    assert found.exit_code == 0
    assert list(rows) == ["weights.ckpt", "c[/b].ckpt", "a-last.ckpt", LONG, "z.ckpt"]
    assert [row[-1] for row in rows.values()] == ["", "latest", "alias of c[/b].ckpt", "", ""]
    assert (rows["weights.ckpt"][5], rows["z.ckpt"][5]) == ("full, not resumable", "full")
    done = command("verify", node.dirpath, "tiered:latest")
    assert (done.exit_code, done.stdout) == (0, verified(("intact", "durable", "c[/b].ckpt")))


def test_one_damaged_manifest_hides_no_other_checkpoint(node):
    DirectoryStore(node.dirpath).put(manifest_key("z.ckpt"), b"{")
    found = command("ls", node.dirpath)
    assert found.exit_code == 1
    assert listed(found)["z.ckpt"][-2] == "corrupt"
    assert listed(found)["z.ckpt"][-1].startswith("not JSON")
    assert listed(found)["c[/b].ckpt"][-1] == "latest"
    done = command("verify", node.dirpath)
    assert (done.exit_code, done.stdout.count("intact"), done.stdout.count("DAMAGED")) == (1, 4, 1)


def test_what_a_newer_release_wrote_may_be_the_latest(node):
    DirectoryStore(node.dirpath).put(manifest_key("z.ckpt"), dump({"name": "z.ckpt", "version": 99}))
    rows = listed(command("ls", node.dirpath))
    assert rows["z.ckpt"][-2] == "of a newer release"
    assert "latest" not in [row[-1] for row in rows.values()]
    done = command("verify", node.dirpath)
    assert (done.exit_code, done.stdout.count("DAMAGED")) == (1, 0)
    (line,) = [line for line in done.stdout.splitlines()[1:] if not line.startswith("intact")]
    assert line.startswith("NEWER\tdurable\tz.ckpt\t\t\tit needs a newer release: format version 99")
    assert command("verify", node.dirpath, "tiered:latest").exception.reason == "format"


def test_a_name_or_path_that_is_not_there_is_an_error_and_no_damage(node, tmp_path):
    missing = command("verify", node.dirpath, "never.ckpt")
    assert isinstance(missing.exception, CheckpointNotFoundError)
    assert "no such checkpoint: never.ckpt" in str(missing.exception)
    assert missing.stdout == ""
    for arguments in (("ls",), ("verify",), ("verify", "tiered:latest")):
        wrong = command(arguments[0], str(tmp_path / "mistyped"), *arguments[1:])
        assert isinstance(wrong.exception, CheckpointNotFoundError)
        assert "mistyped" in str(wrong.exception)
    (tmp_path / "empty").mkdir()
    assert listed(command("ls", str(tmp_path / "empty"))) == {}
    assert "no checkpoint to verify" in str(command("verify", str(tmp_path / "empty")).exception)
    for wrong in (("ls", node.dirpath, "--region", "eu-west-1"), ("verify", node.dirpath, "../x"), ("get",)):
        assert command(*wrong).exit_code == 2


def test_what_is_overwritten_while_it_is_read_is_not_damaged(node, monkeypatch):
    """A save of another run commits between two reads."""
    read = DirectoryStore.read_pieces

    def overwritten(store, key, *arguments):
        if key == "z.ckpt":
            manifest = read_manifest(store, "z.ckpt")
            other = part_of("z.ckpt", b"other", 9, node.dirpath)
            store.put("z.ckpt", b"?")
            store.put(manifest_key("z.ckpt"), replace(manifest, content=other.content).to_json())
        read(store, key, *arguments)

    monkeypatch.setattr(DirectoryStore, "read_pieces", overwritten)
    done = command("verify", node.dirpath, "z.ckpt", "--tier", "durable")
    assert done.stdout.splitlines()[1].startswith("changed\tdurable\tz.ckpt")


def test_on_a_real_server(s3_server, s3_bucket, memory_dir, monkeypatch):
    """By options alone; a bucket or prefix with nothing in it is an error, and so is a profile that is not there."""
    url = f"s3://{s3_bucket}/run"
    options = ("--endpoint-url", s3_server.endpoint_url, "--region", "us-east-1")
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)
    node = Node(memory_dir, url, endpoint_url=s3_server.endpoint_url)
    node.save("b.ckpt", b"B" * 5_000_000)
    node.save("a.ckpt", b"A")
    node.drain()
    assert list(listed(command("ls", url, *options))) == ["a.ckpt", "b.ckpt"]
    assert command("verify", url, *options).stdout == verified(
        ("intact", "durable", "a.ckpt"), ("intact", "durable", "b.ckpt")
    )
    assert command("verify", url, "tiered:latest", *options).stdout == verified(("intact", "durable", "a.ckpt"))
    assert isinstance(command("ls", url + "-mistyped", *options).exception, CheckpointNotFoundError)
    assert command("ls", "s3://no-such-bucket-here/run", *options).exception.reason == "config"
    assert "nobody" in str(command("ls", url, *options, "--profile", "nobody").exception)
