"""A state becomes a part in memory: at once, whole, unchanged, within its room, and without new space."""

import io
import os
from collections import OrderedDict

import numpy as np
import pytest
import torch
from support.supporting import build

from tiered_checkpoint_io.adapters.state import Rest
from tiered_checkpoint_io.engine import session
from tiered_checkpoint_io.engine.checkpointer import Checkpointer
from tiered_checkpoint_io.engine.drain.events import read_events
from tiered_checkpoint_io.engine.drain.process import DrainRunner
from tiered_checkpoint_io.errors import ConfigError
from tiered_checkpoint_io.formats.image import Image
from tiered_checkpoint_io.memory.parts import reading
from tiered_checkpoint_io.model.config import TieredCheckpointConfig

MIB = 1 << 20


@pytest.fixture
def opened(memory_dir, tmp_path, monkeypatch):
    """Opens memory with a budget, for a job whose drain never gets to work."""
    monkeypatch.setattr(DrainRunner, "ensure", lambda _: None)
    made = []

    def open_memory(budget_bytes=None, keep_last=2):
        monkeypatch.setattr(session, "node_budget", lambda *_: budget_bytes)
        engine = Checkpointer(
            build(
                TieredCheckpointConfig,
                dirpath=str(tmp_path),
                memory_dir=memory_dir,
                memory_keep_last=keep_last,
                on_save_error="raise",
                max_pending=9,
            )
        )
        made.append(engine)
        return engine.session.open().tier, engine

    yield open_memory
    for engine in made:
        engine.session.release()


def state_of(step, mib=4):
    return {"w": torch.full((mib * MIB // 4,), float(step)), "global_step": step}


def save(engine, step, *, mib=4, durable=False):
    tiers = {"memory", "durable"} if durable else {"memory"}
    engine.save(state_of(step, mib), f"step={step}.ckpt", tiers=tiers, wait=False)
    return engine.session.open().tier.parts()[-1]


def steps(tier):
    return [stored.part.content.step for stored in tier.parts()]


def load(tier, stored):
    (entry,) = stored.part.content.files
    with reading(stored) as views:
        for index, (offset, length) in enumerate(entry.chunks):
            entry.check_chunk(index, views[entry.basename][offset : offset + length], tier="memory", where="x")
    return torch.load(stored.file(entry.basename), mmap=True, weights_only=True)


def test_a_steady_run_takes_no_space_and_no_new_file(opened, monkeypatch):
    tier, engine = opened(keep_last=2)
    for step in range(1, 5):
        save(engine, step)
    engine.session.open().capturer._preparing.join()
    used = tier.usage()
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: pytest.fail("space was taken again"))
    inodes = set()
    for step in range(5, 12):
        stored = save(engine, step)
        inodes.add(os.stat(stored.file(f"step={step}.ckpt")).st_ino)
        assert load(tier, stored)["w"][-1] == step
    assert len(inodes) == 3
    assert tier.usage() == pytest.approx(used, abs=MIB)


def test_short_of_room_memory_goes_below_keep_last_but_never_below_one(opened):
    tier, engine = opened(budget_bytes=22 * MIB, keep_last=3)
    for step in range(1, 8):
        save(engine, step, mib=7)
        assert steps(tier)[-1] == step
        assert 1 <= len(steps(tier)) <= 3
        assert tier.usage() <= 22 * MIB
        for stored in tier.parts():
            load(tier, stored)


def test_a_rank_that_does_not_speak_for_its_node_has_what_it_skips_noted(opened, warned, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    tier, engine = opened(budget_bytes=24 * MIB)
    save(engine, 1, durable=True)
    with warned(r"steps of memory alone are skipped: .*does not fit"):
        save(engine, 2, mib=100)
    # Said once.
    save(engine, 3, mib=100)
    assert [each["event"] for each in read_events(tier.root)] == ["skipped"] * 2


def test_a_capture_that_fails_leaves_no_part_and_gives_its_slot_back(opened, monkeypatch):
    def fails(*_, **__):
        raise ConfigError("resized")

    tier, engine = opened()
    for step in (1, 2, 3):
        save(engine, step)
    used = tier.usage()
    with monkeypatch.context() as patch:
        patch.setattr(Image, "fill", fails)
        for step in range(4, 14):
            with pytest.raises(ConfigError, match="resized"):
                save(engine, step)
    assert steps(tier) == [2, 3]
    # One more may be prepared for the next save.
    assert tier.usage() <= used + 6 * MIB
    save(engine, 14)
    assert steps(tier) == [3, 14]


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
