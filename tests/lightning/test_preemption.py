"""Jobs that are preempted, rank by rank: each ends within its grace time, and the next one resumes its last step."""

import functools

import pytest
from support.fault_proxy import FaultProxy, stall, where
from support.launch import free_port, said
from support.training import Runs, Told, durable, wipe

from tiered_checkpoint_io.callbacks import PreemptionCheckpoint, TieredModelCheckpoint
from tiered_checkpoint_io.callbacks.preemption import Preempted
from tiered_checkpoint_io.engine.save.saver import PartSave
from tiered_checkpoint_io.engine.staging import Capturer
from tiered_checkpoint_io.errors import ConfigError

GRACE_S = 20.0
further = functools.partial(pytest.param, marks=pytest.mark.matrix)


@pytest.fixture
def job(fits):
    """Trains with a last checkpoint, on several ranks, until the end or a signal; returns each rank's answers."""

    def job(*jobs, **more):
        config = {"memory_every_n_train_steps": 4, "s3_every_n_train_steps": None, "on_save_error": "warn"}
        callback = {"save_top_k": 0, "save_last": None, "monitor": None, "mode": "min"}
        common = {"strategy": "ddp", "steps": 10, "validation": 3, "signals": [], "callback": callback, **more}
        return fits(*(jobs or [{}]), **{**common, "config": {**config, **more.get("config", {})}})

    return job


def is_preempted(answer, within=GRACE_S):
    return answer["ended"] == "preempted" and (not answer["after"] or answer["after"] < within)


def goes_on(job, tmp_path, step, **more):
    """Compares the next start with an uninterrupted training."""
    again, whole = job({}, {"dirpath": str(tmp_path / "undisturbed"), "wipe": True}, **more)
    assert [answer["from"] for answer in again] == [["preempted.ckpt", step, "memory"]] * len(again)
    for answer, other in zip(again, whole, strict=True):
        assert [*answer["losses"]] == [*range(step, 10)]
        assert answer["losses"] == {at: other["losses"][at] for at in answer["losses"]}, "bit for bit"


@pytest.mark.parametrize(
    ("more", "signals"),
    [
        further({}, [[0, "train", 5], [1, "train", 6], [0, "train", 6]]),
        ({"signal": "SIGUSR1"}, [[1, "train", 5]]),
        further({"config": {"enable_async_checkpointing": False}}, [[0, "train", 5]]),
        further({"accumulate": 3, "batches": 36}, [[1, "train", 5]]),
        further({"strategy": "fsdp2"}, [[1, "train", 5]]),
        further({"strategy": "auto", "ranks": 1}, [[0, "train", 5]]),
    ],
    ids=["again", "SIGUSR1", "synchronous", "accumulating", "fsdp2", "one process"],
)
def test_all_ranks_stop_together_and_the_next_start_goes_on_from_there(job, tmp_path, more, signals):
    (answers,) = job(**more, signals=signals)
    step = answers[0]["step"]
    assert step in (6, 7), "the step that was under way, and at most one more"
    assert all(is_preempted(answer) and answer["step"] == step for answer in answers)
    assert answers[0]["code"] - 128 in (15, 10)
    assert durable(str(tmp_path / "durable")) == ["preempted.ckpt"]
    goes_on(job, tmp_path, step, **more)


@pytest.mark.matrix
def test_a_long_validation_is_not_waited_for(job, tmp_path):
    (answers,) = job(signals=[[1, "validation", 2]], validation=200, slow_validation=True)
    assert all(is_preempted(answer) and answer["step"] == 6 for answer in answers)
    goes_on(job, tmp_path, 6)


@pytest.mark.matrix
def test_a_signal_before_the_first_batch_or_at_the_end_hangs_no_rank(job):
    (answers,) = job(signals=[[0, "start", 0]])
    assert all(answer["ended"] == "preempted" and answer["step"] <= 2 for answer in answers)
    ((first, other),) = job(signals=[[1, "end", 0]], steps=8, on_exception=True)
    # That rank's script ends; the launcher ends the other one, which may have got no signal.
    assert (first["ended"], first["step"], other["step"]) == ("fit", 8, 8)
    assert is_preempted(other)


