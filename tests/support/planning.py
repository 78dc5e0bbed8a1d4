"""Compares the plan of a file that is made from what was kept of an earlier save with the one that torch.save makes."""

import io
from typing import Any

import torch

from tiered_checkpoint_io.formats.image import Image, plan
from tiered_checkpoint_io.formats.layouts import Layouts


def shown(image: Image) -> tuple[Any, ...]:
    """All of a plan: the bytes around tensors, and whose storage's bytes are where."""
    regions = [(each.offset, each.nbytes, each.start, each.storage._cdata) for each in image.regions]
    return image.size, [(each.offset, bytes(each.data)) for each in image.segments], regions


def filled(image: Image) -> bytes:
    data = bytearray(image.size)
    image.fill(memoryview(data), threads=1)
    return bytes(data)


def check(layouts: Layouts, state: Any) -> None:
    wanted, got = plan(state), layouts.plan(state)
    assert shown(got) == shown(wanted)


def check_taken(layouts: Layouts, state: Any) -> None:
    """As :func:`check`, where the state may be planned later: what is no tensor changes meanwhile."""
    taken = layouts.take(state)
    if taken is None:
        check(layouts, state)
        return
    wanted = filled(plan(state))
    state["loops"]["step"] = "another"
    state["callbacks"].clear()
    state.clear()
    got = filled(layouts.plan_taken(taken))
    # What was rebuilt to be planned by torch.save may share equal strings.
    assert got == wanted or resaved(got) == resaved(wanted)


def resaved(file: bytes) -> bytes:
    return filled(plan(torch.load(io.BytesIO(file), weights_only=False)))
