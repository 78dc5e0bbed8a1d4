"""State that a sharded save pickles before it returns, and writes to a file later."""

import io
from collections import OrderedDict

import numpy as np
import pytest
import torch

from tiered_checkpoint_io.adapters.state import Rest


@pytest.mark.parametrize(
    "of_callback",
    [{"best": 0.5, "kinds": (int, torch.float32, torch.Size([2]))}, np.ones(3), torch.ones(3)],
    ids=["plain", "objects", "tensors"],
)
def test_the_file_is_that_of_torch_save_at_the_moment_of_the_save(of_callback):
    state = {"epoch": 1, "loops": OrderedDict(fit={"batches": 3}), "callbacks": {"Mine": of_callback}}
    expected = io.BytesIO()
    torch.save(state, expected)
    rest = Rest(state, {})
    state["loops"]["fit"]["batches"] = 4
    if not isinstance(of_callback, dict):
        of_callback[0] = 7
    assert rest.file() == rest.file() == expected.getvalue()
