"""The command that uploads checkpoints that are only in node memory, because the node is about to go."""

import os
import shutil
from dataclasses import replace

import pytest
from support import committing
from support.documented import command, document_of
from support.draining import Node
from support.sharded import make_part
from support.supporting import build

from tiered_checkpoint_io import TieredCheckpointIO
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.durable.lease import holder_of
from tiered_checkpoint_io.engine.durable.manifests import names_of, read_manifest
from tiered_checkpoint_io.errors import CheckpointNotFoundError, ConfigError, DrainError
from tiered_checkpoint_io.inventory.node import to_flush
from tiered_checkpoint_io.model.ids import manifest_key
from tiered_checkpoint_io.stores.directory import DirectoryStore


def flushed(node, *arguments):
    done = command("flush", *arguments, *node.where, "--json")
    document = document_of("flush", done)
    assert document["flushed"] == (done.exit_code == 0)
    return done, {row["name"]: row["state"] for row in document["checkpoints"]}


def test_the_newest_step_in_memory_becomes_durable_with_the_trainer_dead(node):
    """Also if no drain ever ran over this memory."""
    node.save("old.ckpt", b"O", durable=False)
    node.save("new.ckpt", b"N" * 100, durable=False)
    node.save("weights.ckpt", b"W", durable=False, resumable=False)
    os.unlink(node.root / "drain.json")
    done, states = flushed(node)
    assert (done.exit_code, states) == (0, {"new.ckpt": "durable"})
    store = DirectoryStore(node.dirpath)
    assert store.get("new.ckpt") == b"N" * 100
    assert read_manifest(store, "old.ckpt") is None
    # Once more: there is nothing to do, and that is no error.
    again = command("flush", *node.where)
    assert again.exit_code == 0
    assert [line.split("\t")[0] for line in again.stdout.splitlines()] == ["name", "new.ckpt"]
    assert flushed(node, "--all")[1] == {"old.ckpt": "durable", "new.ckpt": "durable", "weights.ckpt": "durable"}
    assert command("verify", node.dirpath, "--tier", "durable").exit_code == 0


def test_what_can_not_be_uploaded_stays_queued_and_is_said(node, tmp_path):
    missing = command("flush", *node.where)
    assert isinstance(missing.exception, CheckpointNotFoundError)
    node.save("a.ckpt", b"A", durable=False)
    assert "no such checkpoint: b.ckpt" in str(command("flush", "b.ckpt", *node.where).exception)
    for wrong in ("a.ckpt --all", "--stay a.ckpt", "--stay --all", "--stay --json", "--stay --ended"):
        assert command("flush", *wrong.split(), *node.where).exit_code == 2
    # A file is in the place of the durable tier's directory.
    (tmp_path / "run").write_text("in the way")
    done, states = flushed(node)
    assert states == {"a.ckpt": "waiting"}
    assert isinstance(done.exception, DrainError)
    assert "a.ckpt did not reach the durable tier" in str(done.exception)
    (tmp_path / "run").unlink()
    assert flushed(node)[1] == {"a.ckpt": "durable"}


@pytest.mark.parametrize("everything", [[], ["--all"]])
def test_where_the_newest_is_damaged_the_one_before_is_uploaded_and_the_status_is_1(everything, node):
    for name in ("oldest.ckpt", "old.ckpt", "newest.ckpt"):
        node.save(name, b"A" * 100, durable=False)
    (held,) = node.root.glob("saves/*/*/newest.ckpt")
    held.write_bytes(b"?" * 100)
    done, states = flushed(node, *everything)
    more = {"oldest.ckpt": "durable"} if everything else {}
    assert (done.exit_code, states) == (1, {"newest.ckpt": "corrupt", "old.ckpt": "durable", **more})
    assert names_of(DirectoryStore(node.dirpath)) == {"old.ckpt", *more}
    # The part is in quarantine: there is no more work, and every loss was reported.
    assert flushed(node)[0].exit_code == 0


def test_a_part_is_durable_only_once_the_other_nodes_have_sent_theirs(node):
    """The coordinator's drain is overwriting the name, and has sent all but the file that makes it the new one."""
    store = DirectoryStore(node.dirpath)
    committing.save(store, "s", 1, kind="sharded")
    committing.begin_overwrite(store, "s", 2, kind="sharded")
    part, files = make_part("s", 2, 1, suffix=f"-{2:08d}", dirpath=node.dirpath)
    node.queue.finish(Outcome(node.tier.commit(part, files, drained=True).op_id, "part", "s", 2, "committed"))
    done, states = flushed(node)
    assert (done.exit_code, states) == (0, {"s": "incomplete"})
    assert "1 of 2 parts on this node" in command("flush", *node.where).stdout
    committing.save(store, "s", 2, kind="sharded")
    assert flushed(node)[1] == {"s": "durable"}


def test_what_is_not_on_the_durable_tier_any_more_is_uploaded_again(node):
    """The bucket was emptied or replaced since, and only this node's memory has the checkpoint."""
    node.save("a.ckpt", b"A")
    assert flushed(node)[1] == {"a.ckpt": "durable"}
    shutil.rmtree(node.dirpath)
    done, states = flushed(node)
    assert (done.exit_code, states) == (0, {"a.ckpt": "durable"})
    store = DirectoryStore(node.dirpath)
    assert store.get("a.ckpt") == b"A"
    assert command("verify", node.dirpath, "--tier", "durable").exit_code == 0
    # A later checkpoint of another run stays.
    committed = read_manifest(store, "a.ckpt")
    other = replace(committed, content=replace(committed.content, save_id=f"{committed.content.save_id[:-1]}9"))
    store.put(manifest_key("a.ckpt"), other.to_json())
    done, states = flushed(node)
    assert (done.exit_code, states) == (1, {"a.ckpt": "memory_only"})
    assert read_manifest(store, "a.ckpt") == other


