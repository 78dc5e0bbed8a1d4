"""An overlapped capture, without a Trainer: what its save promises when training goes on before the copy is done."""

import threading
import time
import weakref
from collections import OrderedDict, UserDict

import pytest
import torch
from support.supporting import build
from torch.testing._internal.two_tensor import TwoTensor

from tiered_checkpoint_io import TieredStorageWriter, dcp
from tiered_checkpoint_io.adapters.sizes import tensors_of_optimizers
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.operations import Outcome
from tiered_checkpoint_io.engine.save.overlap import CHECK, Overlap
from tiered_checkpoint_io.engine.save.part import PartSave
from tiered_checkpoint_io.engine.staging.latch import Latch
from tiered_checkpoint_io.errors import SaveError
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

ROWS = 1 << 15


class Job:
    """A state that a test changes, and saves whose copy begins when the test says so."""

    def __init__(self, memory_dir, tmp_path, **options):
        config = build(
            TieredCheckpointConfig.from_any,
            dirpath=str(tmp_path),
            memory_dir=memory_dir,
            staging="overlapped",
            drain="thread",
            **options,
        )
        self.checkpointer = Checkpointer(config)
        self.weight = torch.zeros(ROWS)
        self.more = {}
        self.overlap = self.checkpointer.saver.overlap = Overlap(self.checkpointer.session, lambda: [self.weight])
        self.may_copy = threading.Event()

    def save(self, step, *, tiers=("memory", "durable")):
        state = {"w": self.weight, "global_step": step, **self.more}
        return self.checkpointer.save(state, f"step={step}.ckpt", tiers=tiers, wait=False)

    def go_on(self):
        """As a trainer before its optimizers step."""
        self.may_copy.set()
        self.overlap.wait()

    def said(self, caplog):
        return [record.getMessage() for record in caplog.records]


@pytest.fixture
def job(memory_dir, tmp_path, monkeypatch):
    made = []
    fill = PartSave.fill

    def later(part, *, hashed=True):
        if threading.current_thread().name.startswith("tiered-seal"):
            assert made[0].may_copy.wait(20)
        fill(part, hashed=hashed)

    def start(**options):
        made.append(Job(memory_dir, tmp_path, **options))
        return made[0]

    monkeypatch.setattr(PartSave, "fill", later)
    yield start
    for each in made:
        each.may_copy.set()
        each.checkpointer.close()


def test_what_follows_a_save_comes_behind_it_and_its_line_tells_copy_from_stall(job, caplog):
    caplog.set_level("INFO")
    job = job()
    report = job.save(1)
    assert report.overlapped
    assert not job.overlap._current.copied.is_set()
    job.checkpointer.alias("last.ckpt", "step=1.ckpt")
    job.checkpointer.remove("step=1.ckpt")
    job.go_on()
    job.weight.fill_(7.0)
    loaded = job.checkpointer.load("last.ckpt")
    assert (loaded["global_step"], loaded["w"].sum()) == (1, 0)
    (line,) = [line for line in job.said(caplog) if "saved step=1.ckpt" in line]
    assert "beside training, which waited" in line


def test_an_alias_of_a_durable_save_that_failed_in_the_background_is_not_set(job, monkeypatch, caplog):
    job = job()
    job.save(1)
    job.checkpointer.alias("last.ckpt", "step=1.ckpt")
    job.go_on()
    assert job.checkpointer.load("last.ckpt")["global_step"] == 1
    seal, given_back = PartSave.seal, PartSave.give_back

    def fails(part, *args, **options):
        if part.facts.step == 2:
            raise OSError("no such device")
        seal(part, *args, **options)

    def cannot(part):
        given_back(part)
        raise OSError("nor can it be given back")

    monkeypatch.setattr(PartSave, "seal", fails)
    monkeypatch.setattr(PartSave, "give_back", cannot)
    job.may_copy.clear()
    job.save(2)
    job.checkpointer.alias("last.ckpt", "step=2.ckpt")
    job.checkpointer.remove("step=1.ckpt")
    job.go_on()
    with pytest.raises(OSError, match="given back"):
        job.checkpointer.saver.show()
    monkeypatch.setattr(PartSave, "give_back", given_back)
    assert job.checkpointer.load("last.ckpt")["global_step"] == 1
    said = job.said(caplog)
    assert [line for line in said if "no such device" in line]
    assert [line for line in said if "last.ckpt stays as it is: the durable tier does not get step=2.ckpt" in line]
    # The next one that gets there ends that.
    job.save(3)
    job.checkpointer.alias("last.ckpt", "step=3.ckpt")
    assert job.checkpointer.load("last.ckpt")["global_step"] == 3


