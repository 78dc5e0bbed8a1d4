"""Spans of memory, compared with sets of bytes."""

import random

import numpy as np
import torch

from tiered_checkpoint_io.engine.save.spans import Spans, ends_of


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


def test_an_empty_set_has_no_bytes():
    nothing, some = np.zeros(0, np.int64), np.array([0, 5])
    assert not Spans(nothing, nothing).cover(some, some + 1).any()
    assert not Spans(nothing, nothing).meet(some, some + 1).any()