@pytest.mark.matrix
def test_without_s3_the_checkpoint_is_in_memory_within_the_grace_time_and_reaches_s3_later(
    job, tmp_path, memory_dir, s3_url, s3_server
):
    port = free_port()
    more = {"dirpath": s3_url, "config": {"endpoint_url": f"http://127.0.0.1:{port}", "drain": "process"}}
    (answers,) = job(signals=[[0, "train", 5]], grace=8.0, ckpt_path=None, **more)
    step = answers[0]["step"]
    assert all(is_preempted(answer, within=8.0) for answer in answers)
    assert "It stays in node memory, and the drain, a process of its own, uploads it; where" in said(tmp_path, 0)
    with FaultProxy(s3_server.endpoint_url, port=port):
        ((again, _),) = job(steps=step + 1, **more)
        assert again["from"] == ["preempted.ckpt", step, "memory"]
        assert durable(s3_url) == ["preempted.ckpt"]
        wipe(memory_dir)
        ((_, again),) = job(steps=step + 1, **more)
        assert again["from"] == ["preempted.ckpt", step, "durable"]


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"grace_seconds": 0}, ConfigError, "grace_seconds is 0"),
        ({"grace_seconds": float("nan")}, ConfigError, "grace_seconds is nan"),
        ({"signals": ["SIGHELLO"]}, ConfigError, "there is no signal 'SIGHELLO'"),
        ({"signals": ["SIGKILL"]}, ConfigError, "SIGKILL cannot be handled"),
        ({"signals": []}, ConfigError, "signals is empty"),
        ({"name": "../up"}, ConfigError, "up"),
    ],
)
def test_what_makes_no_sense_is_refused(options, error, says):
    with pytest.raises(error, match=says):
        PreemptionCheckpoint(**options)


def test_the_last_checkpoint_neither_waits_for_earlier_uploads_nor_gives_way_to_them(
    s3_url, s3_server, memory_dir, tmp_path, monkeypatch, caplog
):
    """Ordinary uploads stall; seen is the time that is left when the last checkpoint is captured."""
    left, fill, preemption = [], Capturer.fill, PreemptionCheckpoint(grace_seconds=6.0)

    def filling(capturer, *args, **options):
        left.append(preemption.notice.left_s(io.checkpointer.session))
        return fill(capturer, *args, **options)

    monkeypatch.setattr(Capturer, "fill", filling)
    callback = TieredModelCheckpoint(s3_every_n_train_steps=2, save_top_k=-1, filename="{step}")
    with FaultProxy(s3_server.endpoint_url, where(stall, key="step")) as proxy:
        runs = Runs(s3_url, memory_dir, tmp_path)
        io = runs.io(endpoint_url=proxy.endpoint_url, max_pending=2)
        with pytest.raises(Preempted):
            runs.fit(callback, preemption, model=Told(5), io=io, ckpt_path=None)
    assert left[-1] > 3, "the grace time was waited away before the state was captured"
    pending = [each.name for each in io.checkpointer.session.standing().pending]
    assert pending == ["step=2.ckpt", "step=4.ckpt", "preempted.ckpt"]
    assert not [line for line in caplog.messages if "preempted.ckpt stays in memory" in line]


@pytest.mark.parametrize("staging", [further("eager"), "overlapped"])
def test_a_last_checkpoint_that_fails_is_not_said_to_be_there(staging, runs, monkeypatch, caplog):
    caplog.set_level("INFO")
    seal = PartSave.seal

    def fails(part, *args, **options):
        if part.facts.name == "preempted.ckpt":
            raise OSError("no such device")
        seal(part, *args, **options)

    monkeypatch.setattr(PartSave, "seal", fails)
    callback = TieredModelCheckpoint(memory_every_n_train_steps=2, save_top_k=0)
    with pytest.raises(Preempted):
        runs.fit(callback, PreemptionCheckpoint(), model=Told(5), io=runs.io(staging=staging), ckpt_path=None)
    assert not [line for line in caplog.messages if "the last checkpoint is" in line]
    assert "Step 5: there is no last checkpoint: it was not saved" in caplog.messages
    assert runs.durable() == []