def test_a_change_that_leaves_no_trace_is_found_by_the_check(job, monkeypatch, caplog):
    monkeypatch.setenv(CHECK, "1")
    caplog.set_level("INFO")
    job = job()
    job.save(1)
    # Neither a counter, nor an address, nor the bytes that are looked at.
    job.weight.data[5] = 1.0
    job.go_on()
    job.checkpointer.saver.show()
    assert [line for line in job.said(caplog) if f"is not what it was when the save began ({CHECK})" in line]
    second = job.save(2)
    assert (second.tiers, second.overlapped) == ({"memory", "durable"}, False)
    assert [line for line in job.said(caplog) if line.endswith("a capture has found the state changed")]
    assert job.checkpointer.load("tiered:latest")["global_step"] == 2


def test_a_save_that_memory_has_no_room_for_fails_before_it_returns(job, monkeypatch, caplog):
    monkeypatch.setattr("tiered_checkpoint_io.engine.session.node_budget", lambda *_: 1 << 14)
    job = job(spill_dir=None)
    assert job.save(1) is None
    assert job.checkpointer.session.counts["failed"] == 1
    assert [line for line in job.said(caplog) if "name a spill_dir" in line]


def test_an_upload_that_failed_is_seen_beside_a_save_and_raised_once_by_the_next(job, caplog):
    job = job(on_save_error="raise")
    for step in range(1, 4):
        # From the third on, a save waits for nothing but its copies.
        job.save(step, tiers=["memory"])
        job.go_on()
    session = job.checkpointer.session
    queue, op_id = session.open().drain.queue, session.save_ids.next()
    queue.finish(Outcome(op_id, "save", "lost.ckpt", 3, "failed", "no bucket"), final=False)
    assert job.save(4, tiers=["memory"]).overlapped
    assert "no bucket" not in caplog.text
    job.go_on()
    session.background.wait()
    assert caplog.text.count("no bucket") == 1
    with pytest.raises(SaveError, match="no bucket"):
        job.save(5, tiers=["memory"])
    assert job.save(6, tiers=["memory"]).step == 6
    job.go_on()
    assert session.counts["failed"] == 1


def test_uploads_that_failed_are_seen_though_no_save_comes_to_an_end(job, monkeypatch, caplog):
    job = job()
    job.save(1, tiers=["memory"])
    job.go_on()
    session = job.checkpointer.session
    queue, op_id = session.open().drain.queue, session.save_ids.next()

    def fail(*_, **__):
        raise OSError("no pages")

    monkeypatch.setattr(PartSave, "fill", fail)
    job.save(2, tiers=["memory"])
    queue.finish(Outcome(op_id, "save", "lost.ckpt", 1, "failed", "no bucket"), final=False)
    job.save(3, tiers=["memory"])
    assert caplog.text.count("no bucket") == 1


def test_who_waits_for_an_upload_is_told_of_it_once(job, monkeypatch, caplog):
    caplog.set_level("INFO")
    job = job()
    seal = PartSave.seal

    def uploaded(part, *arguments):
        seal(part, *arguments)
        queue = part.session.open().drain.queue
        deadline = time.monotonic() + 20
        while queue.outcome(part.facts.save_id) is None and time.monotonic() < deadline:
            time.sleep(0.01)

    monkeypatch.setattr(PartSave, "seal", uploaded)
    job.checkpointer.save({"w": job.weight, "global_step": 1}, "step=1.ckpt", wait=True)
    assert job.checkpointer.session.poll() == []
    assert caplog.text.count("durable on") <= 1


