"""Lightning's sharded strategies load a full checkpoint that was read for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.strategies import fsdp


@contextlib.contextmanager
def read_already(file: Path, state: Any) -> Iterator[None]:
    """While the block runs, Lightning's strategies are given what was read of this file in place of reading it.

    Theirs would unpickle anything (FSDP), or nothing but what torch lists.
    """

    def instead_of(load: Callable[..., Any]) -> Callable[..., Any]:
        return lambda opened, *args, **options: state if opened == file else load(opened, *args, **options)

    replaced = ((torch, "load"), (fsdp, "_lazy_load"))
    before = [getattr(module, name) for module, name in replaced]
    for (module, name), load in zip(replaced, before, strict=True):
        setattr(module, name, instead_of(load))
    try:
        yield
    finally:
        for (module, name), load in zip(replaced, before, strict=True):
            setattr(module, name, load)