def test_which_saves_are_flushed(memory_dir):
    node = Node(memory_dir, "s3://bucket/run")
    for number, rank in ((1, 0), (1, 1), (2, 0)):
        node.part(f"step_{number}", number, rank)
    # Down to the newest save that is complete here.
    assert [save.name for save in to_flush(node.tier.parts())] == ["step_2", "step_1"]
    node.save("full.ckpt", b"F")
    # Each payload is looked for apart.
    assert [save.name for save in to_flush(node.tier.parts())] == ["full.ckpt", "step_2", "step_1"]
    for rank in (1, 2):
        node.part("step_4", 4, rank, world_size=3)
    # This node does not know whether a save of several nodes is complete.
    chosen = {save.name: save.missing for save in to_flush(node.tier.parts())}
    assert chosen == {"step_4": [0], "full.ckpt": [], "step_2": [1], "step_1": []}
    assert [save.name for save in to_flush(node.tier.parts(), name="step_2")] == ["step_2"]
    # Of process groups, all that was saved at one step.
    for number, group in enumerate(("tp0", "tp1", "tp2"), 5):
        for rank in (0, 1) if group != "tp2" else (0,):
            part, files = make_part(f"{group}/step_5", number, rank, dirpath=node.dirpath)
            node.tier.commit(replace(part, content=replace(part.content, step=5)), files)
    node.part("local", 9, 0, kind="local", world_size=1)
    chosen = [save.name for save in to_flush(node.tier.parts())]
    assert chosen[:4] == ["local", "tp2/step_5", "tp1/step_5", "tp0/step_5"]


def test_with_a_save_goes_all_of_its_step(node):
    """NeMo's averages are saved before the weights, and a restart takes no weights without them."""
    for step in (80, 90):
        for name in (f"step={step}-EMA.ckpt", f"step={step}.ckpt", f"mp_rank_01/step={step}.ckpt"):
            # Training can't resume from only averages, without optimizers.
            node.save(name, b"A" * 100, durable=False, step=step, resumable="EMA" not in name)
    # A name may have been saved twice at one step.
    node.save("step=90.ckpt", b"B" * 100, durable=False, step=90)
    newest = {"step=90.ckpt", "mp_rank_01/step=90.ckpt", "step=90-EMA.ckpt"}
    assert {save.name for save in to_flush(node.tier.parts(), name="step=90.ckpt")} == newest
    assert sorted(save.name for save in to_flush(node.tier.parts())) == sorted(newest)
    (held,) = node.root.glob("saves/*/*/step=90-EMA.ckpt")
    held.write_bytes(b"?" * 100)
    done, states = flushed(node)
    # Without its averages, step 90 is none that a restart takes.
    assert (done.exit_code, states.pop("step=90-EMA.ckpt")) == (1, "corrupt")
    before = {name.replace("90", "80") for name in newest}
    assert states == dict.fromkeys((newest | before) - {"step=90-EMA.ckpt"}, "durable")
    assert read_manifest(DirectoryStore(node.dirpath), "step=90.ckpt").content.size == 100


def test_while_a_run_of_another_job_is_there_nothing_is_written(node, memory_dir):
    node.save("step=1.ckpt", b"A", durable=False)
    io = build(TieredCheckpointIO, dirpath=node.dirpath, memory_dir=memory_dir, namespace="live", drain="thread")
    io.save_checkpoint({"global_step": 2}, f"{node.dirpath}/step=2.ckpt")
    store = DirectoryStore(node.dirpath)
    done = command("flush", *node.where)
    assert isinstance(done.exception, ConfigError)
    assert f"another run writes to the same dirpath: process {os.getpid()}" in str(done.exception)
    assert (names_of(store), [each.pending for each in node.tier.parts()]) == ({"step=2.ckpt"}, [False])
    io.teardown()
    assert command("flush", *node.where).exit_code == 0
    assert names_of(store) == {"step=1.ckpt", "step=2.ckpt"}
    assert holder_of(store) is None, "its lease is given back"


def test_a_jobs_epilog_leaves_the_jobs_alone_that_still_run(memory_dir, tmp_path):
    def epilog(name):
        done = command("flush", "--ended", "--memory-dir", memory_dir, "--namespace", name, "--json")
        assert done.exit_code == 0, done.exception
        return [row["state"] for row in document_of("flush", done)["checkpoints"]]

    jobs = {}
    for name in ("ended", "live"):
        run = str(tmp_path / name)
        jobs[name] = build(TieredCheckpointIO, dirpath=run, memory_dir=memory_dir, drain="thread", namespace=name)
        jobs[name].save_checkpoint({"global_step": 1}, f"{run}/step=1.ckpt", storage_options={"tiers": ["memory"]})
    jobs["ended"].teardown()
    assert {name: epilog(name) for name in jobs} == {"ended": ["durable"], "live": []}
    assert names_of(DirectoryStore(str(tmp_path / "live"))) == set()
    shown = command("flush", "--ended", "--memory-dir", memory_dir, "--namespace", "live").stdout
    assert shown == "live: left to its trainer, which is alive\n"
    jobs["live"].teardown()
    assert epilog("live") == ["durable"]