def test_what_changes_right_after_a_save_is_not_in_it_however_it_is_planned(job):
    job = job(memory_keep_last=100)
    job.may_copy.set()
    noted, extra, expected = {"losses": [0.5]}, torch.zeros(4), {}
    job.more = {"noted": noted, "extra": extra}
    for step in range(1, 9):
        if step == 6:
            # Larger than the slot that was taken for it.
            job.weight = torch.zeros(3 * ROWS)
        job.may_copy.clear()
        expected[step] = (list(noted["losses"]), float(extra.sum()), len(job.weight))
        report = job.save(step, tiers=["memory"])
        assert report.overlapped
        noted["losses"].append(step)
        extra.fill_(step)
        job.go_on()
        job.weight.fill_(float(step))
    for step, (losses, total, length) in expected.items():
        loaded = job.checkpointer.load(f"step={step}.ckpt")
        assert (loaded["noted"]["losses"], loaded["extra"].sum(), len(loaded["w"])) == (losses, total, length)
        assert (loaded["w"] == (0 if step == 6 else step - 1)).all(), step
    assert job.checkpointer.saver._layouts.reused > 3, "most are planned from what was kept"


def test_what_is_replaced_or_resized_right_after_a_save_is_in_it_as_it_was(job):
    """As a callback does it that keeps an average: ``average.data = ...``."""
    job = job(memory_keep_last=100)
    replaced, resized, cut = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    job.more = {"replaced": replaced, "resized": resized, "cut": cut, "trained": torch.zeros(2)}
    for step in range(1, 7):
        job.may_copy.clear()
        wanted = {name: each.clone() for name, each in job.more.items()}
        assert job.save(step, tiers=["memory"]).overlapped
        replaced.data = replaced.data + 1
        resized.set_(torch.zeros(9))
        cut.data = cut.data[:3]
        job.more["trained"].requires_grad_()
        job.go_on()
        loaded = job.checkpointer.load(f"step={step}.ckpt")
        assert all(torch.equal(loaded[name], each) for name, each in wanted.items()), step
        assert not loaded["trained"].requires_grad
        resized.set_(torch.zeros(4))
        cut.set_(torch.zeros(4))
        job.more["trained"].requires_grad_(False)
    assert job.checkpointer.saver._layouts.reused > 3, "most are planned from what was kept"


@pytest.mark.parametrize(
    "uncommon",
    [torch.eye(3).to_sparse(), torch.ones(2, dtype=torch.complex64).conj(), torch.ones(2).to(torch.float8_e4m3fn)],
)
def test_a_tensor_of_an_uncommon_kind_may_come_between_two_saves(job, uncommon):
    job = job(memory_keep_last=100)
    job.may_copy.set()
    for step in range(1, 7):
        job.save(step, tiers=["memory"])
        job.go_on()
        loaded = job.checkpointer.load(f"step={step}.ckpt")
        assert loaded["global_step"] == step
        assert step < 5 or loaded["more"].to_dense().tolist() == uncommon.to_dense().tolist()
        job.more = {"more": uncommon} if step > 3 else {}


