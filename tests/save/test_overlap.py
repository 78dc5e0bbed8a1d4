"""An overlapped capture, without a Trainer: promises of its save if training continues before the copy is done."""

import random
import threading

import numpy as np
import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.save.overlap import CHECK, Overlap, Spans, ends_of
from tiered_checkpoint_io.engine.save.saver import PartSave
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
        self.overlap = self.checkpointer.saver.overlap = Overlap(self.checkpointer.session, lambda: [self.weight])
        self.may_copy = threading.Event()

    def save(self, step, *, tiers=("memory", "durable")):
        state = {"w": self.weight, "global_step": step}
        return self.checkpointer.save(state, f"step={step}.ckpt", tiers=tiers, wait=False)

    def go_on(self):
        """Waits, as a trainer does before its optimizers step."""
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


def drawn(draw, base):
    """Returns a view of some bytes of a buffer: of any dtype, with gaps, turned, over itself, or empty."""
    whole = base.view(draw.choice([torch.uint8, torch.int16, torch.float32]))
    shape = [draw.randrange(0 if draw.random() < 0.1 else 1, 4) for _ in range(draw.randrange(4))]
    stride = [draw.randrange(7) for _ in shape]
    last = sum((count - 1) * step for count, step in zip(shape, stride, strict=True) if count)
    return whole.as_strided(shape, stride, draw.randrange(len(whole) - last))


def bytes_of(tensor):
    starts = torch.zeros(tensor.shape, dtype=torch.int64)
    for dimension, step in enumerate(tensor.stride()):
        places = torch.arange(tensor.shape[dimension]) * step
        starts = starts + places.view([-1 if each == dimension else 1 for each in range(tensor.dim())])
    size, first = tensor.element_size(), tensor.data_ptr()
    return {first + size * start + number for start in starts.flatten().tolist() for number in range(size)}


def spans_over(tensors, *, without_gaps=False):
    begins = np.array([each.data_ptr() for each in tensors], np.int64)
    ends, sizes, gaps = ends_of(tensors, begins)
    assert sizes.tolist() == [each.nbytes for each in tensors]
    if without_gaps:
        ends[gaps] = begins[gaps]
    return begins, ends


def test_a_set_of_spans_has_the_bytes_of_its_tensors():
    covered = 0
    for seed in range(300):
        draw = random.Random(seed)
        bases = [torch.zeros(256, dtype=torch.uint8) for _ in range(2)]
        owned, saved = ([drawn(draw, draw.choice(bases)) for _ in range(draw.randrange(1, 40))] for _ in range(2))
        own = set().union(*map(bytes_of, owned))
        whole = Spans(*spans_over(owned, without_gaps=True))
        # A tensor with gaps counts for none of its bytes.
        for each, is_covered in zip(saved, whole.cover(*spans_over(saved)), strict=True):
            assert not is_covered or bytes_of(each) <= own
            covered += is_covered
        around = Spans(*spans_over(owned))
        meets = around.meet(*spans_over(saved))
        assert all(met or not bytes_of(each) & own for each, met in zip(saved, meets, strict=True))
        full = [each for each in owned if each.is_contiguous() and each.numel()]
        assert whole.cover(*spans_over(full)).all()
        assert Spans(*spans_over(full)).size == len(set().union(*map(bytes_of, full)))
    assert covered > 100
