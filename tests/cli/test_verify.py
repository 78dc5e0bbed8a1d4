"""The command that verifies both tiers, and how it shows its progress."""

import pytest
from support.documented import command, document_of
from support.draining import part_of
from support.restoring import flip

from tiered_checkpoint_io.errors import CheckpointNotFoundError, StoreError
from tiered_checkpoint_io.stores.directory import DirectoryStore


@pytest.fixture
def node(node):
    """Makes checkpoints: one on both tiers, one of two ranks on both, one only in memory, and a replica."""
    node.save("a.ckpt", b"A" * 100)
    for rank in (0, 1):
        node.part("b", 2, rank)
    node.drain()
    node.save("c.ckpt", b"C" * 100, durable=False)
    slot = node.tier.replicas.acquire(3)
    slot.view[:3] = b"DDD"
    node.tier.replicas.commit(part_of("d.ckpt", b"DDD", 9, node.dirpath), {"d.ckpt": slot})
    return node


def verified(node, *arguments):
    done = command("verify", node.dirpath, *node.where, "--json", *arguments)
    document = document_of("verify", done)
    assert document["intact"] == (done.exit_code == 0)
    return done.exit_code, document["checkpoints"]


def test_damage_is_named_by_file_tier_and_rank(node, tmp_path):
    status, rows = verified(node)
    copies = {(row["name"], row["tier"], row["rank"], row["copy"]) for row in rows}
    assert status == 0
    assert {row["state"] for row in rows} == {"intact"}
    assert copies == {
        *((name, "durable", None, None) for name in ("a.ckpt", "b")),
        *(("b", "memory", rank, "own") for rank in (0, 1)),
        *((name, "memory", 0, "own") for name in ("a.ckpt", "c.ckpt")),
        ("d.ckpt", "memory", 0, "replica"),
    }
    (held,) = node.root.glob("saves/*/rank-00000/c.ckpt")
    (copy,) = node.root.glob("replicas/*/rank-00000/d.ckpt")
    shard = tmp_path / "run" / "b" / "__1_1.distcp"
    for path in (held, copy, shard):
        flip(path, 0)
    status, rows = verified(node)
    damaged = {row["file"]: (row["tier"], row["rank"], row["copy"]) for row in rows if row["state"] == "damaged"}
    assert status == 1
    assert damaged == {
        str(held): ("memory", 0, "own"),
        str(copy): ("memory", 0, "replica"),
        str(shard): ("durable", 1, None),
    }
    lines = command("verify", node.dirpath, *node.where).stdout.splitlines()
    (line,) = [line for line in lines if "c.ckpt" in line]
    assert line == f"DAMAGED\tmemory\tc.ckpt\t0\town\t{held}: bytes 0-100 of 'c.ckpt' differ from their hash"
    # verify does not move damaged parts: a restart quarantines them, and looks for the next copy.
    assert held.exists()


def test_one_checkpoint_by_its_url_whose_file_is_too_long_or_short(node, tmp_path):
    node.alias("last.ckpt", "a.ckpt")
    node.drain()
    for damaged in (b"A" * 99, b"A" * 101):
        (tmp_path / "run" / "a.ckpt").write_bytes(damaged)
        # The form of a callback's best_model_path.
        found = command("verify", node.dirpath, f"{node.dirpath}/last.ckpt", "--tier", "durable")
        assert (found.exit_code, found.stdout.count("DAMAGED\tdurable\tlast.ckpt\t")) == (1, 1)


def test_one_tier_and_one_checkpoint(node):
    assert [row["tier"] for row in verified(node, "--tier", "memory")[1]] == ["memory"] * 5
    assert [row["tier"] for row in verified(node, "--tier", "durable")[1]] == ["durable"] * 2
    assert [(row["name"], row["tier"]) for row in verified(node, "a.ckpt")[1]] == [
        ("a.ckpt", "memory"),
        ("a.ckpt", "durable"),
    ]
    # A restart takes the replica: it is the latest save.
    assert [row["name"] for row in verified(node, "tiered:latest")[1]] == ["d.ckpt"]
    alone = command("verify", *node.where)
    assert (alone.exit_code, alone.stdout.count("memory\t"), alone.stdout.count("durable")) == (0, 5, 0)
    assert command("verify", "--tier", "durable").exit_code == 2
    missing = command("verify", node.dirpath, "never.ckpt", *node.where)
    assert isinstance(missing.exception, CheckpointNotFoundError)


def test_what_can_not_be_read_of_one_checkpoint_does_not_end_it(node, tmp_path, monkeypatch):
    node.alias("last.ckpt", "a.ckpt")
    node.drain()
    read, where = DirectoryStore.read_pieces, str(tmp_path / "run")

    def read_pieces(store, key, *arguments, **options):
        if key.startswith("b/"):
            raise StoreError("it is in an archive", operation="read", tier="durable", key=key, reason="archived")
        return read(store, key, *arguments, **options)

    monkeypatch.setattr(DirectoryStore, "read_pieces", read_pieces)
    (tmp_path / "run" / ".tiered" / "manifests" / "a.ckpt.json").write_text("{")
    assert command("flush", "c.ckpt", *node.where).exit_code == 0
    status, rows = verified(node, "--tier", "durable")
    assert (status, {row["name"]: row["state"] for row in rows}) == (
        1,
        {"a.ckpt": "damaged", "last.ckpt": "damaged", "b": "damaged", "c.ckpt": "intact"},
    )
    errors = {row["name"]: row["error"] for row in rows}
    assert "it is in an archive" in errors["b"] and where in errors["last.ckpt"]
    assert command("verify", node.dirpath, "c.ckpt", "--tier", "durable").exit_code == 0


def test_progress_in_lines_has_rate_and_time_left(node, monkeypatch):
    monkeypatch.setattr("tiered_checkpoint_io.cli.output.EVERY_S", 0.0)
    said = command("verify", node.dirpath, *node.where).stderr.splitlines()
    assert any(line.startswith("memory: 0.10 KiB of ") and line.endswith(" s left") for line in said), said
    assert said[-1].startswith("durable tier: ") and "/s, 0 s left" in said[-1]
    assert command("verify", node.dirpath, *node.where, "--json").stderr == ""