def test_no_copy_is_kept_once_it_is_saved(job, monkeypatch):
    job, clone, copies = job(memory_keep_last=100), torch.UntypedStorage.clone, []

    def noted(storage):
        copies.append(weakref.ref(copy := clone(storage)))
        return copy

    monkeypatch.setattr(torch.UntypedStorage, "clone", noted)
    job.may_copy.set()
    job.more = {"average": torch.zeros(ROWS // 4)}
    for step in range(1, 7):
        job.may_copy.clear()
        assert job.save(step, tiers=["memory"]).overlapped
        assert copies
        job.go_on()
        job.checkpointer.saver.show()
        # The thread that has saved it is about to forget it.
        end = time.monotonic() + 10
        while any(each() is not None for each in copies):
            assert time.monotonic() < end, step
            time.sleep(0.01)


class Quantized(torch.optim.Optimizer):
    """Its state is of tensors that are made of others, as that of an optimizer in 8 bits is."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for each in self.param_groups[0]["params"]:
            codes = self.state[each].setdefault("codes", TwoTensor(torch.zeros(4), torch.zeros(4)))
            codes.a.add_(1)
            each.data.add_(1)


@pytest.mark.parametrize("check", ["", "1"])
def test_an_optimizer_may_hold_tensors_without_memory_of_their_own(job, monkeypatch, check):
    monkeypatch.setenv(CHECK, check)
    made = job(memory_keep_last=100)
    made.may_copy.set()
    freed, weights = torch.nn.Parameter(torch.zeros(8)), [torch.nn.Parameter(torch.zeros(64)) for _ in range(4)]
    freed.untyped_storage().resize_(0)
    optimizer = Quantized(weights)
    made.overlap._tensors = lambda: [*tensors_of_optimizers([optimizer]), freed]
    for step in range(1, 5):
        made.more = {"weights": [each.detach() for each in weights], "optimizer": optimizer.state_dict()}
        made.weight = weights[0].detach()
        made.save(step, tiers=["memory"])
        made.go_on()
        optimizer.step()
        loaded = made.checkpointer.load(f"step={step}.ckpt", weights_only=False)
        assert [each[0] for each in loaded["weights"]] == [step - 1] * 4
        assert [each["codes"].a[0] for each in loaded["optimizer"]["state"].values()] == [step - 1] * (4 * (step > 1))


def test_a_save_is_eager_where_an_optimizer_holds_what_has_no_memory_of_its_own(job, caplog):
    caplog.set_level("INFO")
    job = job(memory_keep_last=100)
    kept = job.overlap._tensors
    job.overlap._tensors = lambda: [*kept(), torch.eye(3).to_sparse()]
    for step in range(1, 5):
        assert not job.save(step, tiers=["memory"]).overlapped
        assert job.checkpointer.load(f"step={step}.ckpt")["global_step"] == step
    assert caplog.text.count("it holds what can't be copied as it is") == 1


def test_sharded_and_local_saves_are_eager_which_is_said_once(memory_dir, tmp_path, caplog):
    caplog.set_level("INFO")
    options = {"dirpath": str(tmp_path), "memory_dir": memory_dir, "staging": "overlapped", "drain": "thread"}
    writer = build(TieredStorageWriter, **options, wait=True)
    for kind in ("sharded", "local"):
        for step in (1, 2):
            state, name = {"w": torch.zeros(8)}, f"{kind}/step_{step}"
            dcp.save(state, checkpoint_id=name, storage_writer=writer, no_dist=True, kind=kind)
    writer.close()
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "of sharded and local checkpoints, only asynchronous ones" in line]) == 1


def test_what_is_captured_later_of_a_sharded_state_is_the_optimizers_own(job, caplog):
    """All else is a copy, in DCP's containers and within what it pickles; without one, the save is eager."""
    made = job()
    weight, frozen, inner = made.weight, torch.zeros(4), torch.zeros(2)
    state = {
        "model": OrderedDict(weight=weight.detach(), frozen=frozen, extra={"own": UserDict(inner=inner), "list": [0]}),
        "optimizer": {"state": {"weight": {"moment": weight}}, "param_groups": [{"params": ["weight"], "lr": 0.5}]},
    }
    found, overlapped = made.overlap.begin_state(state)
    weight += 1
    frozen += 1
    inner += 1
    state["model"]["extra"]["list"][0] = 1
    state["optimizer"]["param_groups"][0]["lr"] = 0.25
    model, optimizer = found["model"], found["optimizer"]
    assert list(map(type, (model, model["extra"]["own"]))) == [OrderedDict, UserDict]
    assert model["weight"][0] == optimizer["state"]["weight"]["moment"][0] == 1, "the live ones"
    assert model["frozen"].tolist() == [0] * 4
    assert model["extra"]["own"]["inner"].tolist() == [0, 0]
    assert model["extra"]["list"] == [0]
    assert optimizer["param_groups"] == [{"params": ["weight"], "lr": 0.5}]
    assert overlapped.size == 2 * weight.nbytes + frozen.nbytes
    caplog.set_level("INFO")
    assert made.overlap.begin_state({"model": {"weight": weight, "lock": threading.Lock()}}) is None
    assert "a _thread.lock can't be copied: cannot pickle" in caplog.text
    assert made.overlap.begin_state({"model": {"weight": weight, "large": torch.zeros(ROWS)}}) is None
    assert "much of the state is changed by others than the optimizers" in caplog.text


def test_a_latch_lets_all_go_on_however_many_wait_and_however_often_it_is_set():
    latch, gone_on = Latch(), []
    assert not latch.wait(0.01)
    waiting = [threading.Thread(target=lambda: gone_on.append(latch.wait(30))) for _ in range(20)]
    setting = [threading.Thread(target=latch.set) for _ in range(5)]
    for each in (*waiting, *setting):
        each.start()
    for each in (*waiting, *setting):
        each.join(60)
    assert gone_on == [True] * 20
    assert latch.is_set()
    assert latch.wait(0)
