"""Defects of NeMo's own S3CheckpointIO that ours does not have: one test for each."""

import pytest
import torch
from support.fault_proxy import FaultProxy, refuse
from support.nemo_training import io_of, restored
from support.supporting import build

from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.nemo import S3CheckpointIO, S3Utils


def state(step):
    return {"global_step": step, "w": torch.full((1000,), float(step))}


@pytest.fixture
def io(runs):
    made = S3CheckpointIO(runs.dirpath, async_checkpointing=True, **runs.io)
    yield made
    made.teardown()


def test_a_failed_upload_is_reported_and_never_leaves_an_empty_bucket(runs, s3_server):
    """NeMo, asynchronous: the caller removes the old one, nothing is raised, and nothing is left."""
    broken = False

    def plan(operation, _):
        return refuse(403, "AccessDenied") if broken and operation in ("put", "part", "create") else None

    with FaultProxy(s3_server.endpoint_url, plan) as proxy:
        options = {**runs.io, "wait_timeout_s": 4, "endpoint_url": proxy.endpoint_url}
        io = build(S3CheckpointIO, runs.dirpath, async_checkpointing=True, **options)
        io.save_checkpoint(state(1), f"{runs.dirpath}/step=1.ckpt")
        io.checkpointer.session.wait(60)
        broken = True
        io.save_checkpoint(state(2), f"{runs.dirpath}/step=2.ckpt")
        io.remove_checkpoint(f"{runs.dirpath}/step=1.ckpt")
        with pytest.raises(SaveError, match=r"step=2\.ckpt did not reach the durable tier|queued checkpoint"):
            io.teardown()
        assert runs.objects() == runs.durable() == ["step=1.ckpt"]
        # And the new one is not lost: it waits in node memory, and goes out once that is possible.
        broken = False
        assert io.load_checkpoint("tiered:latest")["global_step"] == 2
        io.checkpointer.session.wait(60)
        io.teardown()
    assert runs.durable() == ["step=2.ckpt"]


def test_an_end_is_resumed_from(runs):
    """NeMo, with resume_past_end and one end.ckpt: ckpt_path is None, and training starts from scratch."""
    trainer, _ = runs.fit(max_steps=5)
    torch.save(io_of(trainer).load_checkpoint("tiered:latest"), "end.ckpt")
    io_of(trainer).teardown()
    theirs = runs.dirpath + "-theirs"
    S3Utils.upload_file("end.ckpt", f"{theirs}/gpt--step=5--end.ckpt")
    again = type(runs)(theirs, runs.memory_dir, runs.root + "-2", namespace="theirs")
    trainer, module = again.fit({"exp_manager": {"resume_past_end": True}}, max_steps=7)
    assert restored(trainer)[:2] == ("gpt--step=5--end.ckpt", 5)
    assert min(module.seen) == 5


def test_a_save_lists_nothing_and_the_old_last_stays_until_the_new_one_is_durable(runs, s3_server):
    """NeMo: lists, and deletes ``last`` checkpoints of the same step, before each upload."""
    seen, broken = [], False

    def plan(operation, _):
        seen.append(operation)
        return refuse(403, "AccessDenied") if broken and operation == "put" else None

    with FaultProxy(s3_server.endpoint_url, plan) as proxy:
        io = build(S3CheckpointIO, runs.dirpath, endpoint_url=proxy.endpoint_url, drain="thread", **runs.io)
        path = f"{runs.dirpath}/gpt--step=900-val_loss=6.47-last.ckpt"
        io.save_checkpoint(state(1), path)
        seen.clear()
        io.save_checkpoint(state(2), path)
        assert "list" not in seen
        broken = True
        with pytest.raises(SaveError):
            io.save_checkpoint(state(3), path.replace("6.47", "6.46"))
        assert runs.objects() == [path.rpartition("/")[2]]
        runs.wipe()
        assert io.load_checkpoint(path)["global_step"] == 2
        io.teardown()
